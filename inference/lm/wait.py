"""How long something has been waited for, where the one that waits may have been paused itself."""

from __future__ import annotations

__all__ = ["Wait"]


class Wait:
    """A wait that is over when its time has passed, the second half of it since somebody looked.

    A process that was stopped, swapped out or kept busy finds times long past at once, and what came meanwhile not yet
    read: it has half the time to read it. One that looks when `next_look` says loses nothing.

    Args:
        since: monotonic seconds.
    """

    __slots__ = ("_doubted_at", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self._doubted_at: float | None = None

    def restart(self, now: float) -> None:
        """What was waited for came; wait for the next."""
        self.since = now
        self._doubted_at = None

    def is_over(self, now: float, most_s: float) -> bool:
        """Look."""
        if now < self.since + most_s / 2:
            return False
        if self._doubted_at is None:
            self._doubted_at = now
        return now >= self._end(self._doubted_at, most_s)

    def next_look(self, most_s: float) -> float:
        """When to look again, monotonic seconds."""
        return self.since + most_s / 2 if self._doubted_at is None else self._end(self._doubted_at, most_s)

    def _end(self, doubted_at: float, most_s: float) -> float:
        return max(self.since + most_s, doubted_at + most_s / 2)
