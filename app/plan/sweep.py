"""Measures sizes one after the other; one that fails twice leaves its reason, and what was measured stays.

A size that is out of line with the others is measured again: one that something else on the machine disturbed would
bend the models, and the recommendations with them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from app.errors import CommandError
from app.memory_budget import size_text
from app.plan.measuring import Measured
from app.plan.point import Point
from app.plan.profile_comments import spread_text
from app.plan.trial import combined

__all__ = ["Row", "Sweep", "measure_outliers_again", "run_sweep"]

SAFE_PART: Final = 0.9
"""Of the machine's memory: a size that would take more is not tried."""
SLOW_FACTOR: Final = 1.5
"""An outlier is so many times slower than a size that should not be faster."""
TAIL_FACTOR: Final = 4.0
"""An outlier's p99, relative to its p50, is so many times that of the other sizes."""
MORE_ROUNDS: Final = 2
"""With the first three, so that the median is not the outlier."""


@dataclass(frozen=True)
class Row:
    """What came of one size."""

    point: Point
    measured: Measured | None
    error: str
    """Why it was not measured, in one line; empty: it was."""
    first_error: str = ""
    """Why the first try failed, where there was a second."""

    @property
    def note(self) -> str:
        """What a reader must know of the figures, or why there are none; empty: nothing."""
        if self.measured is None:
            return self.error
        notes = ["the load's generator was busy"] if self.measured.load_share > 0.9 else []
        if self.first_error:
            notes.append(f"at the second try; at the first: {self.first_error}")
        if self.measured.rates:
            rates = spread_text(self.measured)
            notes.append(f"an outlier, so medians of {len(self.measured.rates)} measurements: {rates}")
        return "; ".join(notes)


@dataclass
class Sweep:
    """What came of all so far."""

    rows: list[Row] = field(default_factory=list)
    ended: str = ""
    """Why it ended before its end; empty: it did not."""

    @property
    def measured(self) -> list[Measured]:
        """Those sizes that were measured."""
        return [row.measured for row in self.rows if row.measured is not None]


def run_sweep(
    sweep: Sweep,
    points: Sequence[Point],
    measure: Callable[[Point], Measured],
    capacity: int | None,
    progress: Callable[[Row], None],
) -> None:
    """Measure each size; Ctrl-C ends it with what there is, and so does a smallest size that can't be measured.

    A size that fails after others did not is tried once more: what they have in common can't be wrong.

    Args:
        sweep: gets what came of each.
        points: the smallest first.
        measure: one; raises CommandError if it can't be.
        capacity: bytes that the machine has; None: unknown.
        progress: gets that, too.
    """
    for point in points:
        row = Row(point, None, _too_large(sweep, point, capacity))
        if not row.error:
            row = _measured(sweep, point, measure)
            if row.error and not sweep.ended and sweep.measured:
                row = replace(_measured(sweep, point, measure), first_error=row.error)
        sweep.rows.append(row)
        progress(row)
        if not sweep.measured and not sweep.ended:
            sweep.ended = f"the smallest size, {point}, can't be measured: {row.error}"
        if sweep.ended:
            break


def measure_outliers_again(sweep: Sweep, measure: Callable[[Point], Measured], progress: Callable[[Row], None]) -> None:
    """Measure each outlier twice more, and take the medians.

    Args:
        sweep: has all sizes; an outlier's row is replaced.
        measure: as of `run_sweep`.
        progress: gets each row that is replaced.
    """
    first = sweep.measured
    for place, row in enumerate(sweep.rows):
        if row.measured is None or not _is_outlier(row.measured, first):
            continue
        rounds = [row.measured]
        for _ in range(MORE_ROUNDS):
            if (again := _measured(sweep, row.point, measure).measured) is not None:
                rounds.append(again)
            if sweep.ended:
                return
        sweep.rows[place] = replace(row, measured=combined(rounds))
        progress(sweep.rows[place])


def _is_outlier(one: Measured, measured: Sequence[Measured]) -> bool:
    """Whether something else than its size seems to have slowed it down.

    Sizes are compared that can be whatever the model is: a call takes no longer than one with more rows, and a larger
    size gives no less than a smaller one.
    """
    others = [other for other in measured if other is not one]
    tails = [other.p99_ms / other.p50_ms for other in others]
    if tails and one.p99_ms / one.p50_ms > TAIL_FACTOR * statistics.median_low(tails):
        return True
    size = one.point
    for other in others:
        if all(less <= more for less, more in zip(other.point, size, strict=True)):
            if other.rate > SLOW_FACTOR * one.rate:
                return True
        elif other.point[1:] == size[1:] and size.rows / one.rate > SLOW_FACTOR * other.point.rows / other.rate:
            return True
    return False


def _measured(sweep: Sweep, point: Point, measure: Callable[[Point], Measured]) -> Row:
    """One try."""
    try:
        return Row(point, measure(point), "")
    except CommandError as error:
        return Row(point, None, " | ".join(str(error).splitlines()))
    except KeyboardInterrupt:
        sweep.ended = "stopped by hand"
        return Row(point, None, sweep.ended)


def _too_large(sweep: Sweep, point: Point, capacity: int | None) -> str:
    """Why a size is not tried: so many of the largest replica measured yet would bring the machine down."""
    if not sweep.measured or capacity is None:
        return ""
    largest = max(max(one.memory.starting, one.memory.replica) for one in sweep.measured)
    least = max(one.memory.server + one.memory.files for one in sweep.measured) + point.replicas * largest
    if least <= SAFE_PART * capacity:
        return ""
    return f"not tried: it takes {size_text(round(least))} at least, and the machine has {size_text(capacity)}"
