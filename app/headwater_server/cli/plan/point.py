"""A size at which a deployment can run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater_server.config.schema import Deployment

__all__ = ["Point", "grid", "section_of", "takes_instances", "threads_of"]


class Point(NamedTuple):
    """A size: rows, instances and replicas."""

    rows: int
    """``batching.max_batch_size``; for a language model, ``options.max_sequences``."""
    instances: int = 1
    replicas: int = 1

    @property
    def calls(self) -> int:
        """The number of calls that can be computed at once."""
        return self.instances * self.replicas

    def __str__(self) -> str:
        return f"{self.rows} × {self.instances} × {self.replicas}"


def grid(rows: Sequence[int], instances: Sequence[int], replicas: Sequence[int]) -> list[Point]:
    """Every combination of rows, instances and replicas once, sorted from small to large."""
    points = {Point(*combination) for combination in itertools.product(rows, instances, replicas)}
    return sorted(points, key=lambda point: (point.calls, point.replicas, point.rows))


def takes_instances(deployment: Deployment) -> bool:
    """Whether a replica of the deployment may compute several calls at once."""
    return "instances" not in deployment.kind.refused


def threads_of(deployment: Deployment, point: Point, cores: int) -> int:
    """Number of torch threads in each call: ``threads`` of the deployment's section, or the cores divided by the number
    of concurrent calls, at least 1."""
    return deployment.threads or max(1, cores // point.calls)


def section_of(deployment: Deployment, point: Point, cores: int) -> dict[str, Any]:
    """The deployment's section of a configuration at this size, in values that YAML can represent."""
    section: dict[str, Any] = deployment.model_dump(mode="json", exclude_unset=True, warnings=False)
    if deployment.kind.takes_text:
        section.setdefault("options", {})["max_sequences"] = point.rows
    else:
        batching = section.setdefault("batching", {})
        batching["max_batch_size"] = point.rows
        # The default suffices for any number of instances; the section's value may be meant for fewer instances.
        if deployment.batching.max_in_flight < point.instances:
            batching.pop("max_in_flight", None)
    section.update(instances=point.instances, replicas=point.replicas, threads=threads_of(deployment, point, cores))
    if not takes_instances(deployment):
        del section["instances"]
    return section
