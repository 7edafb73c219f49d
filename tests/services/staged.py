"""A callable that waits where a test says."""

from __future__ import annotations

from typing import Any

from sitecustomize import hold

from headwater import Model, Tensor


class Staged(Model):
    """Gives back x. See `tests/services/held/sitecustomize.py`."""

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
