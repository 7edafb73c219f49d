"""A model of which a version can be made worse while it serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from inference import Model, Tensor


class Canary(Model):
    """Answers its version.

    Args:
        version: the number.
        fault: a file; as long as it has ``fails``, every call fails, and with ``slow SECONDS`` each takes so long.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("version", "INT32", [1]),)

    def __init__(self, version: int, fault: str = "") -> None:
        self.version = version
        self.fault = Path(fault) if fault else None

    def __call__(self, *, x: Any) -> Any:
        fault = self.fault.read_text() if self.fault is not None and self.fault.exists() else ""
        if fault == "fails":
            raise RuntimeError("the regression of version 2")
        if fault:
            time.sleep(float(fault.removeprefix("slow ")))
        return {"version": np.full((len(x), 1), self.version, np.int32)}
