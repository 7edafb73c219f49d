"""The model of speed."""

from __future__ import annotations

import pytest

from headwater_server.cli.plan.point import Point, grid
from headwater_server.cli.plan.prediction import fit_throughput


def rate(rows: int, gain: float = 1.0) -> float:
    """Of calls that take 10 ms and 2 ms a row."""
    return gain * rows / (0.010 + 0.002 * rows)


def test_batches_between_and_below_those_measured() -> None:
    points = [Point(rows) for rows in (4, 8, 32)]
    model = fit_throughput(points, [rate(point.rows) for point in points])
    assert model.rows_per_s(Point(16)) == pytest.approx(rate(16))
    assert model.rows_per_s(Point(1)) == pytest.approx(rate(1))


def test_larger_batches_than_were_measured_give_no_more() -> None:
    points = [Point(1), Point(8)]
    model = fit_throughput(points, [rate(point.rows) for point in points])
    assert model.rows_per_s(Point(128)) == pytest.approx(rate(8))
    slower = fit_throughput(points, [300.0, 200.0])
    assert slower.rows_per_s(Point(128)) < 300


def test_more_calls_at_once_gain_what_was_measured_and_no_more() -> None:
    points = grid([1, 8], [1, 2], [1, 2])
    gains = {1: 1.0, 2: 1.8, 4: 2.0}
    model = fit_throughput(points, [rate(point.rows, gains[point.calls]) for point in points])
    assert model.rows_per_s(Point(4, 1, 3)) == pytest.approx(rate(4, 1.9))  # between 2 and 4 at once
    assert model.rows_per_s(Point(4, 2, 4)) == pytest.approx(rate(4, 2.0))
    assert model.rows_per_s(Point(4, 2, 1)) == pytest.approx(rate(4, 1.8))


def test_a_single_size_predicts_itself() -> None:
    model = fit_throughput([Point(8)], [rate(8)])
    assert model.rows_per_s(Point(8)) == pytest.approx(rate(8))


def test_a_pair_with_one_batch_size_has_the_line_of_the_pair_most_like_it() -> None:
    points = [Point(1), Point(8), Point(8, 2, 1), Point(1, 1, 2), Point(8, 1, 2)]
    gains = {1: 1.0, 2: 1.8}
    model = fit_throughput(points, [rate(point.rows, gains[point.calls]) for point in points])
    assert model.rows_per_s(Point(1, 2, 1)) == pytest.approx(rate(1, 1.8))
    assert model.rows_per_s(Point(4, 2, 1)) == pytest.approx(rate(4, 1.8))


def test_what_was_measured_is_predicted_as_it_was_although_no_line_fits() -> None:
    points = [Point(1), Point(8), Point(32)]
    rates = [100.0, 300.0, 250.0]
    model = fit_throughput(points, rates)
    assert [model.rows_per_s(point) for point in points] == pytest.approx(rates)
    assert 250 < model.rows_per_s(Point(16)) < 300
    assert model.rows_per_s(Point(64)) == pytest.approx(250, rel=0.2)
