"""When each call of the user's code began: in a small file, for the guardian, which ends a replica that hangs.

The file is an array of int64. The first is the limit of a call in nanoseconds; each other one is a slot: when the call
that has it began, on the monotonic clock, or 0 while none has it. Nothing is asked of the process that it tells of: a
callable may keep the interpreter for itself for ever.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

__all__ = ["PULSE_FILE", "Pulse", "WatchCall"]

WatchCall = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which a call of the user's code runs: `Pulse.call`, or `contextlib.nullcontext`."""

PULSE_FILE: Final = "pulse"
"""In the replica's folder."""
SLOTS: Final = 511


class Pulse:
    """Notes calls; from any thread, and any number at once. A call beyond `SLOTS` at once is not noted.

    Args:
        path: the file, which is made.
        limit_s: how long a call may take.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        with path.open("xb") as file:
            # Written, not left as a hole: a disk that is full shows here, and not as SIGBUS in a call.
            file.write(bytes(8 * (1 + SLOTS)))
        with path.open("r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._slots = memoryview(memory).cast("q")
        self._slots[0] = int(limit_s * 1e9)
        # Taken and given back from its end, each in one step of the interpreter: no lock.
        self._free = list(range(SLOTS, 0, -1))

    def begin(self) -> int:
        """A call begins. Returns its slot, for `end`."""
        try:
            slot = self._free.pop()
        except IndexError:
            return 0
        self._slots[slot] = time.monotonic_ns()
        return slot

    def end(self, slot: int) -> None:
        """A call has ended."""
        if slot:
            self._slots[slot] = 0
            self._free.append(slot)

    def call(self) -> _Call:
        """A context in which the user's code runs."""
        return _Call(self)


class _Call:
    """A call under way."""

    __slots__ = ("_pulse", "_slot")

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._slot = 0

    def __enter__(self) -> None:
        self._slot = self._pulse.begin()

    def __exit__(self, *_: object) -> None:
        self._pulse.end(self._slot)
