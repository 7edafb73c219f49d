"""Reads a file that may have become something else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["read_regular"]


def read_regular(path: Path) -> tuple[bytes | None, int]:
    """The content of a file, and its mode bits. None: it is a FIFO, a socket or a device.

    Raises:
        OSError: it can't be read.
    """
    # Opening a FIFO would wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        return file.read() if stat.S_ISREG(status.st_mode) else None, stat.S_IMODE(status.st_mode)
