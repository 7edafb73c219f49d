"""Sizes that are predicted first and then run, a recommended one in several rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from app.plan.accuracy import Comparison
from app.plan.measuring import Measured
from app.plan.point import Point
from app.plan.prediction import Prediction
from app.plan.profiles import Profile

__all__ = ["Recommendation", "Trial", "combined"]


@dataclass
class Trial:
    """A size that was predicted first and then run."""

    point: Point
    predicted: Prediction
    rounds: list[Measured] = field(default_factory=list)
    """What each round gave, as far as they went well."""
    error: str = ""
    """Why it could not be run, or not to the end."""

    @property
    def measured(self) -> Measured | None:
        """All rounds as one; None: it was not run, or one of them failed."""
        return combined(self.rounds) if self.rounds and not self.error else None

    @property
    def comparisons(self) -> list[Comparison]:
        """What was predicted beside what was measured."""
        measured = self.measured
        if measured is None:
            return []
        found = [Comparison("host memory", self.predicted.need.host, measured.host)]
        if measured.device:
            found.append(Comparison("device memory", self.predicted.need.device, measured.device))
        return [*found, Comparison("rate", self.predicted.rate, measured.rate)]


@dataclass
class Recommendation:
    """A profile, its file, and what came of running that."""

    profile: Profile
    trial: Trial | None = None
    """None: the profile is left out."""
    file: Path | None = None


def combined(rounds: Sequence[Measured]) -> Measured:
    """Several rounds at one size as one: the most of the memory, the medians of the rest, and all rates.

    Args:
        rounds: at least one.
    """
    if len(rounds) == 1:
        return rounds[0]
    largest = max(rounds, key=lambda one: one.host)
    return replace(
        largest,
        device=max(one.device for one in rounds),
        rate=statistics.median(one.rate for one in rounds),
        p50_ms=statistics.median(one.p50_ms for one in rounds),
        p99_ms=statistics.median(one.p99_ms for one in rounds),
        mean_rows=statistics.median(one.mean_rows for one in rounds),
        load_share=max(one.load_share for one in rounds),
        rates=tuple(one.rate for one in rounds),
    )
