"""Models of coroutines, for tests of calls that overlap."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from headwater import BadInput, Model, Tensor

Floats = npt.NDArray[np.float32]

BAD = -1.0
ALONE = -2.0
HANGS = -3.0


class Meets(Model):
    """Doubles x once so many calls have begun, except for what is negative.

    Args:
        parties: so many calls must be under way at once.
        unloaded: a file that is written when it is unloaded.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self, parties: int, unloaded: str = "") -> None:
        self._parties = parties
        self._unloaded = unloaded
        self._here = 0

    async def load(self, device: str) -> None:
        """Make what belongs to the event loop."""
        await asyncio.sleep(0)
        self._loop = asyncio.get_running_loop()
        self._meeting = asyncio.Condition()

    async def __call__(self, x: Floats) -> dict[str, Floats]:
        """Wait for the others."""
        assert asyncio.get_running_loop() is self._loop
        if (x == BAD).any():
            raise BadInput("-1 on purpose")
        if (x == HANGS).any():
            await asyncio.Event().wait()
        if (x >= 0).any():
            async with self._meeting:
                self._here += 1
                turn = -(-self._here // self._parties) * self._parties
                self._meeting.notify_all()
                await self._meeting.wait_for(lambda: self._here >= turn)
        return {"y": x * 2}

    async def unload(self) -> None:
        """Say so."""
        await asyncio.sleep(0)
        assert asyncio.get_running_loop() is self._loop
        if self._unloaded:
            open(self._unloaded, "w").close()  # noqa: ASYNC230 - once, at the end


class Trunk(Model):
    """Adds one, in memory that it uses in every call."""

    inputs = (Tensor("x0", "FP32", [1]),)
    outputs = (Tensor("x", "FP32", [1]),)

    def __init__(self) -> None:
        self._memory = np.zeros((1, 1), np.float32)

    def __call__(self, x0: Floats) -> dict[str, Floats]:
        """One row."""
        np.add(x0, 1, out=self._memory)
        return {"x": self._memory}
