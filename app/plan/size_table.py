"""Which sizes fit, those that ran and those that didn't."""

from __future__ import annotations

from typing import Final, NamedTuple

from app.plan.planning import Plan
from app.plan.point import Point, grid
from app.plan.prediction import Prediction

__all__ = ["SizeRow", "size_rows", "smallest_need"]

BEYOND: Final = 1
"""Replicas, and doublings of the batch size, beyond those that were measured."""


class SizeRow(NamedTuple):
    """One size."""

    point: Point
    predicted: Prediction
    excess: str
    """Why it doesn't fit; empty: it does."""
    was_measured: bool


def size_rows(plan: Plan) -> list[SizeRow]:
    """Sizes that were measured and some beyond, the small ones first."""
    assert plan.predictor is not None
    measured = {one.point for one in plan.sweep.measured}
    rows = {point.rows for point in measured}
    replicas = max(point.replicas for point in measured)
    points = grid(
        [*rows, *(max(rows) << power for power in range(1, BEYOND + 1))],
        [point.instances for point in measured],
        range(1, replicas + BEYOND + 1),
    )
    found = []
    for point in points:
        predicted = plan.predictor.at(point)
        found.append(SizeRow(point, predicted, plan.budget.excess(predicted.most), point in measured))
    return found


def smallest_need(plan: Plan) -> str:
    """Why not even the smallest size fits; empty: it does."""
    assert plan.predictor is not None
    return plan.budget.excess(plan.predictor.largest.most(Point(1)))
