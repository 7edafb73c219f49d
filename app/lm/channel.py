"""A gateway worker's channel to one replica's engine: its sequences, and what both sides say (`inference.wire.lm`)."""

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

from app.dispatch.admission import FinishRate
from app.errors import (
    RETRY_AFTER_LOST_S,
    BadRequest,
    CallableFailed,
    Cancelled,
    ContractBroken,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from app.lm.sequence import SequenceOwner, TokenSlot
from app.telemetry.recorder import LanguageModelMeter
from app.transport.protocol import FrameReplicaClient, FrameRequest
from inference.wire.lm import (
    CONTROL,
    LEASE_S,
    RENEW_S,
    WINDOW,
    Load,
    Message,
    Open,
    Post,
    SequenceEvent,
    StepFrame,
    decode_frame,
    encode,
)
from inference.wire.report import CallNote

__all__ = ["NOTHING", "Channel", "call_name", "control_request"]

logger = logging.getLogger("headwater.lm")

REMEMBERED_ENDS: Final = 256
"""How many of the sequences that ended last are known, so that what comes after an end is seen."""
LOAD_FRESH_S: Final = 1.0
"""How long what an engine said of its load holds, if it has nothing of ours that would have it say more."""
TIMER_RESOLUTION_S: Final = 0.001
_FIELD: Final = re.compile(r"([a-z][a-z0-9_]*): ")
_HALF_DONE: Final = "internal error"
"""How the host begins its refusal of a post of which it may have taken in some."""
_numbers = itertools.count()
_WORKER: Final = uuid.uuid4().hex[:12]
"""Makes names of calls unique among gateway workers."""


def call_name() -> str:
    """A name that no call in the whole server has had."""
    return f"{_WORKER}-lm-{next(_numbers)}"


def control_request(message: Message) -> FrameRequest:
    """The call that carries a message."""
    raw = encode(message)
    return FrameRequest([(CONTROL, "UINT8", [1, len(raw)], [raw])], CallNote())


NOTHING: Final = control_request(Post(""))
"""Asks for nothing: for a channel that there isn't."""


class Channel:
    """One channel, from its opening, with the first sequence, to its end; then another must be made.

    Everything happens in one event loop. What is to be said gathers for a turn of the loop, and while another message
    is on its way: a burst of requests is one message.

    When it ends because the replica or its channel is gone, what the replica never had is restarted elsewhere, and the
    rest fails. Which of it is what a message on its way carries is known once that is answered.

    Args:
        model: the deployment's name, for messages.
        client: of the replica.
        meter: where to count.
        on_end: called with the reason when the channel can't be used any more, before its sequences learn of it.
        window: frames that may be on their way without having been acknowledged.
        renew_s: how often to say that this worker is there, while sequences are under way.
        lease_s: how long a message may go unanswered.
    """

    def __init__(
        self,
        model: str,
        client: FrameReplicaClient,
        meter: LanguageModelMeter,
        on_end: Callable[[HeadwaterError], None],
        *,
        window: int = WINDOW,
        renew_s: float = RENEW_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self.name = call_name()
        self.is_ended = False
        self._model = model
        self._client = client
        self._meter = meter
        self._on_end = on_end
        self._window = window
        self._renew_s = renew_s
        self._lease_s = lease_s
        self._loop = asyncio.get_running_loop()
        self._load = Load()
        self._others = 0
        self._heard_s = self._loop.time()
        self._sequences: dict[int, TokenSlot] = {}
        """Those under way."""
        self._ended: dict[int, TokenSlot] = {}
        """Those that ended last."""
        self._unsent: dict[int, TokenSlot] = {}
        self._posted: dict[int, TokenSlot] = {}
        """Those in the message that is on its way."""
        self._cancels: list[int] = []
        self._next_number = 0
        self._frames = 0
        """Taken in; the first says that the channel is there."""
        self._acknowledged = 0
        self._is_post_due = False
        self._must_post = False
        """Whether something is to be said, be it only that we are there."""
        self._posted_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        """For renewals and for messages that aren't answered."""
        self._rate = FinishRate()
        self._end_error: HeadwaterError | None = None
        """Why the channel has ended, for those that were on their way then."""
        self._reading: asyncio.Task[None] | None = None
        self._posting: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    @property
    def load(self) -> Load:
        """The engine's, as last reported; none, if that was long ago."""
        return self._load if self._is_load_fresh else Load()

    @property
    def others(self) -> int:
        """Sequences that the engine had then from other workers."""
        return self._others if self._is_load_fresh else 0

    @property
    def _is_load_fresh(self) -> bool:
        return bool(self._sequences) or self._loop.time() < self._heard_s + LOAD_FRESH_S

    @property
    def sequences(self) -> int:
        """How many are under way."""
        return len(self._sequences)

    @property
    def owners(self) -> set[SequenceOwner]:
        """Requests that have sequences under way here."""
        return {slot.owner for slot in self._sequences.values()}

    def submit(self, slot: TokenSlot) -> None:
        """Have a sequence generated."""
        slot.channel = self
        slot.is_sent = False
        slot.number = self._next_number
        self._next_number += 1
        self._sequences[slot.number] = self._unsent[slot.number] = slot
        if self._reading is None:
            self._reading = self._loop.create_task(self._guarded(self._read))
        self._post_soon()

    def cancel(self, slot: TokenSlot) -> None:
        """Nobody wants more of a sequence: it is forgotten here at once, and then at the engine."""
        if self._sequences.pop(slot.number, None) is None:
            return
        if self._unsent.pop(slot.number, None) is None:
            if slot.count:  # it ran, and leaves its place to another
                self._rate.note(self._loop.time())
            self._cancels.append(slot.number)
            self._post_soon()

    def close(self, error: HeadwaterError) -> None:
        """End the channel, and its sequences with this error; the replica isn't told."""
        if self.is_ended:
            return
        self.is_ended = True
        self._disarm()
        current = asyncio.current_task()
        if self._reading is not None and self._reading is not current:
            self._reading.cancel()
        held: dict[int, TokenSlot] = {}
        if self._posting is not None and self._posting is not current:
            if self._posted and isinstance(error, Unavailable):
                held = self._posted
                self._end_error = error
                left_s = self._posted_s + self._lease_s - self._loop.time()
                self._timer = self._loop.call_later(left_s, self._posting.cancel)
            else:
                self._posting.cancel()
        self._on_end(error)
        slots = [slot for slot in self._sequences.values() if slot.number not in held]
        self._sequences.clear()
        self._ended.clear()
        self._posted = held
        self._let_go(slots, error)

    def _let_go(self, slots: list[TokenSlot], error: HeadwaterError) -> None:
        """Of a channel that has ended: restart what the replica never had, and fail the rest."""
        unsent, self._unsent = self._unsent, {}
        is_gone = isinstance(error, Unavailable)
        had: HeadwaterError = error
        if isinstance(error, ReplicaUnreachable):  # it was by a message only
            had = ReplicaLost("the replica ended while it had the request", retry_after_s=RETRY_AFTER_LOST_S)
        for slot in slots:
            if slot.channel is not self or not slot.is_running:  # a neighbour's failure was its own
                continue
            if is_gone and slot.number in unsent:
                slot.owner.restart(error.again())
            else:
                slot.owner.fail(had.again())

    async def _guarded(self, work: Callable[[], Awaitable[HeadwaterError | None]]) -> None:
        """Whatever ends a call that the channel lives by ends the channel."""
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
        if not isinstance(error, Unavailable):  # the other side may think that it goes on
            await self._farewell()

    async def _farewell(self) -> None:
        async def say() -> None:
            request = control_request(Post(self.name, close=True))
            async with contextlib.aclosing(self._client.frames(call_name(), request)) as frames:
                async for _ in frames:
                    pass

        with contextlib.suppress(HeadwaterError, asyncio.TimeoutError):
            await asyncio.wait_for(say(), self._lease_s)

    # What the replica says

    async def _read(self) -> HeadwaterError:
        request = control_request(Open(self.name, self._window))
        async with contextlib.aclosing(self._client.frames(self.name, request)) as frames:
            async for raw in frames:
                frame = decode_frame(raw)
                self._take(frame)
                if self.is_ended:
                    break
                if frame.closed:
                    return self._closed(frame)
        return Unavailable(
            f"model `{self._model}`: the replica ended the channel to it", retry_after_s=RETRY_AFTER_LOST_S
        )

    def _closed(self, frame: StepFrame) -> Unavailable:
        return Unavailable(
            f"model `{self._model}`: the replica closed the channel to it: {frame.closed}",
            retry_after_s=RETRY_AFTER_LOST_S,
        )

    def _take(self, frame: StepFrame) -> None:
        """Hand each event to its sequence.

        Raises:
            ContractBroken: a frame was lost, or came twice.
        """
        if frame.closed and not self._frames:  # it is refused, by a frame of no channel
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
            if slot is None:  # cancelled meanwhile, if it hasn't ended
                if event.number in self._ended:
                    self._break(self._ended.pop(event.number), event)
                continue
            try:
                slot.take(event)
            except ContractBroken as error:
                self._break(slot, event, error)
                continue
            if event.tokens:
                count = len(event.tokens)
                tokens += count
                if event.index == 0:
                    meter.prompt_tokens.add(slot.prompt_tokens)
                else:
                    meter.inter_token.observe_times(int((now_s - slot.heard_s) * 1e9) // count, count)
                slot.heard_s = now_s
                if event.finish is None:
                    slot.owner.hear(slot, now_s)
            if event.finish is not None:
                self._finish(slot, event, now_s)
        meter.frames.add()
        meter.generated_tokens.add(tokens)
        self._others = max(0, frame.load.active + frame.load.waiting - len(sequences))
        if self._frames - self._acknowledged >= max(1, self._window // 2):
            self._post_soon()

    def _finish(self, slot: TokenSlot, event: SequenceEvent, now_s: float) -> None:
        del self._sequences[slot.number]
        self._ended[slot.number] = slot
        if len(self._ended) > REMEMBERED_ENDS:
            del self._ended[next(iter(self._ended))]
        if event.finish in ("stop", "length"):
            self._rate.note(now_s)
            slot.finish = event.finish
            slot.owner.end(slot, now_s)
            return
        if slot.count:
            self._rate.note(now_s)
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
        return CallableFailed(event.error or f"{model}: the engine gave no reason")

    def _share(self) -> float:
        """Which part of the engine's sequences is this worker's."""
        own = len(self._sequences) - len(self._unsent)
        return own / max(own, self._load.active + self._load.waiting) if own else 1.0

    def _break(self, slot: TokenSlot, event: SequenceEvent, error: ContractBroken | None = None) -> None:
        """An event is not in sequence: that ends its request, while its neighbours go on."""
        error = error or slot.after_end(event)
        self._meter.contract_violations.add()
        request_id = slot.owner.request_id
        logger.error(
            "model %s, request %s: %s", self._model, request_id, error.message, extra={"request_id": request_id}
        )
        self._sequences.pop(slot.number, None)
        self._cancels.append(slot.number)
        self._post_soon()
        slot.is_running = False
        slot.owner.fail(error)

    # What we say

    def _post_soon(self) -> None:
        """Say what is to be said at the end of this turn of the event loop, or after what is being said."""
        self._must_post = True
        if not self._is_post_due and self._posting is None and self._frames and not self.is_ended:
            self._is_post_due = True
            self._loop.call_soon(self._start_posting)

    def _start_posting(self) -> None:
        self._is_post_due = False
        if not self.is_ended:
            self._posted_s = self._loop.time()
            self._posting = self._loop.create_task(self._guarded(self._post))

    async def _post(self) -> HeadwaterError | None:
        try:
            while self._must_post and not self.is_ended:
                message = self._next_message()
                async with contextlib.aclosing(self._client.frames(call_name(), control_request(message))) as frames:
                    async for raw in frames:
                        frame = decode_frame(raw)
                        if frame.closed:
                            if not frame.closed.startswith(_HALF_DONE):
                                self._unpost()
                            return self._closed(frame)
                for slot in self._posted.values():
                    slot.forget_spec()
                if not self.is_ended:
                    self._posted = {}
            self._posting = None
            return None
        except ReplicaUnreachable:
            self._unpost()
            raise
        finally:
            if self._end_error is not None:
                self._disarm()
                self._let_go([*self._posted.values(), *self._unsent.values()], self._end_error)
                self._posted = {}

    def _next_message(self) -> Post:
        submits = [slot.submit() for slot in self._unsent.values()]
        cancels = self._cancels
        self._posted, self._unsent, self._cancels, self._must_post = self._unsent, {}, [], False
        self._acknowledged = self._frames
        self._posted_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._renew_s, self._renew)
        return Post(self.name, self._frames, submits, cancels)

    def _unpost(self) -> None:
        """The replica has nothing of the message that was on its way."""
        self._unsent = self._posted | self._unsent
        self._posted = {}

    def _renew(self) -> None:
        """Say that we are there, if we haven't for a while; while nothing is under way, nobody asks."""
        self._timer = None
        if not self._sequences and self._posting is None:
            return
        said_s = self._loop.time() - self._posted_s + TIMER_RESOLUTION_S
        if self._posting is not None and said_s >= self._lease_s:
            self._give_up()
            return
        if said_s < self._renew_s:
            self._timer = self._loop.call_later(self._renew_s - said_s + TIMER_RESOLUTION_S, self._renew)
            return
        if self._sequences:
            self._post_soon()
        self._timer = self._loop.call_later(self._renew_s, self._renew)

    def _give_up(self) -> None:
        """A message isn't answered, and holds up all that come after it."""
        error = Unavailable(
            f"model `{self._model}`: the replica didn't answer a message for {self._lease_s:g} s",
            retry_after_s=RETRY_AFTER_LOST_S,
        )
        logger.warning("model %s: channel %s ended: %s", self._model, self.name, error.message)
        self.close(error)
        self._leaving = self._loop.create_task(self._farewell())

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
