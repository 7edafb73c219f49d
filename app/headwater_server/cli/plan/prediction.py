"""Predicts the memory and speed of a size with models that are fitted to measured sizes.

A call of b rows takes about a + c × b seconds, and concurrent calls raise the rate while there are cores for them. Each
measured pair of instances and replicas has separate call times: between measured batch sizes they are interpolated, and
beyond them they follow the line that fits all sizes of the pair best. For a pair that was not measured, the rate is
interpolated by the number of concurrent calls. Beyond the largest measured batch or number of calls, the rate is
assumed not to grow, since an unseen bottleneck such as the gateway may limit it. A pair measured at a single batch size
takes the line of the most similar pair, scaled to that size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from headwater_server.cli.plan.measuring import Measured
from headwater_server.cli.plan.memory_model import CacheSize, MemoryModel, Need, fit_memory, fit_non_negative
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.subject import Subject

__all__ = [
    "CallTimes",
    "Prediction",
    "Predictor",
    "ThroughputModel",
    "fit",
    "fit_throughput",
    "held_out_error",
    "unseen_points",
]


def held_out_error(measured: Sequence[Measured], cache: CacheSize) -> float | None:
    """The largest relative error of the predicted memory of a size when that size is left out of the fit; None if fewer
    than four sizes were measured.

    For the smallest and the largest size the prediction is an extrapolation.
    """
    if len(measured) < 4:
        return None
    errors = []
    for index, left_out in enumerate(measured):
        need = fit_memory([*measured[:index], *measured[index + 1 :]], cache).at(left_out.point)
        errors.append(abs(need.host / left_out.host_bytes - 1))
        if left_out.is_on_gpu and left_out.device_bytes:
            errors.append(abs(need.device / left_out.device_bytes - 1))
    return max(errors)


def unseen_points(measured: Sequence[Point], fits: Callable[[Point], bool]) -> list[Point]:
    """Up to two sizes that fit and were not measured, but lie between measured sizes.

    The first has the most instances and replicas, and rows between the two largest batches. The second has the fewest
    instances and replicas, and rows between the two smallest batches.
    """
    rows = sorted({point.rows for point in measured})
    large, small = (round(math.sqrt(pair[0] * pair[-1])) for pair in (rows[-2:], rows[:2]))
    pairs = [(point.instances, point.replicas) for point in measured]
    wanted = dict.fromkeys((Point(large, *max(pairs)), Point(small, *min(pairs))))
    return [point for point in wanted if point not in measured and fits(point)]


@dataclass(frozen=True)
class CallTimes:
    """Durations of the calls of a pair of instances and replicas, as if calls were made in sequence: rows divided by
    the measured rate."""

    measured: Sequence[tuple[int, float]]
    """Pairs of rows and seconds, the fewest rows first."""
    call_s: float
    """For sizes that were not measured, a call takes call_s + rows × row_s, scaled to the nearest measured size."""
    row_s: float

    def rows_per_s(self, rows: int) -> float:
        """Rows per second with calls of this many rows."""
        sizes, seconds = zip(*self.measured, strict=True)
        nearest = min(max(rows, sizes[0]), sizes[-1])
        scale = (self.call_s + rows * self.row_s) / (self.call_s + nearest * self.row_s)
        rate: float = rows / (scale * float(np.interp(nearest, sizes, seconds)))
        return rate if rows <= sizes[-1] else min(rate, max(size / time_s for size, time_s in self.measured))


@dataclass(frozen=True)
class ThroughputModel:
    """The fitted model of speed."""

    times: Mapping[tuple[int, int], CallTimes]
    """Call times by pair of instances and replicas."""

    def rows_per_s(self, point: Point) -> float:
        """Rows (of a language model: tokens) per second if all calls are kept full."""
        call_times = self.times.get((point.instances, point.replicas))
        if call_times is not None:
            return call_times.rows_per_s(point.rows)
        rates: dict[int, list[float]] = {}
        for (instances, replicas), times in sorted(self.times.items(), key=lambda item: math.prod(item[0])):
            rates.setdefault(instances * replicas, []).append(times.rows_per_s(point.rows))
        return float(np.interp(point.calls, list(rates), [statistics.mean(each) for each in rates.values()]))


def fit_throughput(points: Sequence[Point], rows_per_s: Sequence[float]) -> ThroughputModel:
    """Fit the model to at least one size with its measured rate. Rates must be above 0."""
    groups: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for point, rate in sorted(zip(points, rows_per_s, strict=True)):
        groups.setdefault((point.instances, point.replicas), []).append((point.rows, point.rows / rate))
    times = {}
    for pair, measured in groups.items():
        line = fit_non_negative([(1.0, float(rows)) for rows, _ in measured], [seconds for _, seconds in measured])
        times[pair] = CallTimes(measured, *line)
    lines = [pair for pair, measured in groups.items() if len(measured) > 1]
    for pair, time in times.items():
        if lines and pair not in lines:
            like = times[min(lines, key=lambda line: (abs(line[0] * line[1] - pair[0] * pair[1]), line))]
            times[pair] = replace(time, call_s=like.call_s, row_s=like.row_s)
    return ThroughputModel(times)


class Prediction(NamedTuple):
    """The predicted figures for a size."""

    need: Need
    """Memory under the measured load."""
    most: Need
    """Maximum memory under any load or while the last replica starts, whichever is more; of several devices, that of
    the device with the most replicas."""
    rate: float
    """Rows or tokens per second."""
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Predictor:
    """The fitted models.

    Args:
        memory: the memory under the measured load.
        largest: the memory with a language model's key/value cache full.
        speed: the rate under a load that keeps all calls full.
        connections: the number of connections of that load.
        p50_factor: p50 relative to connections / rate; 1 if a request is a row and calls are the server's only work.
        p99_factor: p99 relative to p50.
    """

    memory: MemoryModel
    largest: MemoryModel
    speed: ThroughputModel
    connections: Callable[[Point], int]
    p50_factor: float
    p99_factor: float

    def at(self, point: Point) -> Prediction:
        """The prediction for a size."""
        rate = self.speed.rows_per_s(point)
        # Little's law, with as many requests in flight as connections.
        p50_ms = 1000 * self.p50_factor * self.connections(point) / rate
        return Prediction(self.memory.at(point), self.largest.most(point), rate, p50_ms, p50_ms * self.p99_factor)


def fit(measured: Sequence[Measured], subject: Subject) -> Predictor:
    """Fit both models to at least one measured size."""
    memory = fit_memory(measured, subject.filled_cache)
    return Predictor(
        memory=memory,
        largest=replace(memory, cache=subject.largest_cache, devices=len(set(subject.deployment.placements))),
        speed=fit_throughput(
            [measurement.point for measurement in measured], [measurement.rate for measurement in measured]
        ),
        connections=subject.connections,
        p50_factor=statistics.median(
            measurement.p50_ms / 1000 * measurement.rate / measurement.connections for measurement in measured
        ),
        p99_factor=statistics.median(measurement.p99_ms / measurement.p50_ms for measurement in measured),
    )
