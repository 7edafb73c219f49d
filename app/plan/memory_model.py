"""Memory as a function of the size: what is counted once, what each replica has, and what a row adds.

::

    host   = server + files + replicas × own
    own    = fixed + (instances - 1) × instance + rows × instances × row + cache
    device =                  replicas × (the same of the device)

``fixed`` has the weights: the instances of a replica share one copy. ``cache`` is a language model's key/value cache,
which is computed and not fitted. While the last replica starts, it may have more than later under load: ``starting``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.plan.least_squares import fit_non_negative
from app.plan.point import Point

__all__ = ["MeasuredMemory", "MemoryModel", "Need", "ReplicaTerms", "fit_memory", "no_cache"]

CacheSize = Callable[[int], int]
"""Bytes of a replica's key/value cache, by how many sequences it computes at once."""


class MeasuredMemory(NamedTuple):
    """Bytes at one size, the most under load."""

    server: int
    files: int
    replica: float
    """On average, one."""
    starting: float
    """Likewise, the most until it was ready."""
    device: float = 0.0
    """Likewise, of the device's memory."""
    cache: int = 0
    """Of what a replica has, the key/value cache, as far as it was filled."""


class Need(NamedTuple):
    """Bytes."""

    host: int
    device: int


@dataclass(frozen=True)
class ReplicaTerms:
    """What one replica has of one kind of memory, in bytes."""

    fixed: float = 0.0
    instance: float = 0.0
    row: float = 0.0

    def at(self, point: Point) -> float:
        """At a size."""
        return self.fixed + (point.instances - 1) * self.instance + point.rows * point.instances * self.row


def no_cache(rows: int) -> int:
    """Of what is no language model."""
    return 0


@dataclass(frozen=True)
class MemoryModel:
    """Fitted, or of sizes that are known otherwise."""

    server: float
    """The supervisor and the gateway workers."""
    files: float
    """Pages of libraries and other files, which all processes share."""
    host: ReplicaTerms
    device: ReplicaTerms = ReplicaTerms()
    starting: ReplicaTerms = ReplicaTerms()
    """What a replica has of the machine's memory until it is ready, at most."""
    cache: CacheSize = no_cache
    caches_on_device: bool = False

    def replica(self, point: Point) -> float:
        """What one replica has of the machine's memory under load."""
        return self.host.at(point) + (0 if self.caches_on_device else self.cache(point.rows))

    def at(self, point: Point) -> Need:
        """What all processes have together under load."""
        host = self.server + self.files + point.replicas * self.replica(point)
        device = self.device.at(point) + (self.cache(point.rows) if self.caches_on_device else 0)
        return Need(round(host), round(point.replicas * device))

    def most(self, point: Point) -> Need:
        """The same, or while the last replica starts and the others have load, if that is more."""
        need = self.at(point)
        return Need(round(need.host + max(0.0, self.starting.at(point) - self.replica(point))), need.device)

    def with_cache(self, cache: CacheSize) -> MemoryModel:
        """The same with caches of another size."""
        return replace(self, cache=cache)


def fit_memory(
    points: Sequence[Point], measured: Sequence[MeasuredMemory], cache: CacheSize = no_cache, *, on_device: bool = False
) -> MemoryModel:
    """Fit the model to what was measured.

    Args:
        points: at least one.
        measured: at these.
        cache: of a language model.
        on_device: whether the model computes on a GPU.
    """
    features = [(1.0, point.instances - 1.0, float(point.rows * point.instances)) for point in points]
    host = [one.replica - (0 if on_device else one.cache) for one in measured]
    device = [one.device - (one.cache if on_device else 0) for one in measured]
    return MemoryModel(
        server=sum(one.server for one in measured) / len(measured),
        files=sum(one.files for one in measured) / len(measured),
        host=ReplicaTerms(*fit_non_negative(features, [max(value, 1.0) for value in host])),
        device=ReplicaTerms(*fit_non_negative(features, [max(value, 1.0) for value in device]))
        if on_device
        else ReplicaTerms(),
        starting=ReplicaTerms(*fit_non_negative(features, [max(one.starting, 1.0) for one in measured])),
        cache=cache,
        caches_on_device=on_device,
    )
