"""Locks on files that the workers of a server share."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from typing import Final

__all__ = ["briefly_locked"]

TRIES: Final = 200
"""Tries to lock a file, about 100 µs in all. A process that holds the lock for longer has been stopped (SIGSTOP), and
requests must not wait for it."""


@contextlib.contextmanager
def briefly_locked(handle: int) -> Iterator[None]:
    """A context in which a file is locked; without the lock if another process held it during all tries.

    Args:
        handle: the file's descriptor.
    """
    is_locked = _lock(handle)
    try:
        yield
    finally:
        if is_locked:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _lock(handle: int) -> bool:
    for _ in range(TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False
