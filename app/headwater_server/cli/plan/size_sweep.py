"""Measures the sizes to which the models are fitted.

If a size fails twice, its reason is recorded and the remaining sizes are measured. An outlier is measured again: a
measurement that other work on the machine disturbed would distort the models, and so the recommendations.
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
"""Fraction of the machine's memory; a size that would take more is not tried."""
SLOW_FACTOR: Final = 1.5
"""Factor by which an outlier is slower than a size that should not be faster."""
TAIL_FACTOR: Final = 4.0
"""Factor by which an outlier's ratio of p99 to p50 exceeds the median ratio of the other sizes."""
MORE_ROUNDS: Final = 2
"""How often an outlier is measured again. With three rounds the median is not the outlier."""


def measured_of(trials: Sequence[Trial]) -> list[Measured]:
    """The figures of the sizes that were measured."""
    return [measurement for trial in trials if (measurement := trial.measured) is not None]


def run_sweep(
    trials: list[Trial],
    points: Sequence[Point],
    measure: Callable[[Point], Measured],
    capacity: int | None,
    progress: Callable[[Trial], None],
) -> None:
    """Measure each size. A size that fails after another size succeeded is tried a second time, since the cause may be
    gone.

    Args:
        trials: list to which a trial is appended for each size.
        points: the sizes, the smallest first.
        measure: measures a size; raises CommandError if the size can't be measured.
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
        KeyboardInterrupt: the interrupted outlier keeps only its first figures.
    """
    measured = measured_of(trials)
    for trial in trials:
        if trial.measured is not None and _is_outlier(trial.measured, measured):
            try:
                for _ in range(MORE_ROUNDS):
                    trial.run(functools.partial(measure, trial.point))
                    trial.error = ""  # the rounds that succeeded still count
            except KeyboardInterrupt:
                del trial.rounds[1:]  # the median of two rounds would be half the outlier
                raise
            progress(trial)


def _is_outlier(measurement: Measured, measured: Sequence[Measured]) -> bool:
    """Whether a size seems to have been slowed down by a cause other than the size itself.

    The comparisons hold for any model: a call takes no longer than a call with more rows, and a larger size has at
    least the rate of a smaller size.
    """
    size = measurement.point
    peers = [peer for peer in measured if peer.point != size]
    tails = [peer.p99_ms / peer.p50_ms for peer in peers]
    if tails and measurement.p99_ms / measurement.p50_ms > TAIL_FACTOR * statistics.median_low(tails):
        return True
    for peer in peers:
        if all(less <= more for less, more in zip(peer.point, size, strict=True)):
            if peer.rate > SLOW_FACTOR * measurement.rate:
                return True
        elif peer.point[1:] == size[1:] and size.rows / measurement.rate > SLOW_FACTOR * peer.point.rows / peer.rate:
            return True
    return False


def _too_large(point: Point, measured: Sequence[Measured], capacity: int | None) -> str:
    """Why a size is not tried: this many replicas, each as large as the largest measured so far, would exhaust the
    machine's memory. Empty if the size may be tried."""
    if not measured or capacity is None:
        return ""
    largest = max(max(measurement.replica_starting_bytes, measurement.replica_bytes) for measurement in measured)
    needed_bytes = (
        max(measurement.server_bytes + measurement.shared_files_bytes for measurement in measured)
        + point.replicas * largest
    )
    if needed_bytes <= SAFE_PART * capacity:
        return ""
    return f"not tried: it takes {size_text(needed_bytes)} at least, and the machine has {size_text(capacity)}"
