"""Counts of one language model in one gateway worker."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from app.metrics.recorder import LanguageModelMeter

__all__ = ["FinishRate", "LmStatistics"]

RETRY_AFTER_LIMIT_S: Final = 60
FINISHES: Final = 64
"""How many of the last ends a rate is taken from."""
RECENT_S: Final = 120.0
"""Ends before that say nothing of now."""


@dataclass(slots=True)
class LmStatistics:
    """Cumulative; times in nanoseconds. A request is counted in one of the first four, when it is over."""

    meter: LanguageModelMeter
    """Counts for the whole server."""
    requests: int = 0
    """Answered with success."""
    failures: int = 0
    """Ended with another error than the next two."""
    shed: int = 0
    """Refused because the engine's queue was full."""
    cancelled: int = 0
    """Cancelled by its id, or left by its client."""
    sequences: int = 0
    """Of requests answered with success."""
    prompt_tokens: int = 0
    """Of sequences that have given a token; each counts the whole prompt."""
    generated_tokens: int = 0
    frames: int = 0
    """Packed answers that came."""
    contract_violations: int = 0
    """Tokens that were not in sequence, and frames that were not."""
    first_token_ns: int = 0
    """From a request's beginning to its first token, summed over the requests that have one."""
    first_tokens: int = 0
    """How many these are."""
    total_ns: int = 0
    """From beginning to end, summed over `requests`."""

    def note_violation(self) -> None:
        """A token or a frame was not in sequence."""
        self.contract_violations += 1
        self.meter.contract_violations.add()

    def note_first_token(self, took_ns: int) -> None:
        """A request has its first token."""
        self.first_tokens += 1
        self.first_token_ns += took_ns
        self.meter.first_token.observe(took_ns)


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
