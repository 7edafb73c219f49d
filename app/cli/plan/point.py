"""One size at which a deployment can run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.config.schema import Deployment
from inference.reference import is_language_model

__all__ = ["Point", "grid", "section_of", "takes_instances", "threads_of"]


class Point(NamedTuple):
    """A size."""

    rows: int
    """That one call computes at most: ``batching.max_batch_size``; of a language model ``options.max_sequences``."""
    instances: int = 1
    replicas: int = 1

    @property
    def calls(self) -> int:
        """That may be computed at once."""
        return self.instances * self.replicas

    def __str__(self) -> str:
        """As a reader is told."""
        return f"{self.rows} × {self.instances} × {self.replicas}"


def grid(rows: Sequence[int], instances: Sequence[int], replicas: Sequence[int]) -> list[Point]:
    """Every combination, the small ones first."""
    points = [
        Point(*one) for one in itertools.product(sorted(set(rows)), sorted(set(instances)), sorted(set(replicas)))
    ]
    return sorted(points, key=lambda point: (point.calls, point.replicas, point.rows))


def takes_instances(deployment: Deployment) -> bool:
    """Whether a replica of it may compute several calls at once, as far as its section tells."""
    return deployment.pipeline is None and not is_language_model(deployment.model or "")


def threads_of(deployment: Deployment, point: Point, cores: int) -> int:
    """Threads of torch in each call: what the section says, or the cores shared among all calls."""
    return deployment.threads or max(1, cores // point.calls)


def section_of(deployment: Deployment, point: Point, cores: int) -> dict[str, Any]:
    """The deployment's section at this size, as YAML would hold it."""
    section: dict[str, Any] = deployment.model_dump(mode="json", exclude_unset=True, warnings=False)
    batching = section.setdefault("batching", {})
    if is_language_model(deployment.model or ""):
        section.setdefault("options", {})["max_sequences"] = point.rows
    else:
        batching["max_batch_size"] = point.rows
        # So many calls wait at a replica as compute there, and one more: what a section says for another size.
        if deployment.batching.max_in_flight < point.instances:
            batching.pop("max_in_flight", None)
    if not batching:
        del section["batching"]
    section["instances"] = point.instances
    section["replicas"] = point.replicas
    section["threads"] = threads_of(deployment, point, cores)
    if not takes_instances(deployment):
        del section["instances"]
    return section
