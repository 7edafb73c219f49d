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
from headwater_server.transport.protocol import FrameReplicaClient, FrameRequest

__all__ = ["NOTHING", "Channel", "answers"]

logger = logging.getLogger("headwater.lm")

REMEMBERED_ENDS: Final = 256
"""How many ended sequences a channel remembers, to notice events after an end."""
LOAD_FRESH_S: Final = 1.0
"""How long an engine's reported load counts while it has none of our sequences, and so reports nothing."""
POST_BYTES: Final = 1 << 20
"""About the size of a post, so that no request's sequences hold up those of others. A single sequence may need
more: the context bounds its prompt, the vocabulary its stop tokens, `headwater_server.codecs.faults.check_size` its
biases."""
POST_TIMEOUT_S: Final = 6.0
"""How long a post may go unanswered; the posts after it wait."""
_FIELD: Final = re.compile(r"([a-z][a-z0-9_.]*): ")
_HALF_DONE: Final = "internal error"
"""How the host's refusal of a post begins if it may have handled a part of it."""
_numbers = itertools.count()
_WORKER: Final = uuid.uuid4().hex[:12]
"""Makes the names of calls unique among gateway workers."""


def _call_name() -> str:
    """A name that no call to any replica has had."""
    return f"{_WORKER}-lm-{next(_numbers)}"


def _request(message: Message, note: CallNote | None = None) -> FrameRequest:
    raw = encode(message)
    return FrameRequest([(CONTROL, "UINT8", [1, len(raw)], [raw])], note or CallNote())


async def answers(client: FrameReplicaClient, message: Post) -> list[StepFrame]:
    """Send a message, and return the frames that answer it.

    Raises:
        HeadwaterError: as `FrameReplicaClient.frames`.
        msgspec.MsgspecError: the answer is not a frame.
    """
    async with contextlib.aclosing(client.frames(_call_name(), _request(message))) as frames:
        return [decode_frame(raw) async for raw in frames]


NOTHING: Final = _request(Post(""))
"""A request without effect: no channel has this name."""


class Channel:
    """One channel, from its first sequence to its end; after that, another one must be made.

    Everything happens in one event loop. Submits and cancels gather for a turn of the loop, and while a post is on its
    way, so a burst of requests is one post.

    When the channel ends because the replica or its channel is gone, sequences that the replica never had are started
    again elsewhere, and the others fail. For the sequences in a post on its way, the answer to the post decides.

    Args:
        model: the deployment's name, for messages.
        client: the replica's.
        meter: the model's.
        on_end: called with the reason when the channel has ended, before its sequences learn of it.
        post_timeout_s: how long a post may go unanswered.
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
        """The sequences under way, by number."""
        self._ended: dict[int, TokenSlot] = {}
        """The last `REMEMBERED_ENDS` that ended."""
        self._unsent: dict[int, TokenSlot] = {}
        self._posted: dict[int, TokenSlot] = {}
        """The sequences in the post on its way."""
        self._cancels: list[int] = []
        self._next_number = 0
        self._frames = 0
        """Frames received; the first one confirms the channel."""
        self._is_post_due = False
        self._rate = FinishRate()
        self._end_error: HeadwaterError | None = None
        """Why the channel has ended, for the sequences in the post on its way."""
        self._reading: asyncio.Task[None] | None = None
        self._posting: asyncio.Task[None] | None = None

    @property
    def load(self) -> Load:
        """The engine's load as last reported, or none if that was long ago."""
        return self._load if self._is_load_fresh else Load()

    @property
    def others(self) -> int:
        """The engine's sequences of other workers, as last reported."""
        return self._others if self._is_load_fresh else 0

    @property
    def _is_load_fresh(self) -> bool:
        return bool(self._sequences) or self._loop.time() < self._heard_s + LOAD_FRESH_S

    @property
    def sequences(self) -> int:
        """The number of sequences under way."""
        return len(self._sequences)

    @property
    def has_answered(self) -> bool:
        """Whether anything followed the frame that opens it."""
        return self._frames > 1

    @property
    def owners(self) -> set[RequestRun]:
        """The requests that have sequences under way."""
        return {slot.owner for slot in self._sequences.values()}

    def submit(self, slot: TokenSlot) -> None:
        """Have the engine generate a sequence."""
        slot.channel = self
        slot.number = self._next_number
        self._next_number += 1
        self._sequences[slot.number] = self._unsent[slot.number] = slot
        if self._reading is None:
            self._reading = self._loop.create_task(self._guarded(self._read))
        self._post_soon()

    def cancel(self, slot: TokenSlot) -> None:
        """Forget a sequence, and have the engine cancel it."""
        if self._sequences.pop(slot.number, None) is None:
            return
        if self._unsent.pop(slot.number, None) is None:
            if slot.count:  # it ran, so its place is free now
                self._rate.note(self._loop.time())
            self._cancels.append(slot.number)
            self._post_soon()

    def close(self, error: HeadwaterError) -> None:
        """End the channel, and its sequences with this error."""
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
        """After the channel's end: restart the sequences that the replica never had, and fail the others."""
        unsent, self._unsent = self._unsent, {}
        is_gone = isinstance(error, Unavailable)
        had: HeadwaterError = error
        if isinstance(error, ReplicaUnreachable):  # only the last message did not reach it
            had = ReplicaLost("the replica ended while it had the request", retry_after_s=RETRY_AFTER_LOST_S)
        for slot in slots:
            if slot.channel is not self or not slot.is_running:  # already restarted, or ended with its request
                continue
            if is_gone and slot.number in unsent:
                slot.owner.restart(error.again())
            else:
                slot.owner.fail(had.again())

    async def _guarded(self, work: Callable[[], Awaitable[HeadwaterError | None]]) -> None:
        """Do the work, and end the channel with the error that the work returns or raises."""
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

    def _unavailable(self, what: str) -> Unavailable:
        return Unavailable(f"model `{self._model}`: the replica {what}", retry_after_s=RETRY_AFTER_LOST_S)

    def _take(self, frame: StepFrame) -> None:
        """Pass each event to its sequence.

        Raises:
            ContractBroken: a frame was lost, or came twice.
        """
        if frame.closed and not self._frames:  # refused, by a frame that belongs to no channel
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
            if slot is None:  # ended, or else cancelled meanwhile
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
        """This worker's share of the engine's sequences."""
        own = len(self._sequences) - len(self._unsent)
        return own / max(own, self._load.active + self._load.waiting) if own else 1.0

    def _break(self, slot: TokenSlot, error: ContractBroken) -> None:
        """Fail the request of an event that doesn't follow the last one; other requests go on."""
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
        """Post at the end of this turn of the event loop, or after the post on its way."""
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
                asked = answers(self._client, self._next_message())
                for frame in await asyncio.wait_for(asked, self._post_timeout_s):
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
        """Of the unsent sequences as many as a message of `POST_BYTES` holds, and at least one."""
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
        """Take back the post on its way, of which the replica handled nothing."""
        self._unsent = self._posted | self._unsent
        self._posted = {}
