"""Rows per second as a function of the size, from what was measured at some.

A call of b rows takes about a + c × b seconds, and several are computed at once, which helps as far as there are cores.
So each pair of instances and replicas that was measured has call times of its own: between two batch sizes that were
measured on the line between these, beyond them on the line that fits all best. Of another pair the gain is interpolated
by how many calls there are at once. Neither larger batches nor more calls than were measured are taken to give more
than the largest rate that was: what limits beyond that nobody has seen, the gateway for one. A pair that was measured
at one batch size only has the line of the pair that is most like it, as much slower or faster as it is at that size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from app.plan.least_squares import fit_non_negative
from app.plan.point import Point

__all__ = ["CallTimes", "ThroughputModel", "fit_throughput"]


@dataclass(frozen=True)
class CallTimes:
    """Of one pair of instances and replicas: how long a call would take if calls came one after the other."""

    measured: tuple[tuple[int, float], ...]
    """Rows and seconds, the fewest rows first."""
    call_s: float
    """For other sizes call_s + rows × row_s."""
    row_s: float

    def rows_per_s(self, rows: int) -> float:
        """With calls of so many rows."""
        rate = rows / self._seconds(rows)
        if rows <= self.measured[-1][0]:
            return rate
        return min(rate, max(fewer / seconds for fewer, seconds in self.measured))

    def _seconds(self, rows: int) -> float:
        for (fewer, less_s), (more, more_s) in itertools.pairwise(self.measured):
            if fewer <= rows <= more:
                return less_s + (more_s - less_s) * (rows - fewer) / (more - fewer)
        nearest, seconds = self.measured[0] if rows <= self.measured[0][0] else self.measured[-1]
        # As much slower or faster than the line as the nearest size.
        return seconds * (self.call_s + rows * self.row_s) / (self.call_s + nearest * self.row_s)


@dataclass(frozen=True)
class ThroughputModel:
    """By instances and replicas; fitted."""

    times: Mapping[tuple[int, int], CallTimes]

    def rows_per_s(self, point: Point) -> float:
        """With as much to do as can be done."""
        known = self.times.get((point.instances, point.replicas))
        if known is not None:
            return known.rows_per_s(point.rows)
        found: dict[int, list[float]] = {}
        for (instances, replicas), time in self.times.items():
            found.setdefault(instances * replicas, []).append(time.rows_per_s(point.rows))
        rates = sorted((calls, sum(each) / len(each)) for calls, each in found.items())
        return _interpolated(rates, point.calls)


def fit_throughput(points: Sequence[Point], rows_per_s: Sequence[float]) -> ThroughputModel:
    """Fit the model to what was measured.

    Args:
        points: at least one.
        rows_per_s: at these, each above 0.
    """
    groups: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for point, rate in zip(points, rows_per_s, strict=True):
        groups.setdefault((point.instances, point.replicas), []).append((point.rows, point.rows / rate))
    times = {pair: _call_times(measured) for pair, measured in groups.items()}
    lines = [pair for pair, time in times.items() if len(time.measured) > 1]
    for pair, time in times.items():
        if lines and pair not in lines:
            like = times[min(lines, key=lambda line: (abs(line[0] * line[1] - pair[0] * pair[1]), line))]
            times[pair] = replace(time, call_s=like.call_s, row_s=like.row_s)
    return ThroughputModel(times)


def _call_times(measured: Sequence[tuple[int, float]]) -> CallTimes:
    times = sorted(measured)
    call_s, row_s = fit_non_negative([(1.0, float(rows)) for rows, _ in times], [seconds for _, seconds in times])
    return CallTimes(tuple(times), call_s, row_s)


def _interpolated(rates: Sequence[tuple[int, float]], calls: int) -> float:
    """Between the nearest two; outside of all the nearest."""
    below = max((one for one in rates if one[0] <= calls), default=rates[0])
    above = min((one for one in rates if one[0] >= calls), default=rates[-1])
    if above[0] <= below[0]:
        return below[1]
    return below[1] + (above[1] - below[1]) * (calls - below[0]) / (above[0] - below[0])
