"""Callables with states between the requests of a sequence."""

from __future__ import annotations

from typing import Any

from headwater import BadInput, Model, State, Tensor


class Sums(Model):
    """Adds up the numbers of a sequence, and counts its requests; refuses negative numbers."""

    inputs = (Tensor("x", "INT64", [1]),)
    outputs = (Tensor("y", "INT64", [1]), Tensor("rows", "INT64", [1]))
    state = (State("total", "INT64", [1]), State("count", "FP32", [1], output="new_count"))

    def __call__(self, x: Any, total: Any, count: Any) -> Any:
        if (x < 0).any():
            raise BadInput("expected a number from 0 on")
        total = total + x
        return {"y": total, "rows": x * 0 + len(x), "total": total, "new_count": count + 1}
