"""What was measured, as a table: medians and ranges over rounds, ratios round by round, goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.fanout_report import Ratio, ratio_line
from benchmarks.peers.contenders import OURS

__all__ = ["Figure", "print_scenario"]


@dataclass(frozen=True)
class Figure:
    """One contender in one round."""

    scenario: str
    connections: int
    contender: str
    round: int
    per_s: float
    """Requests, rows or tokens."""
    p50_ms: float | None = None
    """Of a stream: to its first token."""
    p99_ms: float | None = None
    cpu_ms: float | None = None
    """Processor time that the server's processes took for a request or for a thousand tokens."""


_GOALS: Mapping[tuple[str, int, str, str], tuple[float | None, float | None]] = {
    ("scale", 64, "triton-http", "per_s"): (3.0, None),
    ("scale", 64, "mosec", "per_s"): (0.6, None),
    ("scale", 64, "litserve", "per_s"): (6, None),
    ("scale", 64, "fastapi", "per_s"): (2.5, None),
    ("scale", 1, "triton-http", "p50_ms"): (None, 0.9),
    ("scale-4", 1, "triton-native", "p50_ms"): (None, 2.0),
    ("scale-4", 64, "triton-native", "per_s"): (1.0, None),
    ("scale-4", 64, "triton-native", "cpu_ms"): (None, 1.2),
    ("scale-4", 64, "mosec", "per_s"): (0.8, None),
    ("scale-2ms", 1, "triton-native", "p50_ms"): (None, 1.2),
    ("text", 64, "bare", "per_s"): (0.9, None),
    ("text", 64, "mosec", "per_s"): (1.0, None),
    ("text", 64, "litserve", "per_s"): (1.0, None),
    ("mixed", 64, "mosec", "per_s"): (1.2, None),
    ("embeddings", 64, "mosec", "per_s"): (1.2, None),
    ("embeddings", 64, "litserve", "per_s"): (1.2, None),
    ("rerank", 64, "mosec", "per_s"): (1.2, None),
    ("rerank", 64, "litserve", "per_s"): (1.2, None),
    ("image", 1, "triton-http", "p50_ms"): (None, 1.1),
    ("image", 16, "triton-http", "p50_ms"): (None, 1.1),
}
"""By scenario, connections, peer and what is compared: the least and the most that the ratio's median may be."""
_GROWTH_AT_LEAST = 0.9
"""Of the throughput at the scenario's usual number of connections, with many more."""


def print_scenario(figures: Sequence[Figure], unit: str) -> None:
    """The tables of one scenario.

    Args:
        figures: all of its rounds.
        unit: what is counted a second.
    """
    print(
        f"\n{'connections':>11}  {'contender':<16} {unit:>12} {'range':>18} {'p50 ms':>9} {'p99 ms':>9} {'CPU ms':>8}"
    )
    for count, name in dict.fromkeys((figure.connections, figure.contender) for figure in figures):
        found = _of(figures, count, name)
        rates = [figure.per_s for figure in found]
        print(
            f"{count:>11}  {name:<16} {statistics.median(rates):>12,.0f} "
            f"{f'{min(rates):,.0f} to {max(rates):,.0f}':>18} "
            f"{_median(found, lambda one: one.p50_ms):>9} {_median(found, lambda one: one.p99_ms):>9} "
            f"{_median(found, lambda one: one.cpu_ms):>8}"
        )
    ratios = list(_ratios(figures, unit))
    if ratios:
        print(f"\n{'ratio, round by round':<46} {'median':>7} {'quartiles':>16} {'range':>16}")
    for ratio in ratios:
        print(ratio_line(ratio))


def _ratios(figures: Sequence[Figure], unit: str) -> list[Ratio]:
    ratios = []
    scenario = figures[0].scenario
    counts = list(dict.fromkeys(figure.connections for figure in figures))
    for count in counts:
        ours = {figure.round: figure for figure in _of(figures, count, OURS)}
        for name in dict.fromkeys(figure.contender for figure in figures if figure.connections == count):
            theirs = {figure.round: figure for figure in _of(figures, count, name)}
            rounds = sorted(ours.keys() & theirs.keys())
            if name == OURS or not rounds:
                continue
            for kind, told in (("per_s", unit), ("p50_ms", "p50"), ("cpu_ms", "CPU")):
                pairs = [(getattr(ours[one], kind), getattr(theirs[one], kind)) for one in rounds]
                if any(value is None for pair in pairs for value in pair):
                    continue
                at_least, at_most = _GOALS.get((scenario, count, name, kind), (None, None))
                told_of = f"{count} connections, {told}: ours / {name}"
                ratios.append(Ratio(told_of, [a / b for a, b in pairs], at_least=at_least, at_most=at_most))
    few = max((figure.connections for figure in figures if figure.contender != OURS), default=0)
    before = {figure.round: figure.per_s for figure in _of(figures, few, OURS)}
    for count in counts:
        after = {figure.round: figure.per_s for figure in _of(figures, count, OURS)}
        rounds = sorted(before.keys() & after.keys())
        if count > few > 0 and rounds:
            values = [after[one] / before[one] for one in rounds]
            ratios.append(Ratio(f"ours, {count} / {few} connections", values, at_least=_GROWTH_AT_LEAST))
    return ratios


def _of(figures: Sequence[Figure], connections: int, contender: str) -> list[Figure]:
    return [one for one in figures if one.connections == connections and one.contender == contender]


def _median(figures: Sequence[Figure], value: Callable[[Figure], float | None]) -> str:
    values = [found for figure in figures if (found := value(figure)) is not None]
    return f"{statistics.median(values):,.2f}" if values else "-"
