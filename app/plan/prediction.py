"""Both models together: what a size takes and gives, whether it ran or not."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.plan.measuring import Measured
from app.plan.memory_model import MemoryModel, Need, fit_memory
from app.plan.point import Point
from app.plan.throughput_model import ThroughputModel, fit_throughput

__all__ = ["Prediction", "Predictor", "fit"]


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
