"""Three ways to run a deployment: chosen by rule, scaled down until they fit, or left out with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from app.cli.plan.memory_model import MemoryModel, Need
from app.cli.plan.point import Point
from app.process.machine import size_text

__all__ = ["PROFILES", "WORTH", "Budget", "Profile", "recommend"]

PROFILES: Final = {
    "memory-lean": "small batches, in several replicas where these are allowed",
    "throughput": "the size that gave most when it was measured",
    "balanced": "small batches, in two replicas where these are allowed, with a few instances each",
}
SMALL_ROWS: Final = (8, 4)
BALANCED_ROWS: Final = (4, 2, 1)
MOST_REPLICAS: Final = 8
WORTH: Final = 1.03
"""A size that gives so many times as much is faster; below, memory decides."""


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
    model: MemoryModel, rates: Mapping[Point, float], budget: Budget, *, most: Point, cores: int
) -> list[Profile]:
    """The three profiles.

    Args:
        model: of the memory.
        rates: rows per second at the sizes that were measured.
        budget: that each has to fit into.
        most: rows, instances and replicas that no profile exceeds.
        cores: of the machine.
    """
    several = min(max(2, min(cores, MOST_REPLICAS)), most.replicas)
    lean = [Point(min(size, most.rows), 1, count) for count in range(several, 0, -1) for size in SMALL_ROWS]
    balanced = [
        Point(min(size, most.rows), each, count)
        for count in (2, 1)
        if count <= most.replicas
        for each in (most.instances, 1)
        for size in BALANCED_ROWS
    ]
    wanted = (lean, _by_rate(rates, model), balanced)
    return [_first_that_fits(name, points, model, budget) for name, points in zip(PROFILES, wanted, strict=True)]


def _by_rate(rates: Mapping[Point, float], model: MemoryModel) -> list[Point]:
    """Sizes, the fastest first; of those that are about as fast as the fastest, the one that needs least memory."""
    least = max(rates.values()) / WORTH

    def place(point: Point) -> tuple[float, ...]:
        need = model.most(point)
        return (0, need.device, need.host) if rates[point] >= least else (1, -rates[point])

    return sorted(rates, key=place)


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
