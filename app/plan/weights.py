"""How large a deployment's weights are: they are loaded once, in a process of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from app.config import Deployment
from app.errors import StartError
from app.model_side import ModelSide, last_line

__all__ = ["Weights", "weigh_deployment"]


class Weights(NamedTuple):
    """Of one replica."""

    bytes: int | None
    """None: unknown."""
    how: str
    """How they were weighed, or why not."""


def weigh_deployment(name: str, deployment: Deployment, path: Sequence[str]) -> Weights:
    """Load a deployment's model, and say how much of the replica's memory is weights.

    Args:
        name: the deployment's.
        deployment: a model, a language model or a fused pipeline.
        path: folders that come first on ``sys.path``; the first is the working folder.
    """
    request = {
        "name": name,
        "model": deployment.model or "",
        "options": deployment.options,
        "pipeline": deployment.pipeline.spec() if deployment.pipeline is not None else None,
        "device": deployment.placements[0],
        "path": path,
        "working_dir": path[0],
    }
    try:
        with ModelSide(deployment.environment, deployment.python) as side:
            status, output, errors = side.run("inference.weigh", msgspec.json.encode(request))
    except StartError as error:
        return Weights(None, str(error))
    try:
        told = msgspec.json.decode(output)
        return Weights(int(told["bytes"]), str(told["how"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        how = "it took too long" if status is None else last_line(errors)
        return Weights(None, f"loading it in a process of its own failed: {how}")
