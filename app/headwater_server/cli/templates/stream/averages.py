"""A model that streams: each result leaves as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater import Model, Tensor


class Averages(Model):
    """The mean of the first number, of the first two, and so on."""

    inputs = (Tensor("values", "FP32", [-1]),)
    outputs = (Tensor("mean", "FP32", [1]),)

    def __call__(self, values: Any) -> Iterator[dict[str, Any]]:
        """``values`` has the shape [rows, numbers]; each result has a row for each of its rows."""
        for count in range(1, values.shape[1] + 1):
            yield {"mean": values[:, :count].mean(axis=1, keepdims=True)}
