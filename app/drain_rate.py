"""How fast a queue drains."""

from __future__ import annotations

import math

__all__ = ["DrainRate"]

MEMORY_S = 5.0
"""What was this long ago counts a third of what is now."""


class DrainRate:
    """Rows per second that leave a queue while others wait behind them: what all replicas together are good for.

    A queue that runs empty says nothing of that: what leaves it then is what came.
    """

    def __init__(self) -> None:
        self._rows = 0.0
        self._seconds = 0.0
        self._last_s: float | None = None
        """When rows left last; None if none waited since."""

    def note(self, rows: int, now_s: float, *, others_wait: bool) -> None:
        """Take in that rows left."""
        if self._last_s is not None:
            took_s = now_s - self._last_s
            kept = math.exp(-took_s / MEMORY_S)
            self._rows = self._rows * kept + rows
            self._seconds = self._seconds * kept + took_s
        self._last_s = now_s if others_wait else None

    def note_empty(self) -> None:
        """Take in that what waited left otherwise, or can't leave now."""
        self._last_s = None

    def seconds_for(self, rows: float) -> float | None:
        """How long so many rows take; None if that isn't known yet."""
        return rows * self._seconds / self._rows if self._rows and self._seconds else None
