"""As `tests/services/staged.py`, in a replica that is forked: its imports, torch among them, are made before."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from headwater import Model, Tensor

hold = importlib.import_module("sitecustomize").hold


class Forked(Model):
    """Gives back x."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __init__(self) -> None:
        hold("construct")

    def load(self, device: str) -> None:
        """See that the replica was forked."""
        assert "headwater.replica.preloaded" in sys.orig_argv, "it was not forked"
        torch.set_num_threads(1)

    def __call__(self, x: Any) -> Any:
        hold("call")
        return {"y": x}
