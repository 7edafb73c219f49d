"""The deadlines of one request and of the heads that it wants."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from headwater_server.deadline_timer import DeadlineTimer
from headwater_server.dispatch.collector import WHOLE, Collector
from headwater_server.errors import DeadlineExceeded

__all__ = ["Deadlines"]


class Deadlines:
    """Ends a request, or single heads of it, at their deadlines, which count from the creation of this object.

    Args:
        collector: collects the request's answer.
        timeout_s: the deployment's timeout.
        timeout_us: the client's timeout in microseconds; 0 if the client set no timeout. The shorter timeout counts.
        where: returns the request's present state for messages, such as "while it was computed".
        is_idle_limit: whether the request's deadline starts anew with each piece of its stream.
        on_head: called with a head when the head's deadline passes, and with each undecided head when the request's
            deadline passes. It isn't called if a stream stops after its first piece.
    """

    __slots__ = (
        "_collector", "_is_held", "_is_idle_limit", "_loop", "_on_head", "_piece_s", "_start_s", "_timeout_s",
        "_timers", "_where",
    )  # fmt: skip

    def __init__(
        self,
        collector: Collector,
        timeout_s: float,
        timeout_us: int,
        where: Callable[[], str] = lambda: "while it was computed",
        is_idle_limit: bool = False,
        on_head: Callable[[str], None] | None = None,
    ) -> None:
        self._loop = collector.loop
        self._collector = collector
        self._on_head = on_head
        self._where = where
        self._is_idle_limit = is_idle_limit
        self._timeout_s = min(timeout_s, timeout_us / 1e6) if timeout_us else timeout_s
        self._start_s = self._loop.time()
        self._piece_s: float | None = None
        """Loop time of the last `note_piece`; None before the first piece."""
        self._is_held = False
        self._timers: list[DeadlineTimer | asyncio.TimerHandle] = []
        if is_idle_limit:
            timer = DeadlineTimer(self._idle_deadline, self._expire)
            timer.start()
            self._timers.append(timer)
        else:
            self._timers.append(self._loop.call_later(self._timeout_s, self._expire))
        if WHOLE in collector.heads:  # the model has no heads, so only the request has a deadline
            return
        for head in collector.heads.values():
            if head.timeout_s is not None and (is_idle_limit or head.timeout_s < self._timeout_s):
                expire = functools.partial(self._expire_head, head.name, "its timeout_s", head.timeout_s)
                self._timers.append(self._loop.call_later(head.timeout_s, expire))

    def left_s(self, head: str) -> float:
        """Seconds until the earlier of the head's deadline and the request's; 0 if that deadline has passed. Pieces of
        a stream are not considered."""
        limit_s = self._collector.heads[head].timeout_s
        until_s = self._timeout_s if limit_s is None else min(limit_s, self._timeout_s)
        return max(0.0, self._start_s + until_s - self._loop.time())

    def note_piece(self) -> None:
        """Record that a piece of the answer arrived, or that a stream's reader caught up."""
        self._piece_s = self._loop.time()
        self._is_held = False

    def hold(self) -> None:
        """Record that the stream waits for its reader: until `note_piece` a pause doesn't count against the replica."""
        self._is_held = True

    def close(self) -> None:
        """Cancel the timers, and drop the references to the callbacks."""
        for timer in self._timers:
            timer.cancel()
        self._on_head = None
        self._where = str

    def _idle_deadline(self) -> float:
        if self._piece_s is None:
            return self._start_s + self._timeout_s
        return (self._loop.time() if self._is_held else self._piece_s) + self._timeout_s

    def _expire(self) -> None:
        if self._is_idle_limit and self._piece_s is not None:
            self._collector.fail(DeadlineExceeded(f"the stream sent no output for {self._timeout_s:g} s"))
            return
        for head in list(self._collector.undecided):
            self._expire_head(head, "the deadline", self._timeout_s)

    def _expire_head(self, head: str, limit: str, timeout_s: float) -> None:
        named = "" if head == WHOLE else f"head `{head}`: "
        error = DeadlineExceeded(f"{named}{limit} of {timeout_s:g} s passed {self._where()}")
        self._collector.decide(head, error=error)
        if self._on_head is not None:
            self._on_head(head)
