"""What idle streams ask: a model that says one thing and then waits, and an engine whose tokens hardly ever come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from headwater import Model, Tensor
from headwater.engine import Engine, EngineLimits, TokenEvent
from headwater.lm.null_engine import NullEngine

__all__ = ["MANY_TOKENS", "Waiter", "stalled_engine"]

MANY_TOKENS = 5000
FIRST_TOKENS = 64
STEP_S = 0.005


class Waiter(Model):
    """Answers once, and keeps the stream open until it is cancelled.

    Inputs:
        x: FP32 [1].

    Outputs:
        y: FP32 [1], x.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    async def __call__(self, x: np.ndarray[Any, np.dtype[np.float32]]) -> AsyncIterator[dict[str, Any]]:
        yield {"y": x}
        await asyncio.get_running_loop().create_future()


class _Stalled(NullEngine):
    """Gives a sequence that wants many tokens a few, of which one at least has a text, and then none."""

    def step(self) -> list[TokenEvent]:
        """As `Engine.step`."""
        time.sleep(STEP_S)
        held = {
            id: one
            for id, one in self._running.items()
            if one.max_tokens >= MANY_TOKENS and one.produced >= FIRST_TOKENS
        }
        for id in held:
            del self._running[id]
        events = super().step()
        self._running.update(held)
        return events


def stalled_engine(folder: Path, *, device: str, on_broken: Any) -> Engine:
    """An engine on whose streams hardly anything happens."""
    limits = EngineLimits(
        max_sequences=2048, max_waiting=2048, context_length=100_000, cache_tokens=100_000_000, vocab_size=100_000
    )
    return _Stalled(limits)
