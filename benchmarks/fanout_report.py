"""Medians, spreads and goals, as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Ratio", "Spread", "ratio_line", "times_line"]


class Spread(NamedTuple):
    """How figures of one kind lie."""

    median: float
    low_quartile: float
    high_quartile: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
        return cls(median, low, high, min(values), max(values))


class Ratio(NamedTuple):
    """One figure over another, round by round."""

    name: str
    values: Sequence[float]
    at_most: float | None = None
    """The goal for the median, if there is one."""
    at_least: float | None = None
    """The other kind of goal."""


def times_line(layout: str, kind: str, values_ms: Sequence[float]) -> str:
    """A row of the table of latencies, in milliseconds."""
    found = Spread.of(values_ms)
    quartiles = f"{found.low_quartile:.1f} to {found.high_quartile:.1f}"
    return f"{layout:<16} {kind:<6} {found.median:>8.1f} {quartiles:>18} {f'{found.least:.1f} to {found.most:.1f}':>18}"


def ratio_line(ratio: Ratio) -> str:
    """A row of the table of ratios."""
    found = Spread.of(ratio.values)
    quartiles = f"{found.low_quartile:.3f} to {found.high_quartile:.3f}"
    line = f"{ratio.name:<46} {found.median:>7.3f} {quartiles:>16} {f'{found.least:.3f} to {found.most:.3f}':>16}"
    if ratio.at_most is not None:
        line += f"  goal <= {ratio.at_most:g}: {'pass' if found.median <= ratio.at_most else 'MISS'}"
    if ratio.at_least is not None:
        line += f"  goal >= {ratio.at_least:g}: {'pass' if found.median >= ratio.at_least else 'MISS'}"
    return line
