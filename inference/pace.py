"""How long the steps of a fused pipeline take, and what follows for the frames that leave."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["Pace"]

SMOOTHING = 0.2


class Pace:
    """How long steps take of late, and so whether an answer that is ready should wait for the next one.

    Args:
        wait_s: how long it may wait.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._seconds: dict[str, float] = {}

    def note(self, step: str, took_s: float) -> None:
        """Take in what a call took."""
        known = self._seconds.get(step, took_s)
        self._seconds[step] = known + SMOOTHING * (took_s - known)

    def allows(self, waited_s: float, steps: Iterable[str]) -> bool:
        """Whether to wait on, after so long, until these steps have run. A step that never ran isn't waited for."""
        return waited_s + sum(self._seconds.get(step, math.inf) for step in steps) <= self._wait_s

    def left_s(self, waited_s: float) -> float:
        """How long an answer that has waited so long may go on to."""
        return max(0.0, self._wait_s - waited_s)
