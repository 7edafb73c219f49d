"""The configuration of a bound model, as decorators see it in ``TritonContext.model_configs``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .common import DeviceKind, DynamicBatcher, ModelWarmup

__all__ = ["ResponseCache", "TensorSpec", "TritonModelConfig"]


@dataclass
class ResponseCache:
    """Whether answers are cached."""

    enable: bool


@dataclass
class TensorSpec:
    """An input or output, always with a name."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    optional: bool | None = False


@dataclass
class TritonModelConfig:
    """The configuration with which a model is bound."""

    model_name: str
    model_version: int = 1
    max_batch_size: int = 4
    batching: bool = True
    batcher: DynamicBatcher | None = None
    instance_group: dict[DeviceKind, int | None] = field(default_factory=dict)
    decoupled: bool = False
    backend_parameters: dict[str, str] = field(default_factory=dict)
    inputs: Sequence[TensorSpec] | None = None
    outputs: Sequence[TensorSpec] | None = None
    response_cache: ResponseCache | None = None
    model_warmup: list[ModelWarmup] | None = None
