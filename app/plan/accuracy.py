"""How far predictions are from what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.plan.measuring import Measured
from app.plan.memory_model import CacheSize, fit_memory
from app.plan.point import Point

__all__ = ["MEMORY_TOLERANCE", "RATE_TOLERANCE", "Comparison", "held_out_error", "unseen_points"]

MEMORY_TOLERANCE: Final = 0.10
RATE_TOLERANCE: Final = 0.15


@dataclass(frozen=True)
class Comparison:
    """One figure, predicted before it was measured."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured: 0.1 is 10 % too much."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {"what": self.what, "predicted": self.predicted, "measured": self.measured, "error": self.error}


def held_out_error(measured: Sequence[Measured], cache: CacheSize, *, on_device: bool) -> float | None:
    """The largest relative error of the memory of a size that a fit to all others predicts; None: too few sizes.

    The smallest and largest of each kind are among them: then it is an extrapolation.
    """
    if len(measured) < 4:
        return None
    worst = 0.0
    for index, left_out in enumerate(measured):
        others = [one for place, one in enumerate(measured) if place != index]
        model = fit_memory([one.point for one in others], [one.memory for one in others], cache, on_device=on_device)
        worst = max(worst, abs(model.at(left_out.point).host / left_out.host - 1))
        if on_device and left_out.device:
            worst = max(worst, abs(model.at(left_out.point).device / left_out.device - 1))
    return worst


def unseen_points(measured: Sequence[Point], fits: Callable[[Point], bool]) -> list[Point]:
    """Sizes that were not measured, to be predicted and then run: none is beyond those that were.

    One has the most instances and replicas and rows between the two largest batches, the other one the fewest and rows
    between the two smallest.
    """
    rows = sorted({point.rows for point in measured})
    large, small = (round(math.sqrt(pair[0] * pair[-1])) for pair in (rows[-2:], rows[:2]))
    pairs = [(point.instances, point.replicas) for point in measured]
    wanted = dict.fromkeys((Point(large, *max(pairs)), Point(small, *min(pairs))))
    return [point for point in wanted if point not in measured and fits(point)]
