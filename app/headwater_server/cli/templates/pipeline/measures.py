"""A pipeline's steps: a trunk that is computed once for each request, and heads, of which a request chooses."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater import Model, Tensor


class Trunk(Model):
    """Brings numbers into order, which all heads need."""

    inputs = (Tensor("values", "FP32", [-1]),)
    outputs = (Tensor("ordered", "FP32", [-1]),)

    def __call__(self, values: Any) -> dict[str, Any]:
        """``values`` has the shape [rows, numbers]."""
        return {"ordered": np.sort(values, axis=1)}


class Middle(Model):
    """The median."""

    inputs = (Tensor("ordered", "FP32", [-1]),)
    outputs = (Tensor("median", "FP32", [1]),)

    def __call__(self, ordered: Any) -> dict[str, Any]:
        """``ordered`` has the shape [rows, numbers]."""
        return {"median": np.median(ordered, axis=1, keepdims=True)}


class Spread(Model):
    """The distance between the least and the greatest number."""

    inputs = (Tensor("ordered", "FP32", [-1]),)
    outputs = (Tensor("spread", "FP32", [1]),)

    def __call__(self, ordered: Any) -> dict[str, Any]:
        """``ordered`` has the shape [rows, numbers]."""
        return {"spread": ordered[:, -1:] - ordered[:, :1]}
