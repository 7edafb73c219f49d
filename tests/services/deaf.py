"""A callable that leaves its process running and unable to answer, or in which two processes return from a call."""

from __future__ import annotations

import os
from typing import Any

from headwater import Model, Tensor

CLOSE, FORK = -1.0, -2.0
"""Rows that close all files of the process, or fork it so that the call returns in both."""


class Deaf(Model):
    """Doubles x, or does what a row says."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __call__(self, *, x: Any) -> Any:
        if CLOSE in x:
            os.closerange(3, 4096)
        if FORK in x:
            os.fork()
        return {"y": x * 2}
