"""Tells the models of a repository which requests over HTTP have ended at the gateway: Triton never notices that a
client over HTTP has left.

Each gateway worker has a file with a slot for each of its open requests. A request carries the name of its slot as the
parameter `REQUEST`. Like `headwater.wire.bridge`, this module imports only the standard library.
"""

from __future__ import annotations

import json
import os
import weakref
from typing import Final

__all__ = ["REQUEST", "OpenRequests", "is_open", "without_request"]

REQUEST: Final = "headwater_request"
"""The parameter with a request's name: the worker's index, the slot, and the slot's content in hexadecimal digits."""
SLOT_BYTES: Final = 8
FIRST_SLOTS: Final = 512
"""Slots for which a file has space on the disk from the start."""
_FREE: Final = bytes(SLOT_BYTES)


class OpenRequests:
    """The open requests of a gateway worker. Requests of an earlier worker with the same index have ended.

    Args:
        folder: the server's folder; None: no other process reads the requests.
        worker: the worker's index.
    """

    def __init__(self, folder: str | None = None, worker: int = 0) -> None:
        if folder is None:
            self._file = os.memfd_create("requests", os.MFD_CLOEXEC)
        else:
            self._file = os.open(_path(folder, worker), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._file)
        size = max(os.fstat(self._file).st_size, FIRST_SLOTS * SLOT_BYTES)
        os.posix_fallocate(self._file, 0, size)
        os.pwrite(self._file, bytes(size), 0)
        self._worker = worker
        self._free = list(range(size // SLOT_BYTES))

    def open(self) -> str:
        """Note a request. Returns its name.

        Raises:
            OSError: the file can't grow.
        """
        if not self._free:
            count = os.fstat(self._file).st_size // SLOT_BYTES
            os.posix_fallocate(self._file, 0, 2 * count * SLOT_BYTES)
            self._free = list(range(count, 2 * count))
        slot, content = self._free.pop(), os.urandom(SLOT_BYTES)
        os.pwrite(self._file, content, slot * SLOT_BYTES)
        return f"{self._worker}-{slot}-{content.hex()}"

    def close(self, name: str) -> None:
        """Note that a request has ended."""
        slot = int(name.split("-")[1])
        os.pwrite(self._file, _FREE, slot * SLOT_BYTES)
        self._free.append(slot)


def is_open(folder: str, name: str) -> bool:
    """Whether a request is open. A name that no worker gave is taken for an open request's: clients may send any."""
    try:
        worker, slot, content = name.split("-")
        file = os.open(_path(folder, int(worker)), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(file, SLOT_BYTES, int(slot) * SLOT_BYTES).hex() == content
        finally:
            os.close(file)
    except (OSError, ValueError, OverflowError):
        return True


def without_request(parameters: str) -> tuple[str, str]:
    """The name in a request's parameters (JSON), empty without a name; and the other parameters."""
    if REQUEST not in parameters:
        return "", parameters
    values = json.loads(parameters)
    return str(values.pop(REQUEST, "")), json.dumps(values)


def _path(folder: str, worker: int) -> str:
    return f"{folder}/requests-{worker}"
