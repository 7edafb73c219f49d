"""Callables that fail as those on a GPU do: out of memory, or with a poisoned context."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from headwater import Model, Tensor
from headwater.engine import EngineLimits, SequenceRequest, TokenEvent
from headwater.lm.null_engine import NullEngine

NEVER_FITS, BREAKS = -1.0, -2.0


class Device(Model):
    """Doubles x, of at most `most` rows at once; a row may say that it never fits, or breaks the device."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self, most: int = 64) -> None:
        self.most = most

    def __call__(self, *, x: Any) -> Any:
        import torch

        if (x == BREAKS).any():
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        if len(x) > self.most or (x == NEVER_FITS).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {"y": x * 2}


class Trunk(Model):
    """features = x."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("features", "FP32", [1]),)

    def __call__(self, *, x: Any) -> Any:
        return {"features": x}


class Head(Model):
    """``{output}`` = twice the features, or, of one on a ``device``, what `Device` makes of them."""

    inputs = (Tensor("features", "FP32", [1]),)

    def __init__(self, output: str, device: bool = False) -> None:
        self.output = output
        self.compute = Device() if device else None
        self.outputs = (Tensor(output, "FP32", [1]),)  # type: ignore[misc]

    def __call__(self, *, features: Any) -> Any:
        found = features * 2 if self.compute is None else self.compute(x=features)["y"]
        return {self.output: found}


class Pair(Model):
    """Two modules, of which each takes what the other one gave, and the first is called twice."""

    inputs = (Tensor("x", "FP32", [16]),)
    outputs = (Tensor("y", "FP32", [16]),)
    arrays = "torch"

    def load(self, device: str) -> None:
        import torch

        torch.manual_seed(1)
        self.one, self.other = (torch.nn.Linear(16, 16, device=device) for _ in range(2))

    def __call__(self, *, x: Any) -> Any:
        first = self.one(x)
        return {"y": first + self.one(self.other(first))}


class Taker(Model):
    """Takes as many GiB of a real GPU as the rows say in all, or, at a negative row, poisons its context."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"x": [0.1]}

    def __call__(self, *, x: Any) -> Any:
        import torch

        if (x < 0).any():
            torch.zeros(1, device=x.device)[torch.full((1,), 9, device=x.device)].cpu()  # an assertion of the device
        taken = torch.empty(int(x.sum().item() * 2**30), dtype=torch.uint8, device=x.device)
        return {"y": x + 0 * taken[:1]}


def engine(folder: Path, *, device: str, on_broken: Callable[[str], None]) -> NullEngine:
    """An engine of which a prompt of one token breaks the device."""

    class Breaking(NullEngine):
        breaks = False

        def submit(self, request: SequenceRequest) -> None:
            self.breaks = self.breaks or len(request.prompt) == 1
            super().submit(request)

        def step(self) -> list[TokenEvent]:
            if self.breaks:
                raise RuntimeError("CUDA error: device-side assert triggered")
            return super().step()

    return Breaking(EngineLimits(8, 8, 100, 1000, 4096))
