"""Steps an engine, and sends its tokens to gateway workers on their channels (`headwater.wire.lm`)."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from functools import partial

import msgspec
import numpy as np

from headwater.engine import Engine, EngineFull, RequestRejected, SequenceRequest
from headwater.errors import DeclarationError
from headwater.lm.host_channel import ChannelLimits, HostChannel, HostSequence
from headwater.lm.step_watch import MAX_STEP_S, StepWatch
from headwater.runtime.channel import StreamChannels
from headwater.runtime.device import breaks_device
from headwater.runtime.failure_log import FailureLog, text_of
from headwater.runtime.request import TritonRequest, read_note
from headwater.runtime.stream_control import StreamControl
from headwater.wire.arrays import Array
from headwater.wire.frame import FRAME
from headwater.wire.lm import (
    CONTROL,
    Ending,
    Load,
    Message,
    Open,
    Post,
    StepFrame,
    Submit,
    decode_message,
    encode,
)

__all__ = ["EngineHost"]

logger = logging.getLogger(__name__)

_CHANNEL_LIMITS = ChannelLimits()


class EngineHost:
    """Owns an engine: a single thread makes all calls to the engine, and sleeps while there is nothing to do.

    A slow worker can't make memory grow: while it is behind by a window (`StreamControl.is_full`), further steps are
    merged, and when a channel has `ChannelLimits.most_pending` unsent tokens, the engine takes no further step, for any
    channel, until these are sent. A worker that blocks the engine for `ChannelLimits.blocked_s` loses its channel.

    Args:
        engine: the engine; from now on only the host may use it.
        device: the engine's device.
        on_broken: called with the reason when the device is unusable, the engine can't be reset or read, or a step
            takes longer than `max_step_s`.
        channel_limits: how far a worker may be behind.
        max_step_s: the longest that a step may take with the commands before the step, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        device: str = "cpu",
        on_broken: Callable[[str], None] = lambda reason: None,
        channel_limits: ChannelLimits = _CHANNEL_LIMITS,
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        self._engine = engine
        running, waiting = engine.limits.max_sequences, engine.limits.max_waiting
        self._most_sequences = limit = running + waiting
        self._full = f"{limit} sequences run or wait; `max_sequences` is {running}, `max_waiting` is {waiting}"
        self._device = device
        self._on_broken = on_broken
        self._channel_limits = channel_limits
        self.max_step_s = max_step_s
        self._failures = FailureLog()
        self._changed = threading.Condition(threading.Lock())
        """Guards the channels, sequences, commands, load and `_closed`, and wakes the engine's thread."""
        self._streams = StreamChannels()
        self._channels: dict[str, HostChannel] = {}
        self._sequences: dict[str, HostSequence] = {}
        """All channels' sequences that have not ended, by the engine's id."""
        self._commands: list[tuple[HostSequence, bool]] = []
        """Commands for the engine, in order: a sequence, and whether to cancel it rather than submit it."""
        self._load = Load()
        self._closed = ""
        """Why the host takes no more messages; empty while it does."""
        self._has_work = False
        """`Engine.has_work`; used by the engine's thread only."""
        self._watch = StepWatch(max_step_s, self._give_up)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def handle(self, requests: Sequence[TritonRequest]) -> AsyncIterator[list[dict[str, Array]]]:
        """Answer a Triton request with frames, with parcels of frames, or not at all, depending on its note. The method
        raises no exception, since Triton would send the traceback as the answer."""
        (request,) = requests  # the model is bound without Triton's batcher
        try:
            note, message = read_note(request), _read(request)
        except (DeclarationError, msgspec.MsgspecError, ValueError) as error:
            reason = f"{CONTROL}: expected a message of headwater.wire.lm: {text_of(error)}"
            yield [{FRAME: _packed(_refusal(reason))}]
            return
        answers = self._streams.answers(note, partial(self._frames, message))
        if answers is not None:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield [{FRAME: answer}]

    def close(self, reason: str = "the replica is ending") -> None:
        """End all channels, close the engine, and wait until its thread has ended."""
        with self._changed:
            self._end_all(reason)
        self._thread.join()

    # Message handlers; they run in the event loop that handles Triton's requests.

    async def _frames(self, message: Message, control: StreamControl) -> AsyncGenerator[Array, None]:
        """The frames that answer a message."""
        try:
            if isinstance(message, Open):
                async with contextlib.aclosing(self._open(message, control)) as frames:
                    async for frame in frames:
                        yield frame
            else:
                answer = self._post(message)
                if answer is not None:
                    yield _packed(answer)
        except Exception as error:
            logger.exception("a message could not be answered")
            yield _packed(_refusal(f"internal error: {type(error).__name__}"))

    async def _open(self, message: Open, control: StreamControl) -> AsyncGenerator[Array, None]:
        channel = HostChannel(message.channel, self._channel_limits)
        with self._changed:
            if self._closed:
                frame: StepFrame | None = _refusal(self._closed)
            elif message.channel in self._channels:
                frame = _refusal(f"channel: expected a new name, got {message.channel!r}")
            else:
                self._channels[message.channel] = channel
                frame = channel.take(self._load)
        try:
            while True:
                if frame is not None:
                    yield self._packed_for(channel, frame)
                    if frame.closed:
                        return
                if not await control.wait(channel.news):
                    return
                channel.news.clear()
                with self._changed:
                    channel.is_waking = False
                    if channel.held_up is not None:  # and so has a frame to take
                        self._changed.notify()
                    frame = channel.take(self._load) if channel.has_frame else None
        finally:
            with self._changed:  # nobody reads the channel any more
                self._end_channel(channel, "")

    def _post(self, message: Post) -> StepFrame | None:
        with self._changed:
            channel = self._channels.get(message.channel)
            if channel is None:
                return _refusal(self._closed or f"channel: unknown name {message.channel!r}")
            capacity = self._capacity(len(message.submits))
            for submit in message.submits:
                if submit.number in channel.sequences:
                    self._end_channel(channel, f"submits: expected new numbers, got {submit.number}")
                    return None
                sequence = HostSequence(channel, submit)
                if capacity <= 0:
                    channel.add_end(sequence, "full", self._full)
                    continue
                capacity -= 1
                channel.sequences[sequence.number] = self._sequences[sequence.id] = sequence
                self._commands.append((sequence, False))
            for number in message.cancels:
                if (target := channel.sequences.get(number)) is not None:
                    self._cancel(target)
            channel.wake()
            if message.submits:
                self._changed.notify()
        return None

    def _packed_for(self, channel: HostChannel, frame: StepFrame) -> Array:
        try:
            return _packed(frame)
        except Exception as error:  # a user's engine has tokens or a load that are not numbers
            self._failures.note(error)
            reason = f"the engine's events can't be sent: {type(error).__name__}: {text_of(error)}"
            with self._changed:
                self._end_channel(channel, reason)
            frame.events, frame.load, frame.closed = [], Load(), reason
            return _packed(frame)

    # Called with the lock held.

    def _capacity(self, wanted: int) -> int:
        """How many more sequences the engine may accept. The capacity that cancelled sequences will free is counted
        only if fewer than `wanted` fit without it. Computed here, so that a full queue is reported without waiting for
        the end of a step."""
        capacity = self._most_sequences - len(self._sequences)
        if capacity < wanted:
            capacity += sum(sequence.is_cancelled for sequence in self._sequences.values())
        return capacity

    def _cancel(self, sequence: HostSequence) -> None:
        """Have the engine cancel a sequence, unless it is cancelled already."""
        if not sequence.is_cancelled:
            sequence.is_cancelled = True
            self._commands.append((sequence, True))
            self._changed.notify()

    def _end_channel(self, channel: HostChannel, reason: str) -> None:
        """End a channel and its sequences, without sending events for the sequences."""
        if self._channels.get(channel.name) is not channel:
            return
        del self._channels[channel.name]
        for sequence in channel.sequences.values():
            del self._sequences[sequence.id]
            self._cancel(sequence)
        channel.sequences.clear()
        channel.end = reason
        channel.wake()
        self._changed.notify()

    def _end_all(self, reason: str) -> None:
        self._closed = self._closed or reason
        for channel in list(self._channels.values()):
            self._end_channel(channel, reason)
        self._changed.notify()

    def _forget(self, sequence: HostSequence) -> None:
        sequence.is_submitted = False
        del self._sequences[sequence.id]
        del sequence.channel.sequences[sequence.number]

    def _end(self, sequence: HostSequence, finish: Ending, error: str) -> None:
        sequence.is_submitted = False
        if self._sequences.get(sequence.id) is sequence:
            self._forget(sequence)
            sequence.channel.add_end(sequence, finish, error)

    def _end_submitted(self, error: str) -> None:
        for sequence in [candidate for candidate in self._sequences.values() if candidate.is_submitted]:
            self._end(sequence, "error", error)

    def _expire(self, now: float) -> None:
        """End the channels whose workers have blocked the engine for too long."""
        for channel in list(self._channels.values()):
            if (reason := channel.overdue(now)) is not None:
                self._end_channel(channel, reason)

    def _may_step(self) -> bool:
        return self._has_work and all(channel.held_up is None for channel in self._channels.values())

    # The watchdog's thread.

    def _give_up(self) -> None:
        reason = f"the engine: a step takes longer than `max_step_s`, {self.max_step_s:g} s"
        logger.error("%s", reason)
        try:
            with self._changed:
                self._end_all(reason)
        finally:
            self._on_broken(reason)

    # The engine's thread. It catches BaseException: if the SystemExit of a user's engine ended the thread silently, the
    # replica would hang.

    def _run(self) -> None:
        try:
            while self._prepare():
                self._step()
            self._engine.close()
        except BaseException as error:
            logger.exception("the engine's thread ended")
            reason = f"the engine: {_described(error)}"
            with self._changed:
                is_closing = bool(self._closed)
                self._end_all(reason)
            if not is_closing:
                self._on_broken(reason)
        finally:
            self._watch.stop()

    def _prepare(self) -> bool:
        """Pass commands to the engine until it has a step to do; False if the host is closed."""
        while True:
            with self._changed:
                now = time.monotonic()
                self._watch.begin(now)
                if self._closed:
                    return False
                self._expire(now)
                commands, self._commands = self._commands, []
                if not commands:
                    if self._may_step():
                        return True
                    self._watch.rest()
                    self._changed.wait(_timeout_s(self._channels.values(), now))
                    continue
            self._pass_on(commands)
            with self._changed:
                if self._may_step():
                    return True

    def _pass_on(self, commands: Iterable[tuple[HostSequence, bool]]) -> None:
        for sequence, cancels in commands:
            end = self._cancel_submitted(sequence) if cancels else self._submit(sequence)
            if end is not None:
                with self._changed:
                    self._end(sequence, *end)
        self._look()

    def _submit(self, sequence: HostSequence) -> tuple[Ending, str] | None:
        """Submit a sequence; if it ends at once, return how and why."""
        if sequence.is_cancelled:
            return "cancelled", ""
        try:
            self._engine.submit(_request(sequence.id, sequence.submit))
        except (EngineFull, RequestRejected) as error:
            return "full" if isinstance(error, EngineFull) else "rejected", text_of(error)
        except BaseException as error:
            self._failures.note(error)
            reason = _described(error)
            return None if self._is_lost(reason) else ("error", reason)
        sequence.is_submitted = True
        return None

    def _cancel_submitted(self, sequence: HostSequence) -> tuple[Ending, str] | None:
        try:
            if sequence.is_submitted and not self._engine.cancel(sequence.id):
                return "error", "the engine no longer knows the sequence"
        except BaseException as error:
            self._reset(error)
        return None

    def _step(self) -> None:
        try:
            events = self._engine.step()
            for event in events:
                if event.finish == "error" and self._is_lost(event.error):
                    return
            with self._changed:
                sequences = self._sequences
                for event in events:
                    if (sequence := sequences.get(event.id)) is not None:  # otherwise its channel has ended
                        sequence.channel.add(sequence, event)
                        if event.finish is not None:
                            self._forget(sequence)
            self._look()
        except BaseException as error:
            self._reset(error)

    def _look(self) -> None:
        """Read the engine's load, end sequences that the engine has lost, and wake the channels."""
        engine = self._engine
        self._has_work = engine.has_work
        load = Load(engine.active, engine.waiting, engine.cache_used)
        with self._changed:
            self._load = load
            if not self._has_work:
                self._end_submitted("the engine has no more work, but did not end the sequence")
            for channel in self._channels.values():
                channel.wake()

    def _reset(self, error: BaseException) -> None:
        """End all submitted sequences with the error that the engine raised, and reset the engine by `Engine.close`,
        unless `_is_lost`."""
        self._failures.note(error)
        reason = _described(error)
        if self._is_lost(reason):
            return
        with self._changed:
            self._end_submitted(reason)
            for channel in self._channels.values():
                channel.wake()
        self._engine.close()
        self._look()

    def _is_lost(self, reason: str) -> bool:
        """Whether an error has made the device unusable. If so, all channels end, as if the replica were lost, because
        no sequence is at fault; and `on_broken` is called."""
        if not breaks_device(reason, self._device):
            return False
        with self._changed:
            self._end_all(reason)
        self._on_broken(reason)
        return True


def _read(request: TritonRequest) -> Message:
    array = request.data.get(CONTROL)
    if array is None:
        raise ValueError("the input is missing")
    return decode_message(array.tobytes())


def _timeout_s(channels: Iterable[HostChannel], now: float) -> float | None:
    """Seconds until `EngineHost._expire` must be called next; None: not before the next step."""
    looks = [look for channel in channels if (look := channel.next_look()) is not None]
    return max(min(looks) - now, 0.001) if looks else None


def _refusal(reason: str) -> StepFrame:
    return StepFrame(0, [], Load(), closed=reason)


def _packed(frame: StepFrame) -> Array:
    return np.frombuffer(encode(frame), np.uint8)[None]


def _request(id: str, submit: Submit) -> SequenceRequest:
    if submit.max_tokens < 0:
        raise RequestRejected(f"max_tokens: expected at least 0, got {submit.max_tokens}")
    return SequenceRequest(
        id,
        submit.prompt,
        submit.max_tokens,
        submit.sampling,
        submit.stop_ids,
        submit.ignore_eos,
        submit.cache_scope,
        submit.grammar,
        submit.prompt_logprobs,
    )


def _described(error: BaseException) -> str:
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
