"""Callables that end, stop or hold up their process in every way."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

import numpy as np

from headwater import Model, Tensor

SEGFAULT, KILL, STOP, HANG, EXIT = -1.0, -2.0, -3.0, -4.0, -5.0
"""Rows that end or stop the process, or never return. `KILL` is how the kernel ends one that has taken all memory."""
WAIT = -9.0
"""Never returns either, but leaves the interpreter to others."""
LEAVE, INTERRUPT, EXHAUST = -6.0, -7.0, -8.0
"""Rows at which the callable raises what ends a program elsewhere."""


class Deadly(Model):
    """Doubles x, or does what the first row says."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("y", "FP32", [1]),)

    def __call__(self, *, x: Any) -> Any:
        for value in x[x[:, 0] < 0, 0].tolist():
            do(value)
        return {"y": x * 2}


class Head(Model):
    """``{output}`` = features, or, of one that is ``deadly``, what the first row says."""

    inputs = (Tensor("features", "FP32", [1]),)

    def __init__(self, output: str, deadly: bool = False) -> None:
        self.output = output
        self.deadly = deadly
        self.outputs = (Tensor(output, "FP32", [1]),)  # type: ignore[misc]

    def __call__(self, *, features: Any) -> Any:
        if self.deadly and features[0, 0] < 0:
            do(float(features[0, 0]))
        return {self.output: features}


def do(value: float) -> None:
    """What a row says."""
    print(f"asked for {value:g}", flush=True)
    if value == SEGFAULT:
        ctypes.string_at(0)
    elif value == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    elif value == STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # another thread may take the signal, and this one would answer before it stops
    elif value == HANG:
        ctypes.PyDLL(None).sleep(600)  # and keeps the interpreter to itself
    elif value == WAIT:
        time.sleep(600)
    elif value == EXIT:
        os._exit(3)
    elif value == LEAVE:
        raise SystemExit("a callable tried to leave")
    elif value == INTERRUPT:
        raise KeyboardInterrupt
    elif value == EXHAUST:
        np.ones(1 << 50)
