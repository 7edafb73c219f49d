"""A sweep keeps what was measured, whatever happens to the rest."""

from __future__ import annotations

import pytest

from app.cli.plan.measuring import Measured
from app.cli.plan.memory_model import MeasuredMemory
from app.cli.plan.planning import Sweep, run_sweep
from app.cli.plan.point import Point
from app.errors import CommandError

POINTS = [Point(1), Point(8), Point(32)]


def measured(point: Point) -> Measured:
    memory = MeasuredMemory(100, 200, 1000.0, 1000.0)
    return Measured(point, memory, 1300, 0, "cpu", 10.0, 5.0, 9.0, 2, 1.0, 0.1)


def swept(measure: object, capacity: int | None = None, points: list[Point] = POINTS) -> Sweep:
    sweep = Sweep()
    run_sweep(sweep, points, measure, capacity, lambda row: None)  # type: ignore[arg-type]
    return sweep


def failing(at: Point, error: BaseException) -> object:
    def measure(point: Point) -> Measured:
        if point == at:
            raise error
        return measured(point)

    return measure


def test_a_size_that_fails_says_why_and_the_others_are_measured() -> None:
    sweep = swept(failing(POINTS[1], CommandError("it needs more")))
    assert [row.error for row in sweep.rows] == ["", "it needs more", ""]
    assert [one.point for one in sweep.measured] == [POINTS[0], POINTS[2]]
    assert not sweep.ended


def test_a_size_that_fails_once_is_measured_at_the_second_try_and_says_so() -> None:
    tries: list[Point] = []

    def measure(point: Point) -> Measured:
        tries.append(point)
        if tries == POINTS[:2]:
            raise CommandError("Triton did not start:\nits log")
        return measured(point)

    sweep = swept(measure)
    assert tries == [POINTS[0], POINTS[1], POINTS[1], POINTS[2]]
    assert [row.first_error for row in sweep.rows] == ["", "Triton did not start: | its log", ""]
    assert [row.error for row in sweep.rows] == [""] * 3
    assert len(sweep.measured) == 3


def test_ctrl_c_keeps_what_there_is() -> None:
    sweep = swept(failing(POINTS[1], KeyboardInterrupt()))
    assert [row.error for row in sweep.rows] == ["", "stopped by hand"]
    assert sweep.ended == "stopped by hand"


def test_if_the_smallest_size_fails_no_other_is_tried() -> None:
    sweep = swept(failing(POINTS[0], CommandError("no module my")))
    assert len(sweep.rows) == 1
    assert sweep.ended == "the smallest size, 1 × 1 × 1, can't be measured: no module my"


def test_a_size_that_would_bring_the_machine_down_is_not_tried() -> None:
    points = [Point(1), Point(1, 1, 2), Point(1, 1, 3)]
    sweep = swept(measured, 3000, points)
    assert [bool(row.error) for row in sweep.rows] == [False, False, True]
    assert sweep.rows[2].error.startswith("not tried: it takes")


def test_other_errors_are_ours_and_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        swept(failing(POINTS[0], ZeroDivisionError()))
