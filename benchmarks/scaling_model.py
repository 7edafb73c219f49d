"""The model of `benchmarks.scaling`: takes a fixed time for a call, without the processor's help."""

from __future__ import annotations

import time
from typing import Any

from headwater import Model, Tensor

__all__ = ["Sleeper"]


class Sleeper(Model):
    """Answers x, after so many seconds, whatever the batch's size."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, *, x: Any) -> Any:
        """The same again, later."""
        time.sleep(self._seconds)
        return {"y": x}
