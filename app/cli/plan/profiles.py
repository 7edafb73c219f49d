"""Three ways to run a deployment: chosen by rule, scaled down until they fit, or left out with the reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from app.cli.plan.memory_model import MemoryModel, Need
from app.cli.plan.point import Point
from app.process.machine import size_text

__all__ = ["PROFILES", "Budget", "Profile", "recommend"]

PROFILES: Final = {
    "memory-lean": "several replicas, each with small batches",
    "throughput": "one replica, with large batches",
    "balanced": "two replicas, with small batches and a few instances each",
}
SMALL_ROWS: Final = (8, 4)
BALANCED_ROWS: Final = 4
MOST_REPLICAS: Final = 8
WORTH: Final = 1.03
"""A smaller batch is preferred to a larger one if it gives this much more."""


@dataclass(frozen=True)
class Budget:
    """Bytes that may be taken, after what is kept free."""

    host: int
    device: int | None = None
    """None: it computes on no GPU."""

    def excess(self, need: Need) -> str:
        """Why something doesn't fit; empty: it does."""
        for place, needed, limit in (
            ("the machine's memory", need.host, self.host), ("the device's memory", need.device, self.device),
        ):  # fmt: skip
            if limit is not None and needed > limit:
                return f"needs {size_text(needed)} of {place}, {size_text(limit)} may be taken"
        return ""


@dataclass(frozen=True)
class Profile:
    """One recommendation."""

    name: str
    point: Point | None
    """None: it is left out."""
    note: str
    """How it was scaled down, or why it is left out; empty: neither."""


def recommend(
    model: MemoryModel,
    rate: Callable[[Point], float],
    budget: Budget,
    *,
    rows: Sequence[int],
    instances: Sequence[int],
    cores: int,
) -> list[Profile]:
    """The three profiles.

    Args:
        model: of the memory.
        rate: predicts rows per second; NaN if it can't.
        budget: that each has to fit into.
        rows: that were measured.
        instances: likewise.
        cores: of the machine.
    """
    several = max(2, min(cores, MOST_REPLICAS))
    lean = [Point(size, 1, count) for count in range(several, 0, -1) for size in SMALL_ROWS]
    large = _by_worth(sorted(set(rows), reverse=True), rate)
    few = max(instances)
    balanced = [
        Point(size, each, count)
        for count in (2, 1)
        for each in dict.fromkeys((few, 1))
        for size in (BALANCED_ROWS, 2, 1)
    ]
    return [
        _first_that_fits(name, points, model, budget)
        for name, points in zip(PROFILES, (lean, [Point(size) for size in large], balanced), strict=True)
    ]


def _by_worth(sizes: Sequence[int], rate: Callable[[Point], float]) -> list[int]:
    """Sizes, the best first: the largest, unless smaller ones give more; then those that only save memory."""
    best = sizes[0]
    for size in sizes[1:]:
        more, less = rate(Point(size)), rate(Point(best))
        if not (math.isnan(more) or math.isnan(less)) and more > WORTH * less:
            best = size
    return [best, *(size for size in sizes if size < best)]


def _first_that_fits(name: str, points: Sequence[Point], model: MemoryModel, budget: Budget) -> Profile:
    wanted = points[0]
    reasons: Iterator[str] = (budget.excess(model.most(point)) for point in points)
    first = next(reasons)
    if not first:
        return Profile(name, wanted, "")
    for point, reason in zip(points[1:], reasons, strict=True):
        if not reason:
            return Profile(name, point, f"scaled down from {wanted}, which {first}")
    return Profile(name, None, f"left out: even {points[-1]} {budget.excess(model.most(points[-1]))}")
