"""What the sections of the configuration are made of."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from inference.lm.reference import is_language_model, parse_reference

__all__ = [
    "Batching",
    "Device",
    "Environment",
    "ModelReference",
    "PositiveInt",
    "PositiveSeconds",
    "PythonPath",
    "Replicas",
    "Section",
    "Strategy",
    "TensorStore",
    "Threads",
    "WarmupBatchSizes",
    "check_model_reference",
]

_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


class Section(BaseModel):
    """A part of the configuration: unknown fields are refused, and nothing changes after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def check_model_reference(value: str) -> str:
    """Check that a text is ``module:Class``, ``onnx:PATH``, ``lm:PATH`` or ``lm:PACKAGE:PATH``.

    Raises:
        ValueError: it is none of these.
    """
    if is_language_model(value):
        parse_reference(value)
    elif value.startswith("onnx:"):
        if not value.removeprefix("onnx:").strip():
            raise ValueError("expected a path after onnx:, such as onnx:models/head.onnx")
    elif not _MODEL.match(value):
        raise ValueError(
            "expected module:Class such as my_package.models:Scale, onnx:PATH such as onnx:head.onnx, or lm:PATH such "
            "as lm:models/llama"
        )
    return value


def _check_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("expected auto, cpu, cuda or cuda:N")
    return value


def _stringify(value: object) -> object:
    if isinstance(value, dict):
        return {key: str(item) if isinstance(item, (int, float)) else item for key, item in value.items()}
    return value


def _expand(value: Any) -> Any:
    return Path(value).expanduser() if isinstance(value, str) else value


PositiveInt = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0, le=86_400)]
Replicas = Annotated[int, Field(ge=1, le=64)]
Threads = Annotated[int, Field(ge=1, le=1024)]
ModelReference = Annotated[str, AfterValidator(check_model_reference)]
Device = Annotated[str, AfterValidator(_check_device)]
Environment = Annotated[dict[str, str], BeforeValidator(_stringify)]
TensorStore = Literal["auto", "on", "off"]
Strategy = Literal["beside", "recreate"]
WarmupBatchSizes = tuple[PositiveInt, ...]
PythonPath = Annotated[Path, BeforeValidator(_expand)]


class Batching(Section):
    """How the gateway coalesces rows of concurrent requests."""

    max_batch_size: PositiveInt = 32
    """Rows in one call of the model, at most."""
    max_queue_delay_ms: Annotated[float, Field(ge=0, le=60_000)] = 0
    """How long rows may wait for company although the replica is idle."""
    max_queue_size: PositiveInt = 1024
    """Rows that may wait; more are refused with 429."""
    max_in_flight: PositiveInt = 2
    """Calls that a replica may have at once: one computes, the others are on their way."""
