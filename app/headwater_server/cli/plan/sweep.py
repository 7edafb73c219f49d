"""Measures the sizes that the models are fitted to.

A size that fails twice keeps its reason, and the other sizes are measured. An outlier is measured again: a size
disturbed by something else on the machine would distort the models, and with them the recommendations.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Final

from headwater_server.cli.plan.measuring import Measured
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.trial import Trial
from headwater_server.errors import CommandError
from headwater_server.process.machine import size_text

__all__ = ["measure_outliers_again", "measured_of", "run_sweep"]

SAFE_PART: Final = 0.9
"""A size that would take more than this part of the machine's memory is not tried."""
SLOW_FACTOR: Final = 1.5
"""An outlier is slower by this factor than a size that should not be faster."""
TAIL_FACTOR: Final = 4.0
"""An outlier's ratio of p99 to p50 is larger by this factor than that of the other sizes."""
MORE_ROUNDS: Final = 2
"""How often an outlier is measured again. Of three rounds the median is not the outlier's."""


def measured_of(trials: Sequence[Trial]) -> list[Measured]:
    """The figures of the sizes that were measured."""
    return [one for trial in trials if (one := trial.measured) is not None]


def run_sweep(
    trials: list[Trial],
    points: Sequence[Point],
    measure: Callable[[Point], Measured],
    capacity: int | None,
    progress: Callable[[Trial], None],
) -> None:
    """Measure each size. One that fails after others succeeded is tried once more, since the cause may be gone.

    Args:
        trials: gets one for each size.
        points: the sizes, the smallest first.
        measure: measures one; raises CommandError if it can't be measured.
        capacity: bytes of the machine's memory; None: unknown.
        progress: called with each trial.

    Raises:
        CommandError: the smallest size can't be measured.
        KeyboardInterrupt: the last trial of the list was interrupted.
    """
    for point in points:
        measured = measured_of(trials)
        trial = Trial(point, error=_too_large(point, measured, capacity))
        trials.append(trial)
        if not trial.error:
            trial.run(functools.partial(measure, point))
            if trial.error and measured:
                trial.first_error, trial.error = trial.error, ""
                trial.run(functools.partial(measure, point))
        progress(trial)
        if trial.error and not measured:
            raise CommandError(f"the smallest size, {point}, can't be measured: {trial.error}")


def measure_outliers_again(
    trials: Sequence[Trial], measure: Callable[[Point], Measured], progress: Callable[[Trial], None]
) -> None:
    """Add two rounds to each outlier, so that its figures are medians. Arguments as for `run_sweep`.

    Raises:
        KeyboardInterrupt: the outlier that was being measured has its first figures again.
    """
    measured = measured_of(trials)
    for trial in trials:
        if trial.measured is not None and _is_outlier(trial.measured, measured):
            try:
                for _ in range(MORE_ROUNDS):
                    trial.run(functools.partial(measure, trial.point))
                    trial.error = ""  # the rounds that succeeded still count
            except KeyboardInterrupt:
                del trial.rounds[1:]  # the median of two would be half the outlier's
                raise
            progress(trial)


def _is_outlier(one: Measured, measured: Sequence[Measured]) -> bool:
    """Whether something other than its size seems to have slowed it down.

    The comparisons hold for any model: a call takes no longer than one with more rows, and a larger size gives no less
    than a smaller one.
    """
    size = one.point
    others = [other for other in measured if other.point != size]
    tails = [other.p99_ms / other.p50_ms for other in others]
    if tails and one.p99_ms / one.p50_ms > TAIL_FACTOR * statistics.median_low(tails):
        return True
    for other in others:
        if all(less <= more for less, more in zip(other.point, size, strict=True)):
            if other.rate > SLOW_FACTOR * one.rate:
                return True
        elif other.point[1:] == size[1:] and size.rows / one.rate > SLOW_FACTOR * other.point.rows / other.rate:
            return True
    return False


def _too_large(point: Point, measured: Sequence[Measured], capacity: int | None) -> str:
    """Why a size is not tried: this many of the largest replica measured so far would exhaust the machine's memory."""
    if not measured or capacity is None:
        return ""
    largest = max(max(one.replica_starting_bytes, one.replica_bytes) for one in measured)
    least = max(one.server_bytes + one.shared_files_bytes for one in measured) + point.replicas * largest
    if least <= SAFE_PART * capacity:
        return ""
    return f"not tried: it takes {size_text(least)} at least, and the machine has {size_text(capacity)}"
