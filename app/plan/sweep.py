"""Measures sizes one after the other; one that fails twice leaves its reason, and what was measured stays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from app.errors import CommandError
from app.plan.measuring import Measured
from app.plan.point import Point
from app.process.machine import size_text

__all__ = ["Row", "Sweep", "run_sweep"]

SAFE_PART: Final = 0.9
"""Of the machine's memory: a size that would take more is not tried."""


@dataclass(frozen=True)
class Row:
    """What came of one size."""

    point: Point
    measured: Measured | None
    error: str
    """Why it was not measured, in one line; empty: it was."""
    first_error: str = ""
    """Why the first try failed, where there was a second."""


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
