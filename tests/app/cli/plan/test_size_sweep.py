"""A sweep keeps what was measured, whatever happens to the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater_server.cli.plan.measuring import Measured
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.size_sweep import measure_outliers_again, measured_of, run_sweep
from headwater_server.cli.plan.trial import Trial
from headwater_server.errors import CommandError

POINTS = [Point(1), Point(8), Point(32)]


def measured(point: Point) -> Measured:
    return Measured(point, 1300, 100, 200, 1000, 1000, 10.0, 5.0, 9.0, 2)


def swept(
    measure: object, capacity: int | None = None, points: list[Point] = POINTS, sweep: list[Trial] | None = None
) -> list[Trial]:
    sweep = [] if sweep is None else sweep
    run_sweep(sweep, points, measure, capacity, lambda trial: None)  # type: ignore[arg-type]
    return sweep


def failing(at: Point, error: BaseException) -> object:
    def measure(point: Point) -> Measured:
        if point == at:
            raise error
        return measured(point)

    return measure


def test_a_size_that_fails_says_why_and_the_others_are_measured() -> None:
    sweep = swept(failing(POINTS[1], CommandError("it needs more")))
    assert [row.error for row in sweep] == ["", "it needs more", ""]
    assert [one.point for one in measured_of(sweep)] == [POINTS[0], POINTS[2]]


def test_a_size_that_fails_once_is_measured_at_the_second_try_and_says_so() -> None:
    tries: list[Point] = []

    def measure(point: Point) -> Measured:
        tries.append(point)
        if tries == POINTS[:2]:
            raise CommandError("Triton did not start:\nits log")
        return measured(point)

    sweep = swept(measure)
    assert tries == [POINTS[0], POINTS[1], POINTS[1], POINTS[2]]
    assert [row.first_error for row in sweep] == ["", "Triton did not start: | its log", ""]
    assert [row.error for row in sweep] == [""] * 3
    assert len(measured_of(sweep)) == 3


def test_ctrl_c_keeps_what_there_is() -> None:
    sweep: list[Trial] = []
    with pytest.raises(KeyboardInterrupt):
        swept(failing(POINTS[1], KeyboardInterrupt()), sweep=sweep)
    assert [row.error for row in sweep] == ["", "stopped by hand"]


def test_if_the_smallest_size_fails_no_other_is_tried() -> None:
    sweep: list[Trial] = []
    with pytest.raises(CommandError, match=r"^the smallest size, 1 × 1 × 1, can't be measured: no module my$"):
        swept(failing(POINTS[0], CommandError("no module my")), sweep=sweep)
    assert len(sweep) == 1


def test_a_size_that_would_bring_the_machine_down_is_not_tried() -> None:
    points = [Point(1), Point(1, 1, 2), Point(1, 1, 3)]
    sweep = swept(measured, 3000, points)
    assert [bool(row.error) for row in sweep] == [False, False, True]
    assert sweep[2].error.startswith("not tried: it takes")


def test_other_errors_are_ours_and_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        swept(failing(POINTS[0], ZeroDivisionError()))


def like_a_machine(point: Point, *, rate: float | None = None, p99_ms: float = 12.0) -> Measured:
    """Calls take 10 ms and 1 ms a row."""
    rows_per_s = point.calls * point.rows / (0.01 + 0.001 * point.rows) if rate is None else rate
    return replace(measured(point), rate=rows_per_s, p50_ms=6.0, p99_ms=p99_ms)


@pytest.mark.parametrize(
    ("noisy", "disturbed"),
    [
        (Point(8), like_a_machine(Point(8), p99_ms=286.0)),
        (Point(32), like_a_machine(Point(32), rate=200.0)),  # a batch of 8 gave 444
        (Point(1), like_a_machine(Point(1), rate=30.0)),  # a call of 8 rows took 18 ms, this one 33 ms
    ],
)
def test_an_outlier_is_measured_again_and_the_medians_count(noisy: Point, disturbed: Measured) -> None:
    sweep, again, told = list[Trial](), list[Point](), list[Trial]()
    points = [*POINTS, Point(8, 1, 2)]
    run_sweep(sweep, points, lambda one: disturbed if one == noisy else like_a_machine(one), None, lambda row: None)

    def measure(point: Point) -> Measured:
        again.append(point)
        return like_a_machine(point)

    measure_outliers_again(sweep, measure, told.append)
    assert again == [noisy, noisy]
    (row,) = told
    assert row is sweep[points.index(noisy)]
    assert row.measured is not None
    assert (row.measured.rate, row.measured.p99_ms) == (like_a_machine(noisy).rate, 12.0)
    assert row.measured.rates == (disturbed.rate, *2 * (like_a_machine(noisy).rate,))
    assert row.note.startswith("an outlier, so medians of 3 measurements: ")


def test_without_outliers_nothing_is_measured_again() -> None:
    sweep = swept(like_a_machine)
    measure_outliers_again(sweep, failing(POINTS[0], AssertionError()), pytest.fail)  # type: ignore[arg-type]
    assert [row.note for row in sweep] == [""] * 3


def test_an_outlier_that_cannot_be_measured_again_keeps_what_there_is() -> None:
    sweep = swept(lambda point: like_a_machine(point, p99_ms=286.0 if point.rows == 8 else 12.0))
    measure_outliers_again(sweep, failing(Point(8), CommandError("it went away")), lambda row: None)  # type: ignore[arg-type]
    assert [one.p99_ms for one in measured_of(sweep)] == [12.0, 286.0, 12.0]


def test_ctrl_c_between_the_rounds_of_an_outlier_leaves_its_first_figures() -> None:
    sweep = swept(lambda point: like_a_machine(point, p99_ms=286.0 if point.rows == 8 else 12.0))
    again: list[Point] = []

    def measure(point: Point) -> Measured:
        again.append(point)
        if len(again) == 2:
            raise KeyboardInterrupt
        return like_a_machine(point)

    with pytest.raises(KeyboardInterrupt):
        measure_outliers_again(sweep, measure, lambda row: None)
    assert again == [Point(8), Point(8)]
    assert [one.p99_ms for one in measured_of(sweep)] == [12.0, 286.0, 12.0]
