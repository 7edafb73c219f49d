"""The argument ``config`` of ``bind()``."""

from __future__ import annotations

from dataclasses import dataclass, field

from .common import DynamicBatcher, ModelWarmup

__all__ = ["ModelConfig"]


@dataclass
class ModelConfig:
    """How a model is called."""

    batching: bool = True
    max_batch_size: int = 4
    batcher: DynamicBatcher = field(default_factory=DynamicBatcher)
    response_cache: bool = False
    decoupled: bool = False
    """Whether the model answers a request with any number of responses."""
    model_warmup: list[ModelWarmup] | None = None
