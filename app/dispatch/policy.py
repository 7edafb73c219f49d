"""How long rows of one deployment have waited for company, with a replica at hand.

Rows of similar length: which of them may share a batch without much padding.

A model that pads computes a batch of n rows as if each were as long as the longest. Lengths are divided into classes
of which each reaches from a length to ``1 / (1 - max_padding)`` times it, so that of what is computed for the rows of
one class at most ``max_padding`` is padding: "bucketing by sequence length".
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from app.codecs.tensors import RawTensor, longest_row

__all__ = ["GatherClock", "LengthClasses"]


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


class LengthClasses:
    """Classes of rows by the bytes of their BYTES elements, the four that each travels with included.

    Tokens, which a model pads to, aren't known here; in texts of one kind there are so many bytes to each.

    Args:
        max_padding: above 0, below 1.
    """

    __slots__ = ("_per_e",)

    def __init__(self, max_padding: float) -> None:
        self._per_e = -1 / math.log1p(-max_padding)
        """Classes between a length and e times it."""

    def of(self, inputs: Mapping[str, RawTensor]) -> int:
        """The class of a request's rows: that of the longest. 0 if there is nothing that varies."""
        length = 0
        for tensor in inputs.values():
            if tensor.datatype == "BYTES":
                length += len(tensor.data) if tensor.shape[0] == 1 else longest_row(tensor)
        return int(math.log(length) * self._per_e) if length else 0
