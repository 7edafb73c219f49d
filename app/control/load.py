"""What gateway workers tell the supervisor of the load on deployments that scale by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

__all__ = ["DeploymentLoad", "LoadReport", "Moment", "together"]


class Moment(NamedTuple):
    """What one deployment has to do in one worker at one moment."""

    computing: int = 0
    """Calls that its replicas are thought to compute, the others being on their way; of a language model sequences."""
    requests: int = 0
    """How many calls there would be at once if there were replicas without end; of a language model sequences."""
    waiting: int = 0
    """Rows; of a language model sequences."""
    wait_s: float = 0.0
    """For how long the first of them has waited."""


class DeploymentLoad(msgspec.Struct, frozen=True, array_like=True):
    """What one deployment had to do in one worker since its last report."""

    name: str
    waiting: int
    """Of the last `Moment`."""
    wait_s: float
    """The longest of all moments."""
    computing: float
    """On average."""
    requests: int
    """The most."""


class LoadReport(msgspec.Struct, frozen=True, tag="load"):
    """Of one worker."""

    deployments: list[DeploymentLoad] = []


def together(reports: Iterable[LoadReport]) -> dict[str, DeploymentLoad]:
    """What all workers have to do, by deployment."""
    found: dict[str, DeploymentLoad] = {}
    for report in reports:
        for one in report.deployments:
            other = found.get(one.name)
            found[one.name] = one if other is None else DeploymentLoad(
                one.name,
                one.waiting + other.waiting,
                max(one.wait_s, other.wait_s),
                one.computing + other.computing,
                one.requests + other.requests,  # perhaps not at the same moment: then too many
            )  # fmt: skip
    return found
