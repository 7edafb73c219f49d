"""Models with ragged outputs and inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from faulty import GATED, wait_at_gate  # type: ignore[import-not-found]  # beside it on a replica's path

from headwater import BadInput, Model, Parameter, Tensor


class Boxes(Model):
    """For a number n, the n boxes [n, 0] to [n, n - 1], and their names; a negative number is refused. The number of a
    `tests.running.Gate` has no boxes, and waits there."""

    inputs = (Tensor("n", "INT64", [1]),)
    outputs = (
        Tensor("boxes", "FP32", [-1, 2], ragged=True),
        Tensor("names", "BYTES", [-1], ragged=True),
        Tensor("rows", "INT64", [1]),
    )

    def __call__(self, n: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Find the boxes."""
        if (n < 0).any():
            raise BadInput("n: expected no negative number")
        if (gate := n.max()) >= GATED:
            wait_at_gate(gate)
        counts = np.where(n >= GATED, 0, n)[:, 0].tolist()
        return {
            "boxes": [np.array([[count, place] for place in range(count)], "f4").reshape(-1, 2) for count in counts],
            "names": [[f"{count}.{place}" for place in range(count)] for count in counts],
            "rows": np.full_like(n, len(n)),
        }


class Sums(Model):
    """The sum of a row's numbers, and in which call, with rows how long, it was computed. The number of a
    `tests.running.Gate` waits there."""

    inputs = (Tensor("x", "FP32", [-1, 2], ragged=True, padding=-9),)
    outputs = (
        Tensor("sum", "FP32", [2]),
        Tensor("same", "FP32", [-1, 2], ragged=True),
        Tensor("call", "INT64", [2]),
    )

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: npt.NDArray[np.float32], x_count: npt.NDArray[np.int32]) -> dict[str, Any]:
        """Sum."""
        self.calls += 1
        if (gate := x.max(initial=0)) >= GATED:
            wait_at_gate(gate)
        rows = [row[:count] for row, count in zip(x, x_count[:, 0], strict=True)]
        if any((row[count:] != -9).any() for row, count in zip(x, x_count[:, 0], strict=True)):
            raise BadInput("x: expected -9 where a row has ended")
        return {
            "sum": np.array([row.sum(0) for row in rows], "f4"),
            "same": rows,
            "call": np.full((len(x), 2), (self.calls, x.shape[1])),
        }


class Numbers(Model):
    """The trunk of a pipeline: passes n on."""

    inputs = (Tensor("n", "INT64", [1]),)
    outputs = (Tensor("n", "INT64", [1]),)

    def __call__(self, n: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Pass n on."""
        return {"n": n}


class Crops(Model):
    """For a box [n, place] of a number n the crop [n, place, rows of the call]; the box [5, 4] is refused."""

    inputs = (Tensor("n", "INT64", [1]), Tensor("boxes", "FP32", [2]))
    outputs = (Tensor("crop", "FP32", [3]),)

    def __call__(self, n: npt.NDArray[np.int64], boxes: npt.NDArray[np.float32]) -> dict[str, Any]:
        """Cut the boxes."""
        if [5, 4] in boxes.tolist():
            raise BadInput("boxes: expected another box")
        if len(boxes) > 1 or boxes.any():  # the warm-up has a box of zeros
            np.testing.assert_array_equal(n[:, 0], boxes[:, 0])
        return {"crop": np.column_stack([boxes, np.full(len(boxes), len(boxes), "f4")])}


class Texts(Model):
    """Says a crop's name, as the detector has it, with the text that it was told."""

    inputs = (Tensor("crop", "FP32", [3]), Tensor("names", "BYTES", [1]))
    outputs = (Tensor("text", "BYTES", [1]), Tensor("calls", "INT64", [2]))
    parameters = (Parameter("greeting", "str", "a", per="row"),)

    def __call__(
        self, crop: npt.NDArray[np.float32], names: npt.NDArray[np.object_], parameters: dict[str, list[str]]
    ) -> dict[str, Any]:
        """Read the crops."""
        texts = [f"{text} {name.decode()}" for text, (name,) in zip(parameters["greeting"], names, strict=True)]
        return {
            "text": np.array(texts, object).reshape(-1, 1),
            "calls": np.column_stack([crop[:, 2].astype(np.int64), np.full(len(crop), len(crop))]),
        }
