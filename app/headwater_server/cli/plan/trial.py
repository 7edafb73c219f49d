"""A size that is run in one or several rounds, and its measured figures beside the predicted figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headwater_server.cli.bench.closed_loop import STOPPED
from headwater_server.cli.plan.measuring import RATE_TOLERANCE, Measured, combined
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.prediction import Prediction
from headwater_server.errors import CommandError

__all__ = ["MEMORY_TOLERANCE", "Trial", "TrialComparison"]

MEMORY_TOLERANCE: Final = 0.10
"""Maximum relative error of a prediction of memory; for a rate see `RATE_TOLERANCE`."""


class TrialComparison(NamedTuple):
    """A figure that was predicted before it was measured."""

    what: str
    """``host memory``, ``device memory`` (both in bytes) or ``rate``."""
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The prediction's relative error: 0.1 means that 10 % more was predicted than measured."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def is_off(self) -> bool:
        """Whether the error is larger than the tolerance."""
        return abs(self.error) > (RATE_TOLERANCE if self.what == "rate" else MEMORY_TOLERANCE)


@dataclass
class Trial:
    """A size with its figures so far."""

    point: Point
    predicted: Prediction | None = None
    """The prediction; None for a size to which the models are fitted."""
    rounds: list[Measured] = field(default_factory=list)
    """The rounds that succeeded."""
    error: str = ""
    """Why the size, or its last round, could not be measured, on one line; empty: measured, or not run."""
    first_error: str = ""
    """Why the first attempt failed, if there was a second attempt."""

    def run(self, measure: Callable[[], Measured]) -> None:
        """Run a round, and add its figures or its error. KeyboardInterrupt is raised again; if it stops the first
        round, it is also recorded as the error."""
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
        """The combined figures of all rounds; None if there was no round or a round failed."""
        return combined(self.rounds) if self.rounds and not self.error else None

    @property
    def note(self) -> str:
        """A remark about the figures of a size without a prediction, or why it has no figures; otherwise empty."""
        measured = self.measured
        if measured is None:
            return self.error
        notes = ["the load generator was busy"] if measured.generator_cpu_share > 0.9 else []
        if self.first_error:
            notes.append(f"at the second try; at the first: {self.first_error}")
        if measured.rates:
            notes.append(f"an outlier, so medians of {len(measured.rates)} measurements: {measured.spread_text}")
        return "; ".join(notes)

    @property
    def comparisons(self) -> list[TrialComparison]:
        """The predicted figures beside the measured figures; empty if either are missing."""
        predicted, measured = self.predicted, self.measured
        if predicted is None or measured is None:
            return []
        comparisons = [TrialComparison("host memory", predicted.need.host, measured.host_bytes)]
        if measured.device_bytes:
            comparisons.append(TrialComparison("device memory", predicted.need.device, measured.device_bytes))
        return [*comparisons, TrialComparison("rate", predicted.rate, measured.rate)]
