"""Callables that tell under which Python they run."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from headwater import Model, Tensor


class Interpreter(Model):
    """Says, whatever it is asked, its interpreter's path and version, and what of its environment matters to it."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (
        Tensor("executable", "BYTES", [1]),
        Tensor("prefix", "BYTES", [1]),
        Tensor("version", "BYTES", [1]),
        Tensor("path", "BYTES", [-1]),
        Tensor("home", "BYTES", [1]),
    )

    def __call__(self, x: Any) -> Any:
        facts = {
            "executable": [sys.executable],
            "prefix": [sys.prefix],
            "version": [f"{sys.version_info.major}.{sys.version_info.minor}"],
            "path": sys.path,
            "home": [os.environ.get("PYTHONHOME", "") + os.environ.get("VIRTUAL_ENV", "")],
        }
        return {name: np.array([[text.encode() for text in texts]] * len(x), object) for name, texts in facts.items()}
