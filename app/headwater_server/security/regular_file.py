"""Reads a file at a path that may also be a FIFO, a socket or a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["read_regular"]


def read_regular(path: Path) -> tuple[bytes | None, int]:
    """The content of a file, and its mode bits. The content is None if the path is a FIFO or a device.

    Raises:
        OSError: the file can't be read, or the path is a folder or a socket.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        return file.read() if stat.S_ISREG(status.st_mode) else None, stat.S_IMODE(status.st_mode)
