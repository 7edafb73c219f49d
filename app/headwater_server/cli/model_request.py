"""What a process of the models' Python is asked about a deployment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater_server.config.schema import Deployment

__all__ = ["model_request"]


def model_request(name: str, deployment: Deployment, path: Sequence[str]) -> dict[str, Any]:
    """The fields of a `headwater.replica.probe.ProbeRequest`; the first folder of ``path`` is the working folder."""
    return {
        "name": name,
        "model": deployment.model or "",
        "options": deployment.options,
        "pipeline": deployment.pipeline_spec,
        "max_batch_size": deployment.batching.max_batch_size,
        "instances": deployment.instances,
        "device": deployment.placements[0],
        "path": path,
        "working_dir": path[0],
    }
