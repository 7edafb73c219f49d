"""The load that gateway workers report to the supervisor, which scales deployments by it and exposes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

__all__ = ["DeploymentLoad", "LoadReport", "Moment", "Tally", "together"]


class Moment(NamedTuple):
    """One deployment's load in one worker at one moment. For a language model, calls and rows are sequences."""

    computing: int = 0
    """Calls that its replicas presumably compute; the others are on their way."""
    requests: int = 0
    """Calls that could run at once with unlimited replicas."""
    waiting: int = 0
    """Rows that wait."""
    wait_s: float = 0.0
    """Waiting time of the first of these rows."""


class DeploymentLoad(msgspec.Struct, frozen=True, array_like=True):
    """One deployment's load in one worker since its last report, summed up from `Moment`s."""

    name: str
    waiting: int
    """The last value."""
    wait_s: float
    """The maximum."""
    computing: float
    """The average."""
    requests: int
    """The maximum."""


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """What one version's requests have come to, without those that failed by their clients' fault."""

    name: str
    ended: int
    failed: int
    times: list[int]
    """Requests that were answered, by bucket of `headwater_server.telemetry.catalogue.VERSION_TIMES`."""

    @property
    def answered(self) -> int:
        """How many were answered."""
        return sum(self.times)

    def since(self, before: Tally) -> Tally:
        """What has come since an earlier tally."""
        times = [after - one for after, one in zip(self.times, before.times, strict=True)]
        return Tally(self.name, self.ended - before.ended, self.failed - before.failed, times)

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        times = [one + more for one, more in zip(self.times, other.times, strict=True)]
        return Tally(self.name, self.ended + other.ended, self.failed + other.failed, times)


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """The load of one worker's deployments."""

    deployments: list[DeploymentLoad] = []
    tallies: list[Tally] = []
    """Since the worker's start, of versions that are compared."""


def together(reports: Iterable[LoadReport]) -> dict[str, DeploymentLoad]:
    """The load of all workers together, by deployment."""
    found: dict[str, DeploymentLoad] = {}
    for report in reports:
        for one in report.deployments:
            other = found.get(one.name)
            found[one.name] = one if other is None else DeploymentLoad(
                one.name,
                one.waiting + other.waiting,
                max(one.wait_s, other.wait_s),
                one.computing + other.computing,
                one.requests + other.requests,  # an upper bound: the maxima may be from different moments
            )  # fmt: skip
    return found
