"""Models for the chaos run that import numpy only: one that fails as a row says, one that streams, one that embeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from headwater import Embedding, Model, Tensor

RAISE, NOT_A_NUMBER, WRONG_DTYPE = -1.0, -2.0, -3.0
"""What the first element of a row asks for, each in this row only; the second, if over 0, is for how long to sleep."""


class Doubler(Model):
    """y = 2x."""

    inputs = (Tensor("x", "FP32", [4]),)
    outputs = (Tensor("y", "FP32", [4]),)

    def __call__(self, x: Any) -> dict[str, Any]:
        first = x[:, 0]
        if (first == RAISE).any():
            raise ValueError("poison")
        if (first == WRONG_DTYPE).any():
            return {"y": x.astype(np.float64)}
        if x[:, 1].max() > 0:
            time.sleep(float(x[:, 1].max()))
        y = x * 2
        y[first == NOT_A_NUMBER] = np.nan
        return {"y": y}


class Pieces(Model):
    """Yields x, x + 1, x + 2 and so on."""

    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("piece", "FP32", [-1]),)

    def __init__(self, count: int, interval_s: float) -> None:
        self.count = count
        self.interval_s = interval_s

    async def __call__(self, x: Any) -> AsyncIterator[dict[str, Any]]:
        for index in range(self.count):
            yield {"piece": x + np.float32(index)}
            await asyncio.sleep(self.interval_s)


class Bytes(Model):
    """Embeds a text as its number of bytes and their sum."""

    inputs = (Tensor("text", "BYTES", [1]),)
    outputs = (Tensor("vector", "FP32", [2]),)
    embedding = Embedding(input="text", output="vector")

    def __call__(self, text: Any) -> dict[str, Any]:
        rows = [bytes(one) for one in text[:, 0]]
        return {"vector": np.array([[len(one), sum(one)] for one in rows], np.float32)}
