"""Memory as a function of the size, fitted by least squares with non-negative coefficients.

::

    host   = server + files + replicas × own
    own    = fixed + (instances - 1) × instance + rows × instances × row + cache
    device =                  replicas × (the same terms for the device)

``fixed`` includes the weights, of which the instances of a replica share one copy. A replica may take more while it
starts (``starting``) than later under load. ``cache`` is a language model's key/value cache: see `CacheShape.size`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.environment import install_command
from headwater_server.cli.plan.measuring import Measured
from headwater_server.cli.plan.point import Point
from headwater_server.errors import CommandError

__all__ = ["CacheSize", "MemoryModel", "Need", "ReplicaTerms", "check_fitting", "fit_memory", "fit_non_negative"]

CacheSize = Callable[[int], int]
"""Bytes of a replica's key/value cache, by the number of concurrent sequences."""


def check_fitting() -> None:
    """Check that measurements can be fitted, before a long measurement.

    Raises:
        CommandError: scipy can't be imported: it is missing, or is built for another version of numpy.
    """
    try:
        importlib.import_module("scipy.optimize")
    except ImportError as error:
        reason = f"headwater plan: can't import scipy, which fits predictions to measurements ({error})"
        install = install_command("plan", "scipy", "'numpy~=1.26'")
        raise CommandError(f"{reason}; {install}") from None


def fit_non_negative(features: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Non-negative coefficients, one for each column, with the least sum of squared relative errors. A column that
    depends linearly on earlier columns gets 0.

    Args:
        features: a row for each value, with few columns, the most important one first.
        values: positive numbers.
    """
    from scipy.optimize import nnls  # imported late, because plans from known sizes don't need it

    raw: npt.NDArray[Any] = np.asarray(features, float)
    chosen: list[int] = []
    for column in range(raw.shape[1]):
        if np.linalg.matrix_rank(raw[:, [*chosen, column]]) > len(chosen):
            chosen.append(column)
    matrix = raw[:, chosen] / np.asarray(values, float)[:, None]
    scales = np.linalg.norm(matrix, axis=0)
    solution, _ = nnls(matrix / scales, np.ones(len(values)))
    coefficients = np.zeros(raw.shape[1])
    coefficients[chosen] = solution / scales
    return [float(coefficient) for coefficient in coefficients]


class Need(NamedTuple):
    """Bytes of the machine's and of the device's memory that all processes need together."""

    host: int
    device: int


@dataclass(frozen=True)
class ReplicaTerms:
    """Bytes that a replica takes, of the machine's or of the device's memory, without a key/value cache; for the fields
    see this module's docstring."""

    fixed: float = 0.0
    instance: float = 0.0
    row: float = 0.0

    def at(self, point: Point) -> float:
        """Bytes that a replica takes at a size."""
        return self.fixed + (point.instances - 1) * self.instance + point.rows * point.instances * self.row


@dataclass(frozen=True)
class MemoryModel:
    """The formula in this module's docstring, with its terms in bytes."""

    server: float
    """The supervisor, the gateway workers, and the processes that fork replicas."""
    files: float
    """Pages of libraries and other files, which all processes share."""
    host: ReplicaTerms
    device: ReplicaTerms = ReplicaTerms()
    starting: ReplicaTerms = ReplicaTerms()
    """Peak of the machine's memory that a replica takes until it is ready."""
    cache: CacheSize = lambda rows: 0
    caches_on_device: bool = False
    """Whether the cache takes the device's memory rather than the machine's."""
    devices: int = 1
    """Number of devices, to which the replicas go in turn."""

    def at(self, point: Point) -> Need:
        """Memory that all processes take together under load."""
        device = self.device.at(point) + (self.cache(point.rows) if self.caches_on_device else 0)
        return Need(round(self.server + self.files + point.replicas * self._own(point)), round(point.replicas * device))

    def most(self, point: Point) -> Need:
        """The memory under load, or the memory while the last replica starts and the other replicas are under load,
        whichever is more; of several devices, that of the device with the most replicas."""
        need = self.at(point)
        device = need.device * -(-point.replicas // self.devices) / point.replicas
        return Need(round(need.host + max(0.0, self.starting.at(point) - self._own(point))), round(device))

    def _own(self, point: Point) -> float:
        return self.host.at(point) + (0 if self.caches_on_device else self.cache(point.rows))


def fit_memory(measured: Sequence[Measured], cache: CacheSize = lambda rows: 0) -> MemoryModel:
    """Fit the model to at least one measurement. ``cache`` gives the key/value cache of a language model under the
    measured load."""
    on_device = measured[0].is_on_gpu
    features = [(1.0, size.instances - 1.0, float(size.rows * size.instances)) for size in (m.point for m in measured)]

    def terms(values: Sequence[float]) -> ReplicaTerms:
        return ReplicaTerms(*fit_non_negative(features, [max(value, 1.0) for value in values]))

    return MemoryModel(
        server=sum(measurement.server_bytes for measurement in measured) / len(measured),
        files=sum(measurement.shared_files_bytes for measurement in measured) / len(measured),
        host=terms(
            [measurement.replica_bytes - (0 if on_device else measurement.cache_bytes) for measurement in measured]
        ),
        device=terms(
            [
                measurement.device_bytes / measurement.point.replicas - measurement.cache_bytes
                for measurement in measured
            ]
        )
        if on_device
        else ReplicaTerms(),
        starting=terms([measurement.replica_starting_bytes for measurement in measured]),
        cache=cache,
        caches_on_device=on_device,
    )
