"""How many rows fit in a device's memory at once, learnt from calls that ran out of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

__all__ = ["HOLDS_S", "Capacity"]

HOLDS_S: Final = 300.0
"""Seconds for which a limit holds. Afterwards larger calls are tried again, because other users of the memory may have
freed it."""


class _Limit(NamedTuple):
    rows: int
    until_s: float
    """Time at which the limit ends, on the clock of `time.monotonic`."""


class Capacity:
    """The maximum number of rows (an engine's sequences or prompt tokens) in one call, for each of a replica's models.

    A limit learnt from rows of some size holds for rows of that size and larger rows; sizes count as equal if they have
    as many binary digits.

    Args:
        on_change: called for each new limit, and when limits have ended, with a text for operators and the smallest
            limit; 0: none is left.
    """

    def __init__(self, on_change: Callable[[str, int], None] = lambda text, rows: None) -> None:
        self._on_change = on_change
        self._limits: dict[tuple[str, int], _Limit] = {}
        """Limits by model and binary digits of a row's bytes."""

    @property
    def is_limited(self) -> bool:
        """Whether any limit may be known."""
        return bool(self._limits)

    def most(self, model: str, row_bytes: int = 0) -> int | None:
        """The maximum number of rows of this size in one call of a model; None: no limit is known. Limits that have
        ended are dropped first."""
        if not self._limits:
            return None
        now_s = time.monotonic()
        over = [key for key, limit in self._limits.items() if limit.until_s <= now_s]
        for key in over:
            self._limits.pop(key, None)
        if over:
            min_rows = self._min_rows()
            sizes = "some larger" if min_rows else "whole"
            self._on_change(f"computes {sizes} batches again, to see whether memory suffices now", min_rows)
        digits = row_bytes.bit_length()
        limits = [limit.rows for key, limit in list(self._limits.items()) if key[0] == model and key[1] <= digits]
        return min(limits, default=None)

    def learn(self, model: str, failed: int, fitted: int, row_bytes: int = 0, *, what: str = "rows") -> None:
        """Record that a call with ``failed`` rows ran out of memory, and that ``fitted`` rows (at least 1) fit, unless
        the known limit is as low. ``what`` names the rows in the text for operators."""
        before = self.most(model, row_bytes)
        if before is not None and before <= fitted:
            return
        self._limits[model, row_bytes.bit_length()] = _Limit(fitted, time.monotonic() + HOLDS_S)
        self._on_change(
            f"{model}: out of memory with {failed} {what} at once; computes at most {fitted} for {HOLDS_S:g} s",
            self._min_rows(),
        )

    def _min_rows(self) -> int:
        """The smallest limit; 0: there is no limit."""
        return min((limit.rows for limit in list(self._limits.values())), default=0)
