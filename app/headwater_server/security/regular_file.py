"""Reads a file at a path that may also be a FIFO, a socket or a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headwater_server.errors import ConfigError

__all__ = ["read_regular", "require_regular"]


def read_regular(path: Path) -> tuple[bytes | None, int]:
    """The content of a file, and its mode bits. The content is None if the path is a FIFO or a device.

    Raises:
        OSError: the file can't be read, or the path is a folder or a socket.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        return file.read() if stat.S_ISREG(status.st_mode) else None, stat.S_IMODE(status.st_mode)


def require_regular(field: str, path: Path, *, fix: str = "") -> tuple[bytes, int]:
    """The content of a file that the configuration names, and its mode bits.

    Args:
        field: the configuration field that names the file, for messages.
        path: the file.
        fix: how to make a file that can't be read.

    Raises:
        ConfigError: the file can't be read, or isn't a regular file.
    """
    try:
        content, mode = read_regular(path)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}", field=field, fix=fix) from error
    if content is None:
        raise ConfigError(f"{path}: expected a regular file, got a FIFO, a socket or a device", field=field)
    return content, mode
