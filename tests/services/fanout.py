"""Pipelines for tests: a trunk and heads that count, fail, wait, end or write into their features on request."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference import BadInput, Model, Tensor

WIDTH = 4
GATED = 10_000.0


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
    arrays = "torch"

    def __call__(self, x: torch.Tensor) -> dict[str, Any]:
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
            return {"features": features.to(torch.float64)}
        if asked == -3:
            return {"features": torch.cat([features, features])}
        if asked == -4:
            return {"features": features[:, :2]}
        if asked == -5:
            return {}
        return {"features": features}


class Head(Model):
    """``{output}`` = features + add, on numpy or torch.

    Rows whose first feature is ``fail_on`` fail, those whose first feature is ``hang_on`` never end, those whose first
    feature is ``exit_on`` end the process. One of at least `GATED` waits for a file of that name in ``gates``.
    """

    inputs = (Tensor("features", "FP32", [WIDTH]),)

    def __init__(
        self,
        output: str,
        add: float = 0,
        arrays: str = "torch",
        fail_on: float | None = None,
        hang_on: float | None = None,
        exit_on: float | None = None,
        gates: str | None = None,
    ) -> None:
        self.output = output
        self.add = add
        self.arrays = arrays  # type: ignore[misc,assignment]
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
    arrays = "torch"

    def __init__(self, count: int = 3, interval_s: float = 0) -> None:
        self.count = count
        self.interval_s = interval_s

    def __call__(self, features: torch.Tensor) -> Iterator[dict[str, Any]]:
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


class Post(Model):
    """doubled = piece * 2"""

    inputs = (Tensor("piece", "FP32", [WIDTH]),)
    outputs = (Tensor("doubled", "FP32", [WIDTH]),)

    def __call__(self, piece: np.ndarray[Any, Any]) -> dict[str, Any]:
        note("post", len(piece))
        return {"doubled": piece * 2}


class Backbone(Model):
    """hidden = tanh of a linear layer."""

    inputs = (Tensor("x", "FP32", [16]),)
    outputs = (Tensor("hidden", "FP32", [32]),)
    arrays = "torch"

    def load(self, device: str) -> None:
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh()).to(device)

    def __call__(self, x: torch.Tensor) -> dict[str, Any]:
        return {"hidden": self.layers(x)}


class Classifier(Model):
    """``{output}`` = softmax of a linear layer."""

    inputs = (Tensor("hidden", "FP32", [32]),)
    arrays = "torch"

    def __init__(self, output: str, classes: int, seed: int) -> None:
        self.output = output
        self.classes = classes
        self.seed = seed
        self.outputs = (Tensor(output, "FP32", [classes]),)  # type: ignore[misc]

    def load(self, device: str) -> None:
        torch.manual_seed(self.seed)
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, self.classes), torch.nn.Softmax(dim=-1)).to(device)

    def __call__(self, hidden: torch.Tensor) -> dict[str, Any]:
        return {self.output: self.layers(hidden)}


class Wide(Model):
    """A head for other features than `Trunk` makes."""

    inputs = (Tensor("features", "FP32", [WIDTH + 1]),)
    outputs = (Tensor("wide", "FP32", [WIDTH + 1]),)

    def __call__(self, features: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {"wide": features}
