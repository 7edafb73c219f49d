"""Pipelines for tests: a trunk and heads that count, fail, wait, end or write into their features on request.

They compute with numpy, or with torch if their option ``arrays`` says so, and import torch only then: a replica without
it starts in half the time, and a pipeline in a graph has one for each step.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from headwater import BadInput, Model, Tensor

WIDTH = 4
GATED = 10_000.0
Arrays: TypeAlias = Literal["numpy", "torch"]


def note(name: str, rows: int) -> None:
    """Write down a call where a test finds it: in the file that the environment names."""
    path = os.environ.get("FANOUT_LOG")
    if path:
        with Path(path).open("a") as log:
            log.write(f"{name} {rows}\n")


class Trunk(Model):
    """features = x * 2; what the first element of a row asks for comes first."""

    inputs = (Tensor("x", "FP32", [WIDTH]),)
    outputs = (Tensor("features", "FP32", [WIDTH]),)

    def __init__(self, arrays: Arrays = "numpy") -> None:
        self.arrays = arrays  # type: ignore[misc]

    def __call__(self, x: Any) -> dict[str, Any]:
        note("trunk", len(x))
        asked = float(x[0, 0])
        if (x[:, 0] == 666).any():
            raise ValueError("the trunk does not like 666")
        if (x[:, 0] == 400).any():
            raise BadInput("400 is no input")
        features = x * 2
        if asked == -1:
            return {"features": features[:0]}
        if asked == -2:
            return {"features": features.double() if self.arrays == "torch" else features.astype(np.float64)}
        if asked == -3:
            return {"features": features[[*range(len(features))] * 2]}
        if asked == -4:
            return {"features": features[:, :2]}
        if asked == -5:
            return {}
        return {"features": features}


class FirstNumber(Model):
    """features = the first number of any, four times."""

    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("features", "FP32", [WIDTH]),)

    def __call__(self, x: Any) -> dict[str, Any]:
        return {"features": np.repeat(x[:, :1], WIDTH, 1)}


class Head(Model):
    """``{output}`` = features + add.

    Rows whose first feature is ``fail_on`` fail, those whose first feature is ``hang_on`` never end, those whose first
    feature is ``exit_on`` end the process. One of at least `GATED` waits for a file of that name in ``gates``.
    """

    inputs = (Tensor("features", "FP32", [WIDTH]),)

    def __init__(
        self,
        output: str,
        add: float = 0,
        arrays: Arrays = "numpy",
        fail_on: float | None = None,
        hang_on: float | None = None,
        exit_on: float | None = None,
        gates: str | None = None,
    ) -> None:
        self.output = output
        self.add = add
        self.arrays = arrays  # type: ignore[misc]
        self.fail_on = fail_on
        self.hang_on = hang_on
        self.exit_on = exit_on
        self.gates = gates
        self.outputs = (Tensor(output, "FP32", [WIDTH]),)  # type: ignore[misc]

    def __call__(self, features: Any) -> dict[str, Any]:
        note(self.output, len(features))
        first = features[:, 0]
        for value in first.tolist() if self.gates is not None else ():
            while value >= GATED and not Path(str(self.gates), f"{value:g}").exists():
                time.sleep(0.01)
        if self.fail_on is not None and bool((first == self.fail_on).any()):
            raise RuntimeError(f"{self.output} can't bear {self.fail_on:g}")
        if self.hang_on is not None and bool((first == self.hang_on).any()):
            time.sleep(10_000)
        if self.exit_on is not None and bool((first == self.exit_on).any()):
            os._exit(3)
        return {self.output: features + self.add}


class Writer(Head):
    """Writes into its features, and says nothing of it."""

    def __call__(self, features: Any) -> dict[str, Any]:
        features += 1000
        return super().__call__(features)


class HonestWriter(Writer):
    """Writes into its features, and says so."""

    mutates_features = True


class Pieces(Model):
    """Yields features, one more added each time."""

    inputs = (Tensor("features", "FP32", [WIDTH]),)
    outputs = (Tensor("piece", "FP32", [WIDTH]),)

    def __init__(self, count: int = 3, interval_s: float = 0, arrays: Arrays = "numpy") -> None:
        self.count = count
        self.interval_s = interval_s
        self.arrays = arrays  # type: ignore[misc]

    def __call__(self, features: Any) -> Iterator[dict[str, Any]]:
        try:
            for index in range(self.count):
                note("piece", len(features))
                yield {"piece": features + index}
                time.sleep(self.interval_s)
                if bool((features[:, 0] == 2 * index + 1000).any()):
                    raise RuntimeError(f"piece {index} breaks")
        finally:
            note("closed", len(features))


class AsyncPieces(Model):
    """The same, written as an async generator; a model of its own."""

    inputs = (Tensor("x", "FP32", [WIDTH]),)
    outputs = (Tensor("piece", "FP32", [WIDTH]),)

    def __init__(self, count: int = 3, interval_s: float = 0) -> None:
        self.count = count
        self.interval_s = interval_s

    async def __call__(self, x: np.ndarray[Any, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            for index in range(self.count):
                note("piece", len(x))
                yield {"piece": x + index}
                await asyncio.sleep(self.interval_s)
        finally:
            note("closed", len(x))


class WidePieces(Model):
    """Yields rows of its number, as fast as they are taken."""

    inputs = (Tensor("x", "FP32", [WIDTH]),)
    outputs = (Tensor("piece", "INT32", [-1]),)

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.width = width

    def __call__(self, x: np.ndarray[Any, Any]) -> Iterator[dict[str, Any]]:
        for index in range(self.count):
            note("piece", len(x))
            yield {"piece": np.full((len(x), self.width), index, np.int32)}


class Post(Model):
    """doubled = piece * 2"""

    inputs = (Tensor("piece", "FP32", [WIDTH]),)
    outputs = (Tensor("doubled", "FP32", [WIDTH]),)

    def __call__(self, piece: np.ndarray[Any, Any]) -> dict[str, Any]:
        note("post", len(piece))
        return {"doubled": piece * 2}


class Layer(Model):
    """Some function of a linear layer, whose weights and biases its seed gives.

    Attributes:
        weight: FP32 [outputs, inputs].
        bias: FP32 [outputs].
    """

    def __init__(self, sizes: tuple[int, int], seed: int, arrays: Arrays) -> None:
        inputs, outputs = sizes
        chance = np.random.default_rng(seed)
        self.weight = (chance.standard_normal((outputs, inputs)) / inputs**0.5).astype(np.float32)
        self.bias = chance.standard_normal(outputs).astype(np.float32)
        self.arrays = arrays  # type: ignore[misc]

    def load(self, device: str) -> None:
        if self.arrays == "torch":
            import torch

            self._weight, self._bias = (torch.from_numpy(array).to(device) for array in (self.weight, self.bias))

    def linear(self, x: Any) -> Any:
        """The layer alone."""
        if self.arrays == "torch":
            return x @ self._weight.T + self._bias
        return x @ self.weight.T + self.bias


class Backbone(Layer):
    """hidden = tanh of a linear layer."""

    inputs = (Tensor("x", "FP32", [16]),)
    outputs = (Tensor("hidden", "FP32", [32]),)

    def __init__(self, arrays: Arrays = "numpy") -> None:
        super().__init__((16, 32), 0, arrays)

    def __call__(self, x: Any) -> dict[str, Any]:
        layer = self.linear(x)
        return {"hidden": layer.tanh() if self.arrays == "torch" else np.tanh(layer)}


class Classifier(Layer):
    """``{output}`` = softmax of a linear layer."""

    inputs = (Tensor("hidden", "FP32", [32]),)

    def __init__(self, output: str, classes: int, seed: int, arrays: Arrays = "numpy") -> None:
        super().__init__((32, classes), seed, arrays)
        self.output = output
        self.outputs = (Tensor(output, "FP32", [classes]),)  # type: ignore[misc]

    def __call__(self, hidden: Any) -> dict[str, Any]:
        layer = self.linear(hidden)
        if self.arrays == "torch":
            return {self.output: layer.softmax(-1)}
        powers = np.exp(layer - layer.max(-1, keepdims=True))
        return {self.output: powers / powers.sum(-1, keepdims=True)}


class Wide(Model):
    """A head for other features than `Trunk` makes."""

    inputs = (Tensor("features", "FP32", [WIDTH + 1]),)
    outputs = (Tensor("wide", "FP32", [WIDTH + 1]),)

    def __call__(self, features: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {"wide": features}
