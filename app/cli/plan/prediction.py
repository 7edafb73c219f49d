"""Predicts what a size takes and gives, by a model of memory and one of throughput, and compares with measurements.

A call of b rows takes about a + c × b seconds, and several calls at once help as far as there are cores. Each measured
pair of instances and replicas has call times of its own: interpolated between measured batch sizes, and beyond them on
the line that fits all best. For another pair, the rate is interpolated by the number of concurrent calls. Beyond the
largest measured batch or number of calls, the rate is assumed not to grow: an unseen bottleneck may limit it, such as
the gateway. A pair measured at one batch size only takes the line of the most similar pair, scaled to that size.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from app.cli.plan.measuring import Measured
from app.cli.plan.memory_model import CacheSize, MemoryModel, Need, fit_memory, fit_non_negative
from app.cli.plan.point import Point

__all__ = [
    "MEMORY_TOLERANCE",
    "RATE_TOLERANCE",
    "CallTimes",
    "Comparison",
    "Prediction",
    "Predictor",
    "ThroughputModel",
    "fit",
    "fit_throughput",
    "held_out_error",
    "unseen_points",
]

MEMORY_TOLERANCE: Final = 0.10
RATE_TOLERANCE: Final = 0.15


@dataclass(frozen=True)
class Comparison:
    """One figure, predicted before it was measured."""

    what: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative to what was measured: 0.1 is 10 % too much."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {"what": self.what, "predicted": self.predicted, "measured": self.measured, "error": self.error}


def held_out_error(measured: Sequence[Measured], cache: CacheSize, *, on_device: bool) -> float | None:
    """The largest relative error of the memory of a size that a fit to all others predicts; None: too few sizes.

    The smallest and largest of each kind are among them: then it is an extrapolation.
    """
    if len(measured) < 4:
        return None
    worst = 0.0
    for index, left_out in enumerate(measured):
        others = [one for place, one in enumerate(measured) if place != index]
        model = fit_memory([one.point for one in others], [one.memory for one in others], cache, on_device=on_device)
        worst = max(worst, abs(model.at(left_out.point).host / left_out.host - 1))
        if on_device and left_out.device:
            worst = max(worst, abs(model.at(left_out.point).device / left_out.device - 1))
    return worst


def unseen_points(measured: Sequence[Point], fits: Callable[[Point], bool]) -> list[Point]:
    """Sizes that were not measured, to be predicted and then run: none is beyond those that were.

    One has the most instances and replicas and rows between the two largest batches, the other one the fewest and rows
    between the two smallest.
    """
    rows = sorted({point.rows for point in measured})
    large, small = (round(math.sqrt(pair[0] * pair[-1])) for pair in (rows[-2:], rows[:2]))
    pairs = [(point.instances, point.replicas) for point in measured]
    wanted = dict.fromkeys((Point(large, *max(pairs)), Point(small, *min(pairs))))
    return [point for point in wanted if point not in measured and fits(point)]


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


class Prediction(NamedTuple):
    """At one size."""

    need: Need
    """Under load."""
    most: Need
    """Likewise, or while the last replica starts, if that is more."""
    rate: float
    """Rows or tokens per second."""
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Predictor:
    """Fitted to what was measured.

    Args:
        memory: at the load that was measured.
        largest: the same with a language model's key/value cache full.
        speed: at a load that keeps all calls full.
        connections: how many that takes.
        p50_factor: of connections / rate: 1 where a request is a row and the server does nothing else.
        p99_factor: of p50.
    """

    memory: MemoryModel
    largest: MemoryModel
    speed: ThroughputModel
    connections: Callable[[Point], int]
    p50_factor: float
    p99_factor: float

    def at(self, point: Point) -> Prediction:
        """What a size takes and gives under the load that was measured."""
        rate = self.speed.rows_per_s(point)
        # Little's law: as many requests are under way as there are connections.
        p50_ms = 1000 * self.p50_factor * self.connections(point) / rate
        return Prediction(
            self.memory.at(point), self.largest.most(point), rate, p50_ms, p50_ms * self.p99_factor
        )  # fmt: skip


def fit(
    measured: Sequence[Measured],
    connections: Callable[[Point], int],
    filled_cache: Callable[[int], int],
    largest_cache: Callable[[int], int],
) -> Predictor:
    """Fit both models.

    Args:
        measured: at least one.
        connections: of the load at a size.
        filled_cache: bytes of a replica's key/value cache under that load, by sequences.
        largest_cache: likewise, at most.
    """
    points = [one.point for one in measured]
    memories = [one.memory for one in measured]
    on_device = measured[0].device_name.startswith("cuda")
    return Predictor(
        memory=fit_memory(points, memories, filled_cache, on_device=on_device),
        largest=fit_memory(points, memories, filled_cache, on_device=on_device).with_cache(largest_cache),
        speed=fit_throughput(points, [one.rate for one in measured]),
        connections=connections,
        p50_factor=statistics.median(one.p50_ms / 1000 * one.rate / one.connections for one in measured),
        p99_factor=statistics.median(one.p99_ms / one.p50_ms for one in measured),
    )
