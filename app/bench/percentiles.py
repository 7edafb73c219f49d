"""Percentiles of what was measured, by nearest rank: each is a value that occurred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["PER_MILLE", "distribution", "percentile"]

PER_MILLE: Final = {"p50": 500, "p90": 900, "p99": 990, "p99.9": 999}
"""Those that are reported."""


def percentile(ordered: Sequence[float], per_mille: int) -> float:
    """The smallest value that at least so many thousandths of all do not exceed.

    Args:
        ordered: the values, smallest first; at least one.
        per_mille: 1 to 1000. Whole numbers, since a sum of fractions could end one rank off.
    """
    return ordered[-(-len(ordered) * per_mille // 1000) - 1]


def distribution(values: Sequence[float], scale: float = 1.0) -> dict[str, float | int | None]:
    """Count, mean, least, greatest and percentiles.

    A percentile for which there are too few values, so that it could only repeat the greatest, is None: p99 needs 100
    values, p99.9 needs 1,000.

    Args:
        values: in any order.
        scale: what they are multiplied by, such as 1000 for milliseconds.
    """
    ordered = sorted(values)
    count = len(ordered)
    told: dict[str, float | int | None] = {"count": count, "mean": None, "min": None, "max": None}
    if ordered:
        told |= {
            "mean": sum(ordered) / count * scale, "min": ordered[0] * scale, "max": ordered[-1] * scale,
        }  # fmt: skip
    for name, per_mille in PER_MILLE.items():
        enough = count * (1000 - per_mille) >= 1000 or (per_mille == 500 and count > 0)
        told[name] = percentile(ordered, per_mille) * scale if enough else None
    return told
