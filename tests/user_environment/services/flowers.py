"""The user's model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import iris

from headwater import Model, Tensor


class Flowers(Model):
    """Tells of four measures what `iris.Reader` computes. Options: ``folder``, in which its classifier is."""

    inputs = (Tensor("x", "FP32", [4]),)
    outputs = (Tensor("y", "FP32", [12]),)

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def load(self, device: str) -> None:
        self._reader = iris.Reader(self._folder)

    def __call__(self, x: Any) -> Any:
        return {"y": self._reader.read(x)}
