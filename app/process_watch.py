"""Child processes that are stopped (SIGSTOP): the kernel reports no end of them, and they never do anything again."""

from __future__ import annotations

import contextlib
import os

import psutil

__all__ = ["ProcessWatch"]

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


class ProcessWatch:
    """Looks at some children of this process."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._suspects: set[int] = set()

    def add(self, pid: int) -> None:
        """Look at this one, too."""
        self._watched.add(pid)

    def discard(self, pid: int) -> None:
        """It has ended."""
        self._watched.discard(pid)
        self._suspects.discard(pid)

    def look(self) -> list[int]:
        """Those that are stopped, and were so at the last look."""
        parent = os.getpid()
        stopped = set()
        for pid in self._watched:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.ppid() == parent and process.status() in _STOPPED:
                    stopped.add(pid)
        found = sorted(stopped & self._suspects)
        self._suspects = stopped
        return found
