"""Percentiles of what was measured, by nearest rank: each is a value that occurred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["distribution", "percentile"]

_ENOUGH: Final = {"p50": (50.0, 1), "p90": (90.0, 10), "p99": (99.0, 100), "p99.9": (99.9, 1000)}
"""Those that are reported, and how many values each needs so that it does not only repeat the greatest."""


def percentile(values: Sequence[float] | npt.NDArray[Any], percent: float) -> float:
    """The smallest value that at least so many percent of all do not exceed.

    Args:
        values: in any order; at least one.
        percent: 0 to 100.
    """
    return float(np.percentile(values, percent, method="inverted_cdf"))


def distribution(values: Sequence[float], scale: float = 1.0) -> dict[str, float | int | None]:
    """Count, mean, least, greatest and percentiles.

    A percentile for which there are too few values is None: p90 needs 10, p99 100, p99.9 1,000.

    Args:
        values: in any order.
        scale: what they are multiplied by, such as 1000 for milliseconds.
    """
    scaled = np.asarray(values, float) * scale
    count = len(scaled)
    told: dict[str, float | int | None] = {"count": count, "mean": None, "min": None, "max": None}
    if count:
        told |= {"mean": float(scaled.mean()), "min": float(scaled.min()), "max": float(scaled.max())}
    for name, (percent, least) in _ENOUGH.items():
        told[name] = percentile(scaled, percent) if count >= least else None
    return told
