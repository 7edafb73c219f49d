"""One size at which a deployment can run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from headwater.reference import is_language_model
from headwater_server.config.schema import Deployment

__all__ = ["Point", "grid", "section_of", "takes_instances", "threads_of"]


class Point(NamedTuple):
    """A size."""

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
    """Every combination once, the small ones first."""
    points = {Point(*one) for one in itertools.product(rows, instances, replicas)}
    return sorted(points, key=lambda point: (point.calls, point.replicas, point.rows))


def takes_instances(deployment: Deployment) -> bool:
    """Whether a replica of the deployment may compute several calls at once."""
    return deployment.pipeline is None and not is_language_model(deployment.model or "")


def threads_of(deployment: Deployment, point: Point, cores: int) -> int:
    """Threads of torch in each call: as the section says, or the cores divided by the calls at once."""
    return deployment.threads or max(1, cores // point.calls)


def section_of(deployment: Deployment, point: Point, cores: int) -> dict[str, Any]:
    """The deployment's section at this size, as YAML would hold it."""
    section: dict[str, Any] = deployment.model_dump(mode="json", exclude_unset=True, warnings=False)
    if is_language_model(deployment.model or ""):
        section.setdefault("options", {})["max_sequences"] = point.rows
    else:
        batching = section.setdefault("batching", {})
        batching["max_batch_size"] = point.rows
        # The default suffices for any number of instances; what the section says may be meant for fewer.
        if deployment.batching.max_in_flight < point.instances:
            batching.pop("max_in_flight", None)
    section.update(instances=point.instances, replicas=point.replicas, threads=threads_of(deployment, point, cores))
    if not takes_instances(deployment):
        del section["instances"]
    return section
