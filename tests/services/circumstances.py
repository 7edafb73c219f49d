"""Models that say under what circumstances they run, for replicas that are forked and such that are not."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headwater import Model, Tensor

Bytes = npt.NDArray[np.object_]


class Forked(Model):
    """Answers with them, as JSON."""

    inputs = (Tensor("x", "BYTES", [1]),)
    outputs = (Tensor("y", "BYTES", [1]),)

    def load(self, device: str) -> None:
        """Look, before Triton's client and the warm-up change anything."""
        self._seen = circumstances() | {"device": device}

    def __call__(self, x: Bytes) -> dict[str, Bytes]:
        """For every row."""
        text = json.dumps(self._seen | {"threads": torch.get_num_threads()}).encode()
        return {"y": np.full(x.shape, text, dtype=object)}


def circumstances() -> dict[str, Any]:
    """What a model may notice of its process."""
    blas = _blas()
    np.ones((500, 500)) @ np.ones((500, 500))
    return {
        "is_forked": "headwater.replica.preloaded" in sys.orig_argv,
        "pid": os.getpid(),
        "prefix": sys.prefix,
        "same": {
            "argv": sys.argv[:3],
            "main": sys.modules["__main__"].__spec__.name,  # type: ignore[union-attr]
            "path": sys.path,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "umask": _umask(),
            "temporary": tempfile.gettempdir(),
            "leads": (os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()),
            "descriptors": sorted(_kind(fd) for fd in os.listdir("/proc/self/fd")),
            "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
            "limits": Path("/proc/self/limits").read_text(),
            "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")[:5],
            "nice": os.getpriority(os.PRIO_PROCESS, 0),
            "session_nice": _session_nice(),
            "blas_threads": blas,
            "seen_by_threads": len(os.listdir("/proc/self/task")),
        },
        "random": [random.random(), float(np.random.rand()), multiprocessing.current_process().authkey.hex()],
    }


def _kind(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0].replace(str(os.getpid()), "PID")
    except OSError:  # what listed them
        return ""


def _session_nice() -> int | None:
    """None: the kernel doesn't group sessions."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/autogroup").read_text().split()[-1])
    return None


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


def _blas() -> int:
    """The threads of numpy's OpenBLAS."""
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line}
    (library,) = libraries
    prefix = "" if np.__version__.startswith("1.") else "scipy_"
    return int(getattr(ctypes.CDLL(library), f"{prefix}openblas_get_num_threads64_")())
