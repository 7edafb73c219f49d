"""Models that import numpy only, so that a replica starts fast: a trunk, its heads, and one that streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from headwater import Model, Tensor

WIDTH = 4


class Trunk(Model):
    """features = x * 2."""

    inputs = (Tensor("x", "FP32", [WIDTH]),)
    outputs = (Tensor("features", "FP32", [WIDTH]),)

    def __call__(self, x: Any) -> dict[str, Any]:
        return {"features": x * 2}


class Head(Model):
    """``{output}`` = features + 1."""

    inputs = (Tensor("features", "FP32", [WIDTH]),)

    def __init__(self, output: str) -> None:
        self.output = output
        self.outputs = (Tensor(output, "FP32", [WIDTH]),)  # type: ignore[misc]

    def __call__(self, features: Any) -> dict[str, Any]:
        return {self.output: features + 1}


class Pieces(Model):
    """Yields x again and again."""

    inputs = (Tensor("x", "FP32", [WIDTH]),)
    outputs = (Tensor("piece", "FP32", [WIDTH]),)

    def __init__(self, count: int, interval_s: float) -> None:
        self.count = count
        self.interval_s = interval_s

    async def __call__(self, x: Any) -> AsyncIterator[dict[str, Any]]:
        for _ in range(self.count):
            yield {"piece": x}
            await asyncio.sleep(self.interval_s)
