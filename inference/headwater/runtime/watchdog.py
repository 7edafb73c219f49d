"""The replica's side of the watchdog: a small file with the start time of each call of the user's code.

The guardian reads the file. It ends a replica with a call that takes too long, and a replica that neither computes nor
answers. The replica itself need not answer, because a callable may hold the interpreter's lock for ever. The file is an
array of int64: first the limit of a call in nanoseconds, 0 for no limit; then slots, each with the start of its call on
the monotonic clock, or 0 while the slot is free.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

__all__ = ["WATCHDOG_FILE", "WatchCall", "Watchdog"]

WatchCall = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a call of the user's code runs: `Watchdog.call`, or `contextlib.nullcontext`."""

WATCHDOG_FILE: Final = "watchdog"
"""The file's name in the replica's folder."""
SLOTS: Final = 511


class Watchdog:
    """Records calls, from any thread. Beyond `SLOTS` concurrent calls, further calls are not recorded.

    Args:
        path: the file to create.
        limit_s: the longest that a call may take; 0: no limit.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        with path.open("xb") as file:
            # The zeros are written, so that the file is not sparse: on a full disk this write fails, instead of a
            # SIGBUS in a call.
            file.write(bytes(8 * (1 + SLOTS)))
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._slots = memoryview(memory).cast("q")
        self._slots[0] = int(limit_s * 1e9)
        # Slots are popped and appended at the list's end, which are atomic operations, so the list needs no lock.
        self._free = list(range(SLOTS, 0, -1))

    def call(self) -> _WatchedCall:
        """A context for one call of the user's code."""
        return _WatchedCall(self._slots, self._free)


class _WatchedCall:
    """A running call, recorded in a slot unless all slots are taken."""

    __slots__ = ("_free", "_slot", "_slots")

    def __init__(self, slots: memoryview[int], free: list[int]) -> None:
        self._slots = slots
        self._free = free

    def __enter__(self) -> None:
        try:
            self._slot = self._free.pop()
        except IndexError:
            self._slot = 0
        else:
            self._slots[self._slot] = time.monotonic_ns()

    def __exit__(self, *_: object) -> None:
        if self._slot:
            self._slots[self._slot] = 0
            self._free.append(self._slot)
