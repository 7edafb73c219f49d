"""A model that takes almost no time, so that a benchmark measures everything around the model. It doesn't need
torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from headwater import Model, Tensor

__all__ = ["Scale"]


class Scale(Model):
    """Doubles every number.

    Inputs:
        x: FP32 [-1].

    Outputs:
        y: FP32 [-1], 2 times ``x``, of the same length.
    """

    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("y", "FP32", [-1]),)
    example: ClassVar[Mapping[str, Any]] = {"x": [1.0, 2.0, 3.0]}

    def __call__(self, x: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        return {"y": x * np.float32(2)}
