"""The parts of a model's configuration."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["DeviceKind", "DynamicBatcher", "ModelWarmup", "QueuePolicy", "TimeoutAction", "WarmupInput"]


class DeviceKind(enum.Enum):
    """The kind of device that a model runs on."""

    KIND_AUTO = "KIND_AUTO"
    KIND_CPU = "KIND_CPU"
    KIND_GPU = "KIND_GPU"


class TimeoutAction(enum.Enum):
    """The handling of a request that has waited too long."""

    REJECT = "REJECT"
    DELAY = "DELAY"


@dataclass
class QueuePolicy:
    """How long requests wait, and how many may wait."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0
    """Maximum number of waiting requests; 0: no limit."""


@dataclass
class DynamicBatcher:
    """How requests are batched."""

    max_queue_delay_microseconds: int = 0
    preferred_batch_size: list[int] | None = None
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy | None = None
    priority_queue_policy: dict[int, QueuePolicy] | None = None


@dataclass
class WarmupInput:
    """An input of a warm-up call: zeros, random numbers, or a file of ``np.save``."""

    dtype: Any
    shape: Sequence[int]
    """Shape of a row."""
    zero_data: bool | None = False
    random_data: bool | None = False
    input_data_file: str | None = None


@dataclass
class ModelWarmup:
    """Warm-up calls: `count` of them, with `batch_size` rows each."""

    name: str
    batch_size: int
    inputs: dict[str, WarmupInput]
    count: int
