"""A callable that starts processes which nobody waits for, in sessions of their own."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from headwater import Model, Tensor


class Parent(Model):
    """Starts a process that sleeps, and gives its id; for 1 with an empty environment."""

    inputs = (Tensor("x", "FP32", [1]),)
    outputs = (Tensor("pid", "INT64", [1]),)

    def __call__(self, *, x: Any) -> Any:
        return {"pid": np.array([[daemon(is_bare=bool(value == 1))] for value in x[:, 0]], np.int64)}


def daemon(*, is_bare: bool) -> int:
    """Start a process as daemons do: by two forks, between which it gets a session. Returns its id."""
    read, write = os.pipe()
    if not (child := os.fork()):
        os.setsid()
        if not (grandchild := os.fork()):
            os.setsid()
            if is_bare:
                os.execve("/bin/sleep", ["sleep", "600"], {})
            time.sleep(600)
            os._exit(0)
        os.write(write, str(grandchild).encode())
        os._exit(0)
    os.waitpid(child, 0)
    pid = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    return pid
