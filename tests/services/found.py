"""A model with ragged outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headwater import BadInput, Model, Tensor


class Boxes(Model):
    """For a number n, the n boxes [n, 0] to [n, n - 1], and their names; a negative number is refused."""

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
        counts = n[:, 0].tolist()
        return {
            "boxes": [np.array([[count, place] for place in range(count)], "f4").reshape(-1, 2) for count in counts],
            "names": [[f"{count}.{place}" for place in range(count)] for count in counts],
            "rows": np.full_like(n, len(n)),
        }


class Numbers(Model):
    """The trunk of a pipeline: passes n on."""

    inputs = (Tensor("n", "INT64", [1]),)
    outputs = (Tensor("n", "INT64", [1]),)

    def __call__(self, n: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Pass n on."""
        return {"n": n}
