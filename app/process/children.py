"""Child processes in an event loop: who ended, and how.

Child processes that are stopped (SIGSTOP): the kernel reports no end of them, and they never do anything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

import psutil

__all__ = ["Children", "ProcessWatch"]


class Children:
    """Reaps every child of this process, those that came to it as orphans too."""

    def __init__(self) -> None:
        self._exits: dict[int, asyncio.Future[int]] = {}

    def follow(self, process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
        """A future of the process's exit code; must be called in the same step as the process is started."""
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._exits[process.pid] = exited

        def note(future: asyncio.Future[int]) -> None:
            process.returncode = future.result()  # so that Popen doesn't look for a process that is reaped

        exited.add_done_callback(note)
        return exited

    def reap(self) -> None:
        """Take in the ends there are; to be called at SIGCHLD."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            exited = self._exits.pop(pid, None)
            if exited is not None and not exited.done():
                exited.set_result(os.waitstatus_to_exitcode(status))


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
