"""Callables that show what travels."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater import Embedding, Model, Parameter, Tensor

DATATYPES = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
)  # fmt: skip


class Mirror(Model):
    """Gives back what it gets: every datatype, inputs optional; an output whose input was left out is a zero."""

    inputs = tuple(Tensor(f"in_{name.lower()}", name, [-1], optional=name != "INT32") for name in DATATYPES)
    outputs = tuple(Tensor(f"out_{name.lower()}", name, [-1]) for name in DATATYPES)

    def __call__(self, **inputs: Any) -> Any:
        rows = len(inputs["in_int32"])
        return {
            spec.name: _blank(spec.datatype, rows)
            if (array := inputs[spec.name.replace("out", "in")]) is None
            else array
            for spec in self.outputs
        }


def _blank(datatype: str, rows: int) -> Any:
    if datatype == "BYTES":
        return np.full((rows, 1), b"", object)
    from headwater.datatypes import DATATYPES as TABLE

    return np.zeros((rows, 1), np.float32 if datatype == "BF16" else TABLE[datatype].numpy)


class Matrix(Model):
    """Adds up rows of a matrix: a fixed dimension and one that varies."""

    inputs = (Tensor("m", "FP32", [-1, 3]),)
    outputs = (Tensor("sum", "FP32", [3]),)

    def __call__(self, *, m: Any) -> Any:
        return {"sum": m.sum(axis=1)}


class Specials(Model):
    """Gives NaN and the infinities, whatever it gets."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [4]),)

    def __call__(self, *, x: Any) -> Any:
        return {"y": np.tile(np.array([np.nan, np.inf, -np.inf, 1.5], np.float32), (len(x), 1))}


class Tuned(Model):
    """Multiplies x, with a parameter per batch and one per row; says how large the batch was."""

    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("y", "FP32", [-1]), Tensor("batch", "INT32", [1]))
    parameters = (
        Parameter("factor", "float", 2.0, minimum=0, maximum=100, description="What x is multiplied by"),
        Parameter("offset", "int", 0, per="row", description="What is added to a row"),
        Parameter("mode", "str", "plain", choices=("plain", "negated")),
    )

    def __call__(self, *, x: Any, parameters: dict[str, Any]) -> Any:
        sign = -1 if parameters["mode"] == "negated" else 1
        y = x * np.float32(sign * parameters["factor"]) + np.array(parameters["offset"], np.float32)[:, None]
        return {"y": y, "batch": np.full((len(x), 1), len(x), np.int32)}


class ShortEmbedding(Model):
    """Embeds a text as its first bytes; can shorten."""

    inputs = (Tensor("text", "BYTES", [1]),)
    outputs = (Tensor("vector", "FP32", [-1]),)
    parameters = (Parameter("dimensions", "int", 0, per="row", minimum=0, maximum=8),)
    embedding = Embedding(input="text", output="vector", dimensions="dimensions")

    def __call__(self, *, text: Any, parameters: dict[str, Any]) -> Any:
        length = max(size or 8 for size in parameters["dimensions"])
        rows = [list(element[:length].ljust(length, b"\0")) for element in text[:, 0]]
        return {"vector": np.array(rows, np.float32)}


class Async(Model):
    """Doubles x, asynchronously."""

    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("y", "FP32", [-1]),)

    async def __call__(self, *, x: Any) -> Any:
        import asyncio

        await asyncio.sleep(0.001)
        return {"y": x * 2}
