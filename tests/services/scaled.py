"""Models for tests of scaling: one that takes memory, one that takes time, one that shows who computes at once."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import numpy.typing as npt

from headwater import Model, Tensor

Floats = npt.NDArray[np.float32]


class Large(Model):
    """Has so much memory, every page of it written."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes

    def load(self, device: str) -> None:
        """Take it."""
        self._taken = np.ones(self._size_bytes, dtype=np.uint8)

    def __call__(self, x: Floats) -> dict[str, Floats]:
        """The same again."""
        return {"y": x}


class LargeLater(Large):
    """`Large`, loaded by a coroutine."""

    async def load(self, device: str) -> None:  # type: ignore[override]  # `Large` promises a plain function
        """Take it."""
        await asyncio.sleep(0)
        super().load(device)


class Slow(Model):
    """Takes so long for a call, whatever its size."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, x: Floats) -> dict[str, Floats]:
        """The same again, later."""
        time.sleep(self._seconds)
        return {"y": x}


class Meeting(Model):
    """Answers only when so many calls compute at once; says which thread computed, and how often it was loaded."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("thread", "INT64", [1]), Tensor("loads", "INT64", [1]))

    def __init__(self, parties: int, timeout_s: float = 10.0) -> None:
        self._barrier = threading.Barrier(parties)
        self._timeout_s = timeout_s
        self._loads = 0

    def load(self, device: str) -> None:
        """Count it."""
        self._loads += 1

    def __call__(self, x: Floats) -> dict[str, npt.NDArray[np.int64]]:
        """Wait for the others.

        Raises:
            BrokenBarrierError: they don't come.
        """
        self._barrier.wait(self._timeout_s)
        rows = (len(x), 1)
        return {
            "thread": np.full(rows, threading.get_ident(), dtype=np.int64),
            "loads": np.full(rows, self._loads, dtype=np.int64),
        }


class Waiting(Model):
    """Computes any number of calls at once by itself."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    async def __call__(self, x: Floats) -> dict[str, Floats]:
        """The same again."""
        return {"y": x}
