"""A size that is run, once or in several rounds, and its figures beside those predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headwater_server.cli.bench.closed_loop import STOPPED
from headwater_server.cli.plan.measuring import RATE_TOLERANCE, Measured, combined
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.prediction import Prediction
from headwater_server.errors import CommandError

__all__ = ["MEMORY_TOLERANCE", "Comparison", "Trial"]

MEMORY_TOLERANCE: Final = 0.10
"""Relative error up to which a prediction of memory holds."""


class Comparison(NamedTuple):
    """One figure, predicted before it was measured."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The prediction's relative error: 0.1 means 10 % more than was measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def is_off(self) -> bool:
        """Whether the error is larger than it should be."""
        return abs(self.error) > (RATE_TOLERANCE if self.what == "rate" else MEMORY_TOLERANCE)


@dataclass
class Trial:
    """A size and what was measured at it so far."""

    point: Point
    predicted: Prediction | None = None
    """None: the models are fitted to this size."""
    rounds: list[Measured] = field(default_factory=list)
    """The rounds that succeeded."""
    error: str = ""
    """Why the size, or its last round, could not be measured, in one line; empty: it was."""
    first_error: str = ""
    """Why the first try failed, if there was a second."""

    def run(self, measure: Callable[[], Measured]) -> None:
        """Add a round, or the error of one. KeyboardInterrupt passes; it is an error if it stops the first round."""
        try:
            self.rounds.append(measure())
        except CommandError as error:
            self.error = " | ".join(str(error).splitlines())
        except KeyboardInterrupt:
            if not self.rounds:
                self.error = STOPPED
            raise

    @property
    def measured(self) -> Measured | None:
        """All rounds as one; None: there was no round, or one failed."""
        return combined(self.rounds) if self.rounds and not self.error else None

    @property
    def note(self) -> str:
        """What to know of the figures of a size without a prediction, or why there are none; empty: nothing."""
        one = self.measured
        if one is None:
            return self.error
        notes = ["the load generator was busy"] if one.generator_cpu_share > 0.9 else []
        if self.first_error:
            notes.append(f"at the second try; at the first: {self.first_error}")
        if one.rates:
            notes.append(f"an outlier, so medians of {len(one.rates)} measurements: {one.spread_text}")
        return "; ".join(notes)

    @property
    def comparisons(self) -> list[Comparison]:
        """The predicted figures beside the measured ones."""
        predicted, measured = self.predicted, self.measured
        if predicted is None or measured is None:
            return []
        found = [Comparison("host memory", predicted.need.host, measured.host_bytes)]
        if measured.device_bytes:
            found.append(Comparison("device memory", predicted.need.device, measured.device_bytes))
        return [*found, Comparison("rate", predicted.rate, measured.rate)]
