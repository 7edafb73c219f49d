"""How far predictions are from what was measured."""

from __future__ import annotations

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
    """Sizes that were not measured, to be predicted and then run: one between those that were, one beyond."""
    rows = sorted({point.rows for point in measured})
    instances = max(point.instances for point in measured)
    replicas = max(point.replicas for point in measured)
    between = round((rows[-1] * rows[0]) ** 0.5) if len(rows) < 3 else round((rows[-1] + rows[-2]) / 2)
    wanted = (Point(between, instances, replicas), Point(2 * rows[-1], 1, 1), Point(rows[0], 1, replicas + 1))
    return [point for point in wanted if point not in measured and fits(point)][:2]
