"""Steps an engine, and sends its tokens to gateway workers on their channels (`inference.wire.lm`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from inference.engine import Engine, EngineFull, RequestRejected, SequenceRequest
from inference.lm.host_channel import HostChannel, HostSequence
from inference.lm.step_watch import MAX_STEP_S, StepWatch, Wait
from inference.runtime.device import breaks_device
from inference.runtime.failure_log import FailureLog, text_of
from inference.runtime.request import TritonRequest
from inference.wire.arrays import Array
from inference.wire.frame import FRAME
from inference.wire.lm import (
    CONTROL,
    LEASE_S,
    CancelRequest,
    Ending,
    Load,
    Message,
    Open,
    Post,
    StepFrame,
    Submit,
    decode_message,
    encode_frame,
)

__all__ = ["IDLE_CHANNEL_S", "MOST_PENDING_TOKENS", "EngineHost"]

logger = logging.getLogger(__name__)

IDLE_CHANNEL_S: Final = 600.0
"""A channel without sequences ends after this long without a message; a live worker opens another one."""
MOST_PENDING_TOKENS: Final = 16_384
"""Unsent tokens of a channel at which the engine waits for the channel's worker."""


class EngineHost:
    """Owns an engine: one thread makes all calls of it, and sleeps while there is nothing to do.

    A slow worker can't make memory grow: frames beyond its window are merged, and from `most_pending` unsent tokens on
    the engine takes no further step, for any channel, until they are sent. A worker that blocks the engine for a
    lease's time loses its channel.

    Args:
        engine: the engine, which the host alone uses from now on.
        device: the engine's device.
        on_broken: called once the device is unusable, the engine can't be reset, or a step doesn't return.
        lease_s: how long a channel with sequences lives without a message from its worker.
        idle_s: how long a channel without sequences lives without a message.
        most_pending: the most tokens of a channel that may wait to be sent.
        max_step_s: the longest that a step of the engine may take.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        device: str = "cpu",
        on_broken: Callable[[str], None] = lambda reason: None,
        lease_s: float = LEASE_S,
        idle_s: float = IDLE_CHANNEL_S,
        most_pending: int = MOST_PENDING_TOKENS,
        max_step_s: float = MAX_STEP_S,
    ) -> None:
        self._engine = engine
        self._limits = engine.limits
        self._device = device
        self._on_broken = on_broken
        self._lease_s = lease_s
        self._idle_s = idle_s
        self._max_step_s = max_step_s
        self._most_pending = most_pending
        self._failures = FailureLog()
        self._changed = threading.Condition(threading.Lock())
        """Guards the attributes below, and wakes the engine's thread."""
        self._channels: dict[str, HostChannel] = {}
        self._sequences: dict[str, HostSequence] = {}
        """The running sequences of all channels, by the engine's id."""
        self._asked: list[tuple[HostSequence, bool]] = []
        """Commands for the engine, in order: a sequence, and whether to cancel it rather than submit it."""
        self._load = Load()
        self._closed = ""
        self._has_work = False
        """`Engine.has_work`; used by the engine's thread only."""
        self._watch = StepWatch(max_step_s, self._give_up)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def handle(self, requests: Sequence[TritonRequest]) -> AsyncIterator[list[dict[str, Array]]]:
        """Answer one Triton request in frames. It raises no exception, since PyTriton would answer with a traceback."""
        (request,) = requests  # the model is bound without Triton's batcher
        try:
            message = _read(request)
        except (msgspec.MsgspecError, ValueError) as error:
            yield _packed(self._refusal(f"{CONTROL}: expected a message of inference.wire.lm: {text_of(error)}"))
            return
        try:
            if isinstance(message, Open):
                async with contextlib.aclosing(self._open(message)) as frames:
                    async for frame in frames:
                        yield frame
            else:
                answer = self._post(message) if isinstance(message, Post) else self._cancel_request(message)
                if answer is not None:
                    yield _packed(answer)
        except Exception as error:
            logger.exception("a message could not be answered")
            yield _packed(self._refusal(f"internal error: {type(error).__name__}"))

    def close(self, reason: str = "the replica is ending") -> None:
        """End all channels, close the engine, and wait until its thread has ended."""
        with self._changed:
            self._end_all(reason)
        self._thread.join()

    # Handlers of messages, each in its request's event loop.

    async def _open(self, message: Open) -> AsyncGenerator[list[dict[str, Array]], None]:
        channel = HostChannel(message.channel, message.window, asyncio.get_running_loop(), time.monotonic())
        with self._changed:
            if self._closed:
                frame: StepFrame | None = self._refusal(self._closed)
            elif message.window < 1:
                frame = self._refusal(f"window: expected at least 1, got {message.window}")
            elif message.channel in self._channels:
                frame = self._refusal(f"channel: expected a new name, got {message.channel!r}")
            else:
                self._channels[message.channel] = channel
                self._changed.notify()  # the new channel may expire first
                frame = channel.take(self._load)
        try:
            while True:
                if frame is not None:
                    yield self._packed_for(channel, frame)
                    if frame.closed:
                        return
                await channel.news.wait()
                channel.news.clear()
                with self._changed:
                    channel.is_waking = False
                    if channel.end == "":
                        return
                    was_held_up = channel.held_up is not None
                    frame = channel.take(self._load) if channel.has_frame else None
                    if was_held_up and frame is not None:
                        self._changed.notify()
        finally:
            with self._changed:  # its reader is gone
                self._end_channel(channel, "")

    def _post(self, message: Post) -> StepFrame | None:
        with self._changed:
            channel = self._channels.get(message.channel)
            if channel is None:
                return self._refusal(self._closed or f"channel: unknown name {message.channel!r}")
            channel.heard.restart(time.monotonic())
            channel.acknowledge(message.acknowledged)
            room = self._room(len(message.submits))
            for submit in message.submits:
                if submit.number in channel.sequences:
                    reason = f"submits: expected new numbers, got {submit.number}"
                    self._end_channel(channel, reason)
                    return None
                sequence = HostSequence(channel, submit)
                if room <= 0:
                    channel.add_end(sequence, "full", self._full())
                    continue
                room -= 1
                channel.sequences[sequence.number] = self._sequences[sequence.id] = sequence
                self._ask(sequence)
            for number in message.cancels:
                if (found := channel.sequences.get(number)) is not None:
                    self._cancel(found)
            if message.close:
                self._end_channel(channel, "")
            channel.wake()
        return None

    def _cancel_request(self, message: CancelRequest) -> StepFrame:
        """Cancel a request's sequences. Those that end in the step under way are counted too."""
        with self._changed:
            found = [one for one in self._sequences.values() if one.submit.request_id == message.request_id]
            cancelled = sum(self._cancel(one) for one in found)
            return StepFrame(0, [], self._load, cancelled=cancelled)

    def _refusal(self, reason: str) -> StepFrame:
        return StepFrame(0, [], self._load, closed=reason)

    def _packed_for(self, channel: HostChannel, frame: StepFrame) -> list[dict[str, Array]]:
        try:
            return _packed(frame)
        except Exception as error:  # a user's engine has returned something other than numbers
            self._failures.note(error)
            reason = f"the engine's events can't be sent: {type(error).__name__}: {text_of(error)}"
            with self._changed:
                self._end_channel(channel, reason)
            frame.events, frame.closed = [], reason
            return _packed(frame)

    # Called with the lock held.

    def _room(self, wanted: int) -> int:
        """How many more sequences the engine may accept; cancelled ones are counted only if fewer than `wanted` fit.
        Computed here, so that a full queue is reported without waiting for the end of a step."""
        most = self._limits.max_sequences + self._limits.max_waiting
        room = most - len(self._sequences)
        return room if room >= wanted else room + sum(one.is_cancelled for one in self._sequences.values())

    def _full(self) -> str:
        limits = self._limits
        return (
            f"{limits.max_sequences + limits.max_waiting} sequences run or wait; "
            f"`max_sequences` is {limits.max_sequences}, `max_waiting` is {limits.max_waiting}"
        )

    def _ask(self, sequence: HostSequence, *, cancels: bool = False) -> None:
        self._asked.append((sequence, cancels))
        self._changed.notify()

    def _cancel(self, sequence: HostSequence) -> bool:
        """Have the engine cancel a sequence; False if it is cancelled already."""
        if sequence.is_cancelled:
            return False
        sequence.is_cancelled = True
        self._ask(sequence, cancels=True)
        return True

    def _end_channel(self, channel: HostChannel, reason: str) -> None:
        """End a channel and its sequences, without events for these."""
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

    def _wake_all(self) -> None:
        for channel in self._channels.values():
            channel.wake()

    def _expire(self, now: float) -> None:
        """End the channels whose workers are gone or block the engine."""
        for channel in list(self._channels.values()):
            if channel.end is not None:
                self._end_channel(channel, channel.end)
            elif channel.is_busy:
                self._expire_busy(channel, now)
            elif channel.heard.is_over(now, self._idle_s):
                # The prefix is that of an unknown channel: a live worker has lost nothing, and opens another one.
                self._end_channel(channel, f"channel: idle for {self._idle_s:g} s")

    def _expire_busy(self, channel: HostChannel, now: float) -> None:
        if channel.heard.is_over(now, self._lease_s):
            self._end_channel(channel, f"its worker was silent for {self._lease_s:g} s")
        elif channel.tokens < self._most_pending:
            channel.held_up = None
        elif channel.held_up is None:
            channel.held_up = Wait(now)
        elif channel.held_up.is_over(now, self._lease_s):
            self._end_channel(channel, f"its worker left {channel.tokens} tokens unread for {self._lease_s:g} s")

    def _may_step(self) -> bool:
        return self._has_work and all(channel.held_up is None for channel in self._channels.values())

    def _patience_s(self, now: float) -> float | None:
        """Seconds until `_expire` must be called next."""
        channels = self._channels.values()
        looks = [one.heard.next_look(self._lease_s if one.is_busy else self._idle_s) for one in channels]
        looks += [one.held_up.next_look(self._lease_s) for one in channels if one.held_up is not None]
        return max(min(looks) - now, 0.001) if looks else None

    # The watchdog's thread.

    def _give_up(self) -> None:
        reason = f"the engine: a step takes longer than `max_step_s`, {self._max_step_s:g} s"
        logger.error("%s", reason)
        try:
            with self._changed:
                self._end_all(reason)
        finally:
            self._on_broken(reason)

    # The engine's thread. A user's engine may raise SystemExit and the like, too: if they ended the thread silently,
    # the replica would hang.

    def _run(self) -> None:
        try:
            while self._prepare():
                self._step()
            self._engine.close()
        except BaseException as error:
            logger.exception("the engine's thread ended")
            reason = f"the engine: {_said(error)}"
            with self._changed:
                is_closing = bool(self._closed)
                self._end_all(reason)
            if not is_closing:
                self._on_broken(reason)
        finally:
            self._watch.stop()

    def _prepare(self) -> bool:
        """Pass on commands until the engine has a step to do; False if the host is closed."""
        while True:
            with self._changed:
                now = time.monotonic()
                self._watch.begin(now)
                if self._closed:
                    return False
                self._expire(now)
                asked, self._asked = self._asked, []
                if not asked:
                    if self._may_step():
                        return True
                    self._watch.rest()
                    self._changed.wait(self._patience_s(now))
                    continue
            self._tell(asked)
            with self._changed:
                if self._may_step():
                    return True

    def _tell(self, asked: Iterable[tuple[HostSequence, bool]]) -> None:
        for sequence, cancels in asked:
            if not cancels:
                self._submit(sequence)
            elif sequence.is_submitted:
                try:
                    is_known = self._engine.cancel(sequence.id)
                except BaseException as error:
                    self._reset(error)
                    continue
                if not is_known:
                    self._end(sequence, "error", "the engine no longer knows the sequence")
        self._look()

    def _submit(self, sequence: HostSequence) -> None:
        if sequence.is_cancelled:
            self._end(sequence, "cancelled")
            return
        submit = sequence.submit
        try:
            self._engine.submit(_request(sequence.id, submit))
        except EngineFull as error:
            self._end(sequence, "full", text_of(error))
        except RequestRejected as error:
            self._end(sequence, "rejected", text_of(error))
        except BaseException as error:
            self._failures.note(error)
            self._end(sequence, "error", _said(error))
        else:
            sequence.is_submitted = True

    def _step(self) -> None:
        try:
            events = self._engine.step()
            with self._changed:
                sequences = self._sequences
                for event in events:
                    sequence = sequences.get(event.id)
                    if sequence is None:  # its channel has ended
                        continue
                    sequence.channel.add(sequence, event)
                    if event.finish is not None:
                        self._forget(sequence)
            self._look()
        except BaseException as error:
            self._reset(error)

    def _look(self) -> None:
        """Read the engine's load, end sequences that it has lost, and wake the channels."""
        engine = self._engine
        self._has_work = engine.has_work
        load = Load(engine.active, engine.waiting, engine.cache_used)
        with self._changed:
            self._load = load
            if not self._has_work:
                for sequence in [one for one in self._sequences.values() if one.is_submitted]:
                    self._end_locked(sequence, "error", "the engine has no more work, but did not end the sequence")
            self._wake_all()

    def _end(self, sequence: HostSequence, finish: Ending, error: str = "") -> None:
        with self._changed:
            self._end_locked(sequence, finish, error)

    def _end_locked(self, sequence: HostSequence, finish: Ending, error: str) -> None:
        sequence.is_submitted = False
        if self._sequences.get(sequence.id) is sequence:
            self._forget(sequence)
            sequence.channel.add_end(sequence, finish, error)

    def _reset(self, error: BaseException) -> None:
        """End all of the engine's sequences with the error that it raised, and reset it."""
        self._failures.note(error)
        reason = _said(error)
        with self._changed:
            for sequence in [one for one in self._sequences.values() if one.is_submitted]:
                self._end_locked(sequence, "error", reason)
            self._wake_all()
        if breaks_device(reason, self._device):
            self._on_broken(reason)
        self._engine.close()
        self._look()


def _read(request: TritonRequest) -> Message:
    array = request.data.get(CONTROL)
    if array is None:
        raise ValueError("the input is missing")
    return decode_message(array.tobytes())


def _packed(frame: StepFrame) -> list[dict[str, Array]]:
    packed: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(encode_frame(frame), np.uint8)[None]
    return [{FRAME: packed}]


def _request(id: str, submit: Submit) -> SequenceRequest:
    if submit.max_tokens < 0:
        raise RequestRejected(f"max_tokens: expected at least 0, got {submit.max_tokens}")
    return SequenceRequest(
        id, submit.prompt, submit.max_tokens, submit.sampling, submit.stop_ids, submit.ignore_eos
    )  # fmt: skip


def _said(error: BaseException) -> str:
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
