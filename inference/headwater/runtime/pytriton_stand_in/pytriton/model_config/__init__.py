"""The configuration of a model that a script binds."""

from __future__ import annotations

from .common import DeviceKind, DynamicBatcher, QueuePolicy, TimeoutAction
from .model_config import ModelConfig
from .tensor import Tensor

__all__ = ["DeviceKind", "DynamicBatcher", "ModelConfig", "QueuePolicy", "Tensor", "TimeoutAction"]
