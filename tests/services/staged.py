"""A callable that waits where a test says; see `tests/services/held/sitecustomize.py`."""

from __future__ import annotations

import importlib
from typing import Any

from headwater import Model, Tensor

hold = importlib.import_module("sitecustomize").hold


class Staged(Model):
    """Gives back x."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self) -> None:
        hold("construct")

    def load(self, device: str) -> None:
        """Wait."""
        hold("load")

    def __call__(self, x: Any) -> Any:
        hold("call")
        return {"y": x}
