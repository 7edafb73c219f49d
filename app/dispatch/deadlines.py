"""The deadlines of one request: its own, and those of the heads that it wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.dispatch.collector import WHOLE, Collector
from app.errors import DeadlineExceeded

__all__ = ["Deadlines"]

TIMER_RESOLUTION_S = 0.001
"""uvloop counts timers in whole milliseconds."""


class Deadlines:
    """Ends a request, or single heads of it, when their time is over. Everything counts from its making.

    Args:
        collector: of the request's answer.
        timeout_s: the deployment's.
        timeout_us: the client's own, in microseconds; 0 for none.
        on_head: called with a head whose time is over, by its own deadline or by the request's.
        where: says what the request was at, for messages.
        is_idle_limit: whether the request's deadline starts anew with each piece of its stream.
    """

    def __init__(
        self,
        collector: Collector,
        timeout_s: float,
        timeout_us: int,
        *,
        on_head: Callable[[str], None] | None = None,
        where: Callable[[], str] = lambda: "while it was computed",
        is_idle_limit: bool = False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._collector = collector
        self._on_head = on_head
        self._where = where
        self._is_idle_limit = is_idle_limit
        self._timeout_s = min(timeout_s, timeout_us / 1e6) if timeout_us else timeout_s
        self._start_s = self._loop.time()
        self._first_s = self._timeout_s
        self._heard_s: float | None = None
        """When the last piece of a stream came."""
        self._is_held = False
        self._timer = self._loop.call_later(self._timeout_s, self._expire)
        self._head_timers: list[asyncio.TimerHandle] = []
        if WHOLE in collector.heads:  # the only one
            return
        for head in collector.heads.values():
            if head.timeout_s is not None:
                self._first_s = min(self._first_s, head.timeout_s)
                if is_idle_limit or head.timeout_s < self._timeout_s:
                    timer = self._loop.call_later(head.timeout_s, self._expire_head, head.name, head.timeout_s)
                    self._head_timers.append(timer)

    def first_left_s(self) -> float:
        """Until the first deadline of all, the heads' included; 0 if it has passed."""
        return max(0.0, self._start_s + self._first_s - self._loop.time())

    def left_s(self, head: str) -> float:
        """Until a head's time is over, by its own deadline or by the request's; 0 if it is."""
        limit_s = self._collector.heads[head].timeout_s
        until_s = self._timeout_s if limit_s is None else min(limit_s, self._timeout_s)
        return max(0.0, self._start_s + until_s - self._loop.time())

    def hear(self) -> None:
        """Note that a piece of the stream came."""
        self._heard_s = self._loop.time()
        self._is_held = False

    def hold(self) -> None:
        """Note that the stream waits for its reader: until it is heard of again, its silence is not the replica's."""
        self._is_held = True

    def close(self) -> None:
        """Forget them, and whoever is called by them."""
        self._timer.cancel()
        for timer in self._head_timers:
            timer.cancel()
        self._on_head = None
        self._where = str

    def _expire(self) -> None:
        if self._is_idle_limit and self._heard_s is not None:
            left_s = self._timeout_s if self._is_held else self._heard_s + self._timeout_s - self._loop.time()
            if left_s > TIMER_RESOLUTION_S:
                self._timer = self._loop.call_later(left_s, self._expire)
                return
            self._collector.fail(DeadlineExceeded(f"the stream gave nothing for {self._timeout_s:g} s"))
            return
        where = self._where()
        for head in list(self._collector.undecided):
            named = "" if head == WHOLE else f"head `{head}`: "
            self._collector.decide(
                head, error=DeadlineExceeded(f"{named}the deadline of {self._timeout_s:g} s passed {where}")
            )
            if self._on_head is not None:
                self._on_head(head)

    def _expire_head(self, head: str, timeout_s: float) -> None:
        self._collector.decide(
            head, error=DeadlineExceeded(f"head `{head}`: its timeout_s of {timeout_s:g} s passed {self._where()}")
        )
        if self._on_head is not None:
            self._on_head(head)
