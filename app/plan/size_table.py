"""Which sizes fit, those that ran and those that didn't."""

from __future__ import annotations

from typing import NamedTuple

from app.plan.planning import Plan
from app.plan.point import Point, grid
from app.plan.prediction import Prediction

__all__ = ["SizeRow", "size_rows", "smallest_need"]


class SizeRow(NamedTuple):
    """One size."""

    point: Point
    predicted: Prediction
    excess: str
    """Why it doesn't fit; empty: it does."""
    was_measured: bool


def size_rows(plan: Plan) -> list[SizeRow]:
    """Sizes up to the largest that was measured, the small ones first."""
    assert plan.predictor is not None
    measured = {one.point for one in plan.sweep.measured}
    replicas = max(point.replicas for point in measured)
    points = grid([point.rows for point in measured], [point.instances for point in measured], range(1, replicas + 1))
    found = []
    for point in points:
        predicted = plan.predictor.at(point)
        found.append(SizeRow(point, predicted, plan.budget.excess(predicted.most), point in measured))
    return found


def smallest_need(plan: Plan) -> str:
    """Why not even the smallest size fits; empty: it does."""
    assert plan.predictor is not None
    return plan.budget.excess(plan.predictor.largest.most(Point(1)))
