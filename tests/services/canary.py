"""A model of which a version can be made worse while it serves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from headwater import Model, Tensor


class Canary(Model):
    """Answers its version, and the same scores whatever that is.

    Args:
        version: the number.
        fault: a file; while it has ``fails``, every call fails, with ``wrong`` the scores are others, with ``slow
            SECONDS`` each call takes so long, and with ``hangs`` each takes until the file is gone.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("version", "INT32", [1]), Tensor("scores", "FP32", [2], labels=("no", "yes")))

    def __init__(self, version: int, fault: str = "") -> None:
        self.version = version
        self.fault = Path(fault) if fault else None

    def __call__(self, *, x: Any) -> Any:
        fault = self.fault.read_text() if self.fault is not None and self.fault.exists() else ""
        if fault == "fails":
            raise RuntimeError("the regression of version 2")
        if fault.startswith("slow "):
            time.sleep(float(fault.removeprefix("slow ")))
        while fault == "hangs" and self.fault is not None and self.fault.exists():
            time.sleep(0.02)
        scores = [0.75, 0.25] if fault == "wrong" else [0.25, 0.75]
        return {
            "version": np.full((len(x), 1), self.version, np.int32),
            "scores": np.tile(np.array(scores, np.float32), (len(x), 1)),
        }
