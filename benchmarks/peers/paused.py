"""A model that waits in each call, as for a device, and then doubles its numbers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from headwater.zoo.scale import Scale

__all__ = ["Paused"]


class Paused(Scale):
    """`Scale` with a pause in each call.

    Args:
        pause_ms: how long each call waits, whatever its batch.
    """

    def __init__(self, pause_ms: float) -> None:
        self._pause_s = pause_ms / 1000

    def __call__(self, x: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        time.sleep(self._pause_s)
        return super().__call__(x)
