"""Callables that fail in every way a user's can."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headwater import BadInput, Model, Parameter, Tensor

POISON = -1.0
BAD_INPUT = -2.0
SYSTEM_EXIT = -3.0
WRONG_OUTPUT = -4.0
EXIT_PROCESS = -5.0
GATED = 10_000.0


class Faulty(Model):
    """Doubles x; the first element of a row may ask for a failure instead."""

    inputs = (Tensor("x", "FP32", [-1]),)
    outputs = (Tensor("y", "FP32", [-1]),)

    def __call__(self, *, x: Any) -> Any:
        first = x[:, 0] if x.shape[1] else np.zeros(len(x), np.float32)
        if (first == POISON).any():
            raise ValueError("poison")
        if (first == BAD_INPUT).any():
            raise BadInput("x: expected no -2")
        if (first == SYSTEM_EXIT).any():
            raise SystemExit("a callable tried to leave")
        if (first == EXIT_PROCESS).any():
            os._exit(3)
        if (first == WRONG_OUTPUT).any():
            return {"y": x.astype(np.float64)}
        return {"y": x * 2}


class Slow(Model):
    """Sleeps for as many seconds as the largest x of the batch says, then gives back x, scaled and shifted.

    An x of at least `GATED` is a `tests.running.Gate`: the call says that it has begun, and waits until that is open.
    Also says how many rows shared the call, and how many it had computed before.

    Args:
        marker: a file that is made when a call with an x above 0 begins.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]), Tensor("batch", "INT32", [1]), Tensor("seen", "INT32", [1]))
    parameters = (Parameter("scale", "float", 1.0), Parameter("shift", "float", 0.0, per="row"))

    def __init__(self, marker: str = "") -> None:
        self.marker = marker
        self.rows = 0

    def __call__(self, *, x: Any, parameters: dict[str, Any]) -> Any:
        seen = self.rows
        self.rows += len(x)
        if self.marker and x.max() > 0:
            with open(self.marker, "w"):
                pass
        longest = float(x.max())
        if longest >= GATED:
            wait_at_gate(longest)
        else:
            time.sleep(longest)
        y = x * np.float32(parameters["scale"]) + np.array(parameters["shift"], np.float32)[:, None]
        counts = {"batch": len(x), "seen": seen}
        return {"y": y, **{name: np.full((len(x), 1), count, np.int32) for name, count in counts.items()}}


def wait_at_gate(value: float) -> None:
    """Say that a call has begun, and wait until the `tests.running.Gate` of this value is open."""
    folder = Path(os.environ["TEST_GATES"])
    (folder / f"{value:.0f}.begun").touch()
    while not (folder / f"{value:.0f}.open").exists():
        time.sleep(0.01)


class FailsToLoad(Model):
    """Never gets ready."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def load(self, device: str) -> None:
        raise RuntimeError("no weights here")


class AlwaysFails(Model):
    """Has a fault.

    Args:
        when: ``load`` or ``call``.
    """

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)
    example: ClassVar = {"x": [2.0]}

    def __init__(self, when: str) -> None:
        self.when = when

    def load(self, device: str) -> None:
        if self.when == "load":
            raise TypeError("load() can't do this")

    def __call__(self, *, x: Any) -> Any:
        raise RuntimeError("shapes cannot be multiplied")


class DiesOfSignal(Faulty):
    """Ends by a signal while it loads, once the file named in the options exists."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def load(self, device: str) -> None:
        if os.path.exists(self.marker):
            os.kill(os.getpid(), signal.SIGKILL)
