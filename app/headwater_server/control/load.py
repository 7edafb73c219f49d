"""The load that gateway workers report to the supervisor, which scales deployments by it and publishes it as
metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

__all__ = ["DeploymentLoad", "LoadReport", "Moment", "Tally", "together"]


class Moment(NamedTuple):
    """A deployment's load in a worker at a moment. For a language model, calls and rows are sequences (calls of
    vLLM: requests), and `computing` includes waiting calls."""

    computing: int = 0
    """Calls that its replicas presumably compute now, without calls that are on their way."""
    requests: int = 0
    """Calls that could run at once with unlimited replicas: requests in flight, or running calls and the calls that the
    waiting rows would fill, whichever is more."""
    waiting: int = 0
    """Rows that wait."""
    wait_s: float = 0.0
    """Seconds that the first of these rows has waited; 0: no row waits."""


class DeploymentLoad(msgspec.Struct, frozen=True, array_like=True):
    """A deployment's load in a worker since the worker's last report, from `Moment`s; or a sum (`together`)."""

    name: str
    waiting: int
    """Last value of `Moment.waiting`."""
    wait_s: float
    """Maximum of `Moment.wait_s`."""
    computing: float
    """Average of `Moment.computing`."""
    requests: int
    """Maximum of `Moment.requests`."""


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """Counts of a version's requests, without requests that failed by their clients' fault."""

    name: str
    """``DEPLOYMENT.VERSION``."""
    ended: int
    """Requests that were answered or failed."""
    failed: int
    """Requests that failed."""
    times: list[int]
    """Numbers of answered requests, by bucket of `headwater_server.telemetry.catalogue.VERSION_TIMES`."""

    @property
    def answered(self) -> int:
        """The number of answered requests."""
        return sum(self.times)

    def since(self, before: Tally) -> Tally:
        """The differences from an earlier tally of the same version."""
        times = [after - earlier for after, earlier in zip(self.times, before.times, strict=True)]
        return Tally(self.name, self.ended - before.ended, self.failed - before.failed, times)

    def __add__(self, other: Tally) -> Tally:
        """The sum of both."""
        times = [count + other_count for count, other_count in zip(self.times, other.times, strict=True)]
        return Tally(self.name, self.ended + other.ended, self.failed + other.failed, times)


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """The load of a worker, or of all workers of a cluster's gateway."""

    deployments: list[DeploymentLoad] = []
    """Loads of the deployments that scale by load; if metrics are kept, of all deployments with replicas."""
    tallies: list[Tally] = []
    """Counts of compared versions since the worker's start; a gateway sends `ControlServer.tallies`."""


def together(reports: Iterable[LoadReport]) -> dict[str, DeploymentLoad]:
    """The load of all workers together, by deployment; without deployments that no report has."""
    loads: dict[str, DeploymentLoad] = {}
    for report in reports:
        for load in report.deployments:
            total = loads.get(load.name)
            loads[load.name] = load if total is None else DeploymentLoad(
                load.name,
                load.waiting + total.waiting,
                max(load.wait_s, total.wait_s),
                load.computing + total.computing,
                load.requests + total.requests,  # an upper bound: the maxima may be from different moments
            )  # fmt: skip
    return loads
