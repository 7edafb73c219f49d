"""A model that says which version of it answers, and writes down its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from headwater import Model, Tensor


class Versioned(Model):
    """Answers the number that its file had when it was constructed; sleeps for as many seconds as x says.

    Args:
        version: the file; whoever removes it or writes no number there keeps the model from starting.
        ends: a file that gets a line with the version at each `unload`; beside it, ``.begun`` is made when a call of
            a second or more begins.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("version", "INT32", [1]),)

    def __init__(self, version: str, ends: str) -> None:
        self.version = int(Path(version).read_text())
        self.ends = ends
        self.weights = np.ones(25_000_000, np.float32)

    def __call__(self, *, x: Any) -> Any:
        if x.max() >= 1:
            Path(f"{self.ends}.begun").touch()
        time.sleep(float(x.max()))
        return {"version": np.full((len(x), 1), self.version, np.int32)}

    def unload(self) -> None:
        with Path(self.ends).open("a") as ends:
            ends.write(f"{self.version}\n")
