"""A gateway worker's channel to one replica's engine (`headwater.wire.lm`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from headwater.wire.lm import (
    CONTROL,
    Load,
    Message,
    Open,
    Post,
    SequenceEvent,
    StepFrame,
    Submit,
    decode_frame,
    encode,
    most_bytes,
)
from headwater.wire.report import CallNote
from headwater_server.dispatch.admission import FinishRate
from headwater_server.errors import (
    RETRY_AFTER_LOST_S,
    BadRequest,
    CallableFailed,
    Cancelled,
    ContractBroken,
    HeadwaterError,
    OutOfMemory,
    QueueFull,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from headwater_server.lm.request import RequestRun, TokenSlot
from headwater_server.telemetry.recorder import LanguageModelMeter
from headwater_server.transport.replica_protocol import FrameReplicaClient, FrameRequest

__all__ = ["NOTHING", "Channel", "answers"]

logger = logging.getLogger("headwater.lm")

REMEMBERED_ENDS: Final = 256
"""Maximum number of ended sequences that a channel remembers, to detect events that arrive after a sequence's end.
Cancelled sequences are not remembered: their late events are ignored."""
LOAD_FRESH_S: Final = 1.0
"""Seconds that an engine's last reported load stays valid while the engine runs no sequence of this worker, and so
reports nothing."""
POST_BYTES: Final = 1 << 20
"""Approximate maximum size in bytes of a post's prompts, stop tokens, biases and grammars, so that a request with many
sequences doesn't delay other requests. A single sequence may be larger: the context length limits its prompt, the
vocabulary its stop tokens, `headwater_server.codecs.faults.check_size` its biases, and `headwater.engine.MAX_GRAMMAR`
its grammar."""
POST_TIMEOUT_S: Final = 6.0
"""Seconds to wait for the end of a post's call, which usually has no answer; then the channel ends. Later posts wait
meanwhile."""
_FIELD: Final = re.compile(r"([a-z][a-z0-9_.]*): ")
"""The request's field at the beginning of the reason for a rejected sequence."""
_HALF_DONE: Final = "internal error"
"""Beginning of the host's refusal of a post that the host may have handled in part."""
_numbers = itertools.count()
_WORKER: Final = uuid.uuid4().hex[:12]
"""Part of each call's name, which makes the names unique among gateway workers."""


def _call_name() -> str:
    """A new name for a call, unique among all gateway workers."""
    return f"{_WORKER}-lm-{next(_numbers)}"


def _request(message: Message, note: CallNote | None = None) -> FrameRequest:
    raw = encode(message)
    return FrameRequest([(CONTROL, "UINT8", [1, len(raw)], [raw])], note or CallNote())


async def answers(client: FrameReplicaClient, message: Post) -> list[StepFrame]:
    """Send a message, and return the frames that answer it: an empty list, unless the replica refuses the message.

    Raises:
        HeadwaterError: as `FrameReplicaClient.frames`.
        msgspec.MsgspecError: the answer is not a frame.
    """
    async with contextlib.aclosing(client.frames(_call_name(), _request(message))) as frames:
        return [decode_frame(raw) async for raw in frames]


NOTHING: Final = _request(Post(""))
"""A request without effect: no channel has the empty name, so the replica refuses it."""


