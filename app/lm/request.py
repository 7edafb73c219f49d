"""A language model's request under way: its sequences, who reads them, and its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from app.dispatch.deadlines import TIMER_RESOLUTION_S
from app.errors import Cancelled, DeadlineExceeded, HeadwaterError
from app.lm.channel import Channel
from app.lm.sequence import SequenceSpec, Tokens, TokenSlot
from app.telemetry.recorder import LanguageModelMeter
from app.telemetry.tracing import GenerationTrace

__all__ = ["RequestRun"]


class RequestRun:
    """A `Generation`: some sequences that share their fate. If one fails, the others are cancelled.

    Args:
        request_id: the client's; others may have it too.
        specs: the sequences.
        meter: where to count.
        start: gives all sequences to a replica; raises `Unavailable` if there is none.
        on_left: called once, when nobody asks for the request any more.
        idle_s: how long it may be without a token of any sequence, waiting in the queue included.
        limit_s: how long it may take in all.
        trace: if it is traced.
    """

    def __init__(
        self,
        request_id: str,
        specs: Sequence[SequenceSpec],
        meter: LanguageModelMeter,
        *,
        start: Callable[[RequestRun], None],
        on_left: Callable[[RequestRun], None],
        idle_s: float,
        limit_s: float | None = None,
        trace: GenerationTrace | None = None,
    ) -> None:
        self._request_id = request_id
        self.slots = [TokenSlot(self, place, spec) for place, spec in enumerate(specs)]
        self._meter = meter
        self._start = start
        self._on_left = on_left
        self._idle_s = idle_s
        self._limit_s = limit_s
        self._trace = trace
        self._loop = asyncio.get_running_loop()
        self._running = len(self.slots)
        self._news: list[TokenSlot] = []
        """Those with something to read."""
        self._error: HeadwaterError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_read = False
        """Whether its reader has had anything."""
        self._is_left = False
        self._is_restarted = False
        self._began_ns = time.perf_counter_ns()
        self._began_s = self._heard_s = self._loop.time()
        self._is_heard = False
        """Whether there was a token."""
        self._timer: asyncio.TimerHandle | None = None
        if self._running:
            self._arm(self._began_s)

    @property
    def request_id(self) -> str:
        """See `SequenceOwner.request_id`."""
        return self._request_id

    @property
    def is_running(self) -> bool:
        """Whether a replica has more to say of it."""
        return self._running > 0

    def submit(self, channel: Channel) -> None:
        """Have what still runs of it generated over this channel."""
        for slot in self.slots:
            if slot.is_running:
                channel.submit(slot)

    def abandon(self) -> None:
        """It never began: it counts as no request."""
        self._is_left = True
        self._disarm()
        self._on_left(self)

    # Generation

    async def news(self) -> list[tuple[int, Tokens]]:
        """See `Generation.news`.

        A failure comes after what there was before it; but if nothing has been read by then, at once.
        """
        while True:
            if self._error is not None and not (self._news and self._is_read):
                self._leave()
                raise self._error.again()  # what is raised knows us, by its traceback
            if self._news:
                return self._read()
            if not self._running:
                self._leave()
                return []
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def drop(self, place: int) -> None:
        """See `Generation.drop`."""
        if self._is_left:
            return
        slot = self.slots[place]
        if slot.is_listed:
            slot.is_listed = False
            self._news.remove(slot)
        if slot.is_running:
            self._stop(slot)
            self._wake()

    def close(self) -> None:
        """See `Generation.close`."""
        self._leave()

    # SequenceOwner

    def hear(self, slot: TokenSlot, now_s: float) -> None:
        """See `SequenceOwner.hear`."""
        self._heard_s = now_s
        if not self._is_heard and slot.count:
            self._is_heard = True
            self._meter.first_token.observe(time.perf_counter_ns() - self._began_ns)
            if self._trace is not None:
                self._trace.first_token()
        if not slot.is_listed:
            slot.is_listed = True
            self._news.append(slot)
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def end(self, slot: TokenSlot, now_s: float) -> None:
        """See `SequenceOwner.end`."""
        slot.is_running = False
        self._running -= 1
        if not self._running:
            self._disarm()
        self.hear(slot, now_s)

    def fail(self, error: HeadwaterError) -> None:
        """See `SequenceOwner.fail`."""
        if self._error is not None or self._is_left:
            return
        self._error = error
        self._stop_all()
        self._wake()

    def restart(self, error: HeadwaterError) -> None:
        """See `SequenceOwner.restart`: another replica, or another channel, may have it; but only once."""
        if self._is_restarted or any(slot.count for slot in self.slots):
            self.fail(error)
            return
        self._is_restarted = True
        try:
            self._start(self)
        except HeadwaterError:
            self.fail(error)

    def cancel_unsent(self) -> int:
        """If no replica knows of it, cancel it. Returns how many sequences that were."""
        running = [slot for slot in self.slots if slot.is_running]
        if not running or any(slot.is_sent for slot in running):
            return 0
        self.fail(Cancelled("the request was cancelled"))
        return len(running)

    # The reader

    def _read(self) -> list[tuple[int, Tokens]]:
        self._is_read = True
        listed, self._news = self._news, []
        for slot in listed:
            slot.is_listed = False
        return [(slot.place, slot.read()) for slot in listed]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop(self, slot: TokenSlot) -> None:
        slot.is_running = False
        self._running -= 1
        if not self._running:
            self._disarm()
        if slot.channel is not None:
            slot.channel.cancel(slot)

    def _stop_all(self) -> None:
        for slot in self.slots:
            if slot.is_running:
                self._stop(slot)
        self._running = 0
        self._disarm()

    def _leave(self) -> None:
        """Count it, and cancel what still runs. Channel and slots know it for a while; it doesn't know them."""
        if self._is_left:
            return
        self._is_left = True
        if self._error is None and not self._running and not self._news:
            self._meter.sequences.add(len(self.slots))
        if self._trace is not None:
            name = type(self._error).__name__ if self._error is not None else ""
            self._trace.end(len(self.slots), sum(slot.count for slot in self.slots), name)
        self._stop_all()
        self._news = []
        self.slots = []
        self._wake()
        self._on_left(self)

    # Deadlines

    def _arm(self, now_s: float) -> None:
        left_s = self._heard_s + self._idle_s - now_s
        if self._limit_s is not None:
            left_s = min(left_s, self._began_s + self._limit_s - now_s)
        self._timer = self._loop.call_later(left_s, self._expire)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        """The timer isn't moved with each token: when it comes, it sees whether it is time."""
        self._timer = None
        now_s = self._loop.time() + TIMER_RESOLUTION_S
        if self._limit_s is not None and now_s >= self._began_s + self._limit_s:
            where = "while it was computed" if self._is_heard else "while it waited in the queue"
            self.fail(DeadlineExceeded(f"the deadline of {self._limit_s:g} s passed {where}"))
        elif now_s < self._heard_s + self._idle_s:
            self._arm(now_s)
        elif self._is_heard:
            self.fail(DeadlineExceeded(f"the stream gave nothing for {self._idle_s:g} s"))
        else:
            self.fail(DeadlineExceeded(f"the deadline of {self._idle_s:g} s passed while it waited in the queue"))
