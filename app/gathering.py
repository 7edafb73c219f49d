"""How long rows of one deployment have waited for company, with a replica at hand."""

from __future__ import annotations

import time

__all__ = ["GatherClock"]


class GatherClock:
    """Runs while rows gather: a replica could have a call, but the batching policy waits for more rows.

    Who waits from one reading of it to another has gathered for the difference; the rest of the time no replica was
    free.
    """

    __slots__ = ("_since_ns", "_total_ns")

    def __init__(self) -> None:
        self._total_ns = 0
        self._since_ns = 0
        """0: it stands."""

    def run(self) -> None:
        """From now on rows gather."""
        if not self._since_ns:
            self._since_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """From now on none do."""
        if self._since_ns:
            self._total_ns += time.perf_counter_ns() - self._since_ns
            self._since_ns = 0

    def read_ns(self) -> int:
        """What it shows."""
        return self._total_ns + (time.perf_counter_ns() - self._since_ns if self._since_ns else 0)