class Channel:
    """A channel, from its first sequence to its end. An ended channel can't be reused.

    A channel is used in a single event loop. Submits and cancels are collected until the replica has confirmed the
    channel, until the loop's next iteration, and while a post is in flight, so that a burst of requests becomes a
    single post.

    When the channel ends with `Unavailable` (the replica ended, closed the channel, or didn't answer a post in time),
    requests with sequences that the replica never received are restarted, as `RequestRun.restart` describes; requests
    with other sequences fail. The answer to a post in flight decides which of the two applies to the sequences in this
    post. When the channel ends with another error, all its requests fail.

    Args:
        model: the deployment's name, for messages.
        client: the client of the replica.
        meter: the model's metrics.
        on_end: called with the reason when the channel has ended, before its sequences fail or are restarted.
        post_timeout_s: see `POST_TIMEOUT_S`.
    """

    def __init__(
        self,
        model: str,
        client: FrameReplicaClient,
        meter: LanguageModelMeter,
        on_end: Callable[[HeadwaterError], None],
        *,
        post_timeout_s: float = POST_TIMEOUT_S,
    ) -> None:
        self.name = _call_name()
        self.is_ended = False
        self._model = model
        self._client = client
        self._meter = meter
        self._on_end = on_end
        self._post_timeout_s = post_timeout_s
        self._loop = asyncio.get_running_loop()
        self._load = Load()
        self._others = 0
        self._heard_s = self._loop.time()
        self._sequences: dict[int, TokenSlot] = {}
        """The sequences in flight, by number."""
        self._ended: dict[int, TokenSlot] = {}
        """The last `REMEMBERED_ENDS` ended sequences, by number."""
        self._unsent: dict[int, TokenSlot] = {}
        self._posted: dict[int, TokenSlot] = {}
        """The sequences in the post in flight, by number."""
        self._cancels: list[int] = []
        self._next_number = 0
        self._frames = 0
        """Number of frames received. The first frame confirms the channel."""
        self._is_post_due = False
        self._rate = FinishRate()
        self._end_error: HeadwaterError | None = None
        """The error that ended the channel while a post was in flight, for the sequences in this post."""
        self._reading: asyncio.Task[None] | None = None
        self._posting: asyncio.Task[None] | None = None

    @property
    def load(self) -> Load:
        """The engine's last reported load, over all workers; an empty `Load` before the first report, and if the report
        is older than `LOAD_FRESH_S` and no sequence is in flight."""
        return self._load if self._is_load_fresh else Load()

    @property
    def others(self) -> int:
        """Number of other workers' sequences: all sequences in the engine's last report, minus the sequences that this
        channel had in flight then. 0 under the same conditions as in `load`."""
        return self._others if self._is_load_fresh else 0

    @property
    def _is_load_fresh(self) -> bool:
        return bool(self._sequences) or self._loop.time() < self._heard_s + LOAD_FRESH_S

    @property
    def sequences(self) -> int:
        """The number of sequences in flight, including sequences that were not sent yet."""
        return len(self._sequences)

    @property
    def has_answered(self) -> bool:
        """Whether the replica sent a frame after the first, which only confirms the channel."""
        return self._frames > 1

    @property
    def owners(self) -> set[RequestRun]:
        """The requests that have sequences in flight."""
        return {slot.owner for slot in self._sequences.values()}

    def submit(self, slot: TokenSlot) -> None:
        """Have the engine generate a sequence. The first sequence opens the channel."""
        slot.channel = self
        slot.number = self._next_number
        self._next_number += 1
        self._sequences[slot.number] = self._unsent[slot.number] = slot
        if self._reading is None:
            self._reading = self._loop.create_task(self._guarded(self._read))
        self._post_soon()

    def cancel(self, slot: TokenSlot) -> None:
        """Forget a sequence, and have the engine cancel it if it was sent. No effect on a sequence that isn't in
        flight."""
        if self._sequences.pop(slot.number, None) is None:
            return
        if self._unsent.pop(slot.number, None) is None:
            if slot.count:  # the sequence ran, so a place in the engine is free now
                self._rate.note(self._loop.time())
            self._cancels.append(slot.number)
            self._post_soon()

    def close(self, error: HeadwaterError) -> None:
        """End the channel because of `error`. Its sequences fail or are restarted: see the class. No effect on an ended
        channel."""
        if self.is_ended:
            return
        self.is_ended = True
        self._client.cancel(self.name)
        current = asyncio.current_task()
        if self._reading is not None and self._reading is not current:
            self._reading.cancel()
        held: dict[int, TokenSlot] = {}
        if self._posting is not None and self._posting is not current:
            if self._posted and isinstance(error, Unavailable):
                held = self._posted
                self._end_error = error
            else:
                self._posting.cancel()
        self._on_end(error)
        slots = [slot for slot in self._sequences.values() if slot.number not in held]
        self._sequences.clear()
        self._ended.clear()
        self._posted = held
        self._end_slots(slots, error)

    def _end_slots(self, slots: list[TokenSlot], error: HeadwaterError) -> None:
        """Restart the requests whose sequences the replica never received, if `error` is `Unavailable`; fail the
        requests of all other `slots`. Called after the channel's end."""
        unsent, self._unsent = self._unsent, {}
        is_gone = isinstance(error, Unavailable)
        had: HeadwaterError = error
        if isinstance(error, ReplicaUnreachable):  # only the last post didn't reach the replica
            had = ReplicaLost("the replica ended while it had the request", retry_after_s=RETRY_AFTER_LOST_S)
        for slot in slots:
            if slot.channel is not self or not slot.is_running:  # already restarted, or its request has ended
                continue
            if is_gone and slot.number in unsent:
                slot.owner.restart(error.again())
            else:
                slot.owner.fail(had.again())

    async def _guarded(self, work: Callable[[], Awaitable[HeadwaterError | None]]) -> None:
        """Do the work, and end the channel with the error that the work returns or raises. If the work returns None,
        the channel stays open."""
        error: HeadwaterError | None
        try:
            error = await work()
        except HeadwaterError as failure:
            error = failure
        except msgspec.MsgspecError as failure:
            self._meter.contract_violations.add()
            error = ContractBroken(f"model `{self._model}`: expected a frame, got something else: {failure}")
        except Exception as failure:
            logger.exception("model %s: the channel %s failed in the gateway", self._model, self.name)
            error = CallableFailed(f"internal error: {type(failure).__name__}")
        if error is None or self.is_ended:
            return
        if self._sequences or not isinstance(error, Unavailable):
            logger.warning("model %s: channel %s ended: %s", self._model, self.name, error.message)
        self.close(error)

    # Frames

    async def _read(self) -> HeadwaterError:
        request = _request(Open(self.name), CallNote(stream=self.name))
        async with contextlib.aclosing(self._client.frames(self.name, request)) as frames:
            async for raw in frames:
                frame = decode_frame(raw)
                self._take(frame)
                if self.is_ended:
                    break
                if frame.closed:
                    return self._unavailable(f"closed the channel to it: {frame.closed}")
        return self._unavailable("ended the channel to it")

    def _unavailable(self, fault: str) -> Unavailable:
        return Unavailable(f"model `{self._model}`: the replica {fault}", retry_after_s=RETRY_AFTER_LOST_S)

    def _take(self, frame: StepFrame) -> None:
        """Pass each event to its sequence, and note the engine's load. Does nothing with a frame that refuses the
        channel.

        Raises:
            ContractBroken: a frame was lost, or arrived twice. An event that is wrong only fails its request.
        """
        if frame.closed and not self._frames:  # the replica refused the channel, so the frame has no number in it
            return
        if frame.number != self._frames:
            self._meter.contract_violations.add()
            raise ContractBroken(f"model `{self._model}`: expected frame {self._frames}, got {frame.number}")
        self._frames += 1
        if self._frames == 1:
            self._post_soon()
        self._load = frame.load
        self._heard_s = now_s = self._loop.time()
        sequences = self._sequences
        meter = self._meter
        tokens = 0
        for event in frame.events:
            slot = sequences.get(event.number)
            if slot is None:  # the sequence has ended or was cancelled
                if (slot := self._ended.pop(event.number, None)) is not None:
                    self._break(slot, slot.after_end(event))
                continue
            try:
                slot.take(event)
            except ContractBroken as error:
                self._break(slot, error)
                continue
            if event.tokens:
                count = len(event.tokens)
                tokens += count
                if event.index == 0:
                    meter.prompt_tokens.add(slot.prompt_tokens)
                    meter.cached_prompt_tokens.add(event.cached)
                else:
                    meter.inter_token.observe_times(int((now_s - slot.heard_s) * 1e9) // count, count)
                slot.heard_s = now_s
            if event.finish is not None:
                self._finish(slot, event, now_s)
            elif event.tokens or event.prompt:
                slot.owner.note_tokens(slot, now_s)
        meter.frames.add()
        meter.generated_tokens.add(tokens)
        self._others = max(0, frame.load.active + frame.load.waiting - len(sequences))

    def _finish(self, slot: TokenSlot, event: SequenceEvent, now_s: float) -> None:
        del self._sequences[slot.number]
        self._ended[slot.number] = slot
        if len(self._ended) > REMEMBERED_ENDS:
            del self._ended[next(iter(self._ended))]
        is_whole = event.finish in ("stop", "length")
        if is_whole or slot.count:
            self._rate.note(now_s)
        if is_whole:
            if slot.has_prompt_logprobs and not slot.count:
                self._meter.prompt_tokens.add(slot.prompt_tokens)
            slot.finish = event.finish
            slot.owner.end(slot, now_s)
        else:
            slot.is_running = False
            slot.owner.fail(self._error(event, now_s))

    def _error(self, event: SequenceEvent, now_s: float) -> HeadwaterError:
        model = f"model `{self._model}`"
        if event.finish == "full":
            wait_s = self._rate.wait_s(max(1, self._load.waiting), now_s, self._share())
            return QueueFull(f"{model}: the queue is full: {event.error}", retry_after_s=wait_s)
        if event.finish == "rejected":
            field = _FIELD.match(event.error)
            return BadRequest(event.error, field=field[1] if field else None)
        if event.finish == "cancelled":
            return Cancelled("the request was cancelled")
        kind = OutOfMemory if event.finish == "out_of_memory" else CallableFailed
        return kind(event.error or f"{model}: the engine gave no reason")

    def _share(self) -> float:
        """This worker's share of the engine's sequences, above 0 and at most 1; 1 if the engine has no sequence of this
        worker."""
        sequence_count = len(self._sequences) - len(self._unsent)
        return sequence_count / max(sequence_count, self._load.active + self._load.waiting) if sequence_count else 1.0

    def _break(self, slot: TokenSlot, error: ContractBroken) -> None:
        """Fail the request of a sequence that received an unexpected event, and cancel its sequences. Other requests
        continue."""
        self._meter.contract_violations.add()
        id = slot.owner.request_id
        logger.error("model %s, request %s: %s", self._model, id, error.message, extra={"request_id": id})
        self._sequences.pop(slot.number, None)
        self._cancels.append(slot.number)
        self._post_soon()
        slot.is_running = False
        slot.owner.fail(error)

    # Posts

    def _post_soon(self) -> None:
        """Have a post sent in the next iteration of the event loop. If a post is in flight, the task that sent it
        continues with the next post. Before the first frame nothing is sent: that frame calls this method again."""
        if not self._is_post_due and self._posting is None and self._frames and not self.is_ended:
            self._is_post_due = True
            self._loop.call_soon(self._start_posting)

    def _start_posting(self) -> None:
        self._is_post_due = False
        if not self.is_ended:
            self._posting = self._loop.create_task(self._guarded(self._post))

    async def _post(self) -> HeadwaterError | None:
        try:
            while (self._unsent or self._cancels) and not self.is_ended:
                reply = answers(self._client, self._next_message())
                for frame in await asyncio.wait_for(reply, self._post_timeout_s):
                    if frame.closed:
                        if not frame.closed.startswith(_HALF_DONE):
                            self._unpost()
                        return self._unavailable(f"closed the channel to it: {frame.closed}")
                for slot in self._posted.values():
                    slot.forget_spec()
                if not self.is_ended:
                    self._posted = {}
            self._posting = None
            return None
        except ReplicaUnreachable:
            self._unpost()
            raise
        except asyncio.TimeoutError:
            return self._unavailable(f"didn't answer a message for {self._post_timeout_s:g} s")
        finally:
            if self._end_error is not None:
                self._end_slots([*self._posted.values(), *self._unsent.values()], self._end_error)
                self._posted = {}

    def _next_message(self) -> Post:
        """A post with all cancels, and with as many unsent sequences as fit into `POST_BYTES`, in order and at least
        one, if there is one. Values that several sequences share count once."""
        cancels, self._cancels, self._posted = self._cancels, [], {}
        submits: list[Submit] = []
        size_bytes, counted = 0, set[int]()
        for number, slot in list(self._unsent.items()):
            submit = slot.submit()
            added = sum(most_bytes(value) for value in submit.shared if id(value) not in counted)
            size_bytes += added
            if submits and added and size_bytes > POST_BYTES:
                break
            counted.update(map(id, submit.shared))
            submits.append(submit)
            self._posted[number] = self._unsent.pop(number)
        return Post(self.name, submits, cancels)

    def _unpost(self) -> None:
        """Mark the sequences in the post in flight as unsent again: the replica handled nothing of this post."""
        self._unsent = self._posted | self._unsent
        self._posted = {}
