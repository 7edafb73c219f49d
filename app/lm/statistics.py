"""How fast the sequences of a language model end."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

__all__ = ["FinishRate"]

RETRY_AFTER_LIMIT_S: Final = 60
FINISHES: Final = 64
"""How many of the last ends a rate is taken from."""
RECENT_S: Final = 120.0
"""Ends before that say nothing of now."""


class FinishRate:
    """How fast sequences end, to say when it is worth another try."""

    def __init__(self) -> None:
        self._finished_s: deque[float] = deque(maxlen=FINISHES)

    def note(self, now_s: float) -> None:
        """A sequence has left its place to another, whatever ended it."""
        self._finished_s.append(now_s)

    def wait_s(self, waiting: int, now_s: float, share: float = 1.0) -> int:
        """Until so many more have ended, in whole seconds from 1 to 60.

        Args:
            waiting: how many.
            now_s: the loop's time.
            share: which part of all that may end are noted here.
        """
        finished_s = self._finished_s
        while finished_s and finished_s[0] < now_s - RECENT_S:
            finished_s.popleft()
        if len(finished_s) < 2:
            return 1
        each_s = (finished_s[-1] - finished_s[0]) / (len(finished_s) - 1)  # not until now: it may have been idle since
        return max(1, min(RETRY_AFTER_LIMIT_S, math.ceil(waiting * each_s * share)))
