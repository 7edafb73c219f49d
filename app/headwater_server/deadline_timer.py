"""A timer for a deadline that is often moved before it passes, such as a limit of the time without news."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

__all__ = ["TIMER_RESOLUTION_S", "DeadlineTimer"]

TIMER_RESOLUTION_S: Final = 0.001
"""The resolution of uvloop's timers in seconds: they count whole milliseconds."""


class DeadlineTimer:
    """Calls a function when a deadline has passed.

    A deadline that moves later costs nothing: the event loop's timer isn't touched, and when it fires, waits for the
    rest of the time.

    Args:
        deadline: returns the deadline in the loop's time; infinite if there is no deadline now.
        expire: called when the deadline has passed; the timer has stopped then.
    """

    __slots__ = ("_deadline", "_expire", "_fires_s", "_handle", "_loop")

    def __init__(self, deadline: Callable[[], float], expire: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline = deadline
        self._expire = expire
        self._handle: asyncio.TimerHandle | None = None
        self._fires_s = math.inf

    def start(self) -> None:
        """Start the timer, unless it runs and fires before the deadline. Needed whenever the deadline moves to an
        earlier time, also from infinity."""
        deadline_s = self._deadline()
        if deadline_s >= self._fires_s:
            return
        if self._handle is not None:
            self._handle.cancel()
        self._fires_s = deadline_s
        self._handle = self._loop.call_later(deadline_s - self._loop.time(), self._fire)

    def cancel(self) -> None:
        """Stop the timer for good, and drop the references to the callbacks."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._deadline = self._expire = _never

    def _fire(self) -> None:
        self._handle, self._fires_s = None, math.inf
        if self._deadline() - self._loop.time() <= TIMER_RESOLUTION_S:
            self._expire()
        else:
            self.start()


def _never() -> float:
    return math.inf
