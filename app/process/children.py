"""Child processes in an event loop: those that ended, and those that are stopped (SIGSTOP)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

import psutil

__all__ = ["Children", "ProcessWatch"]


class Children:
    """Reaps every child of this process, adopted orphans included."""

    def __init__(self) -> None:
        self._exits: dict[int, asyncio.Future[int]] = {}

    def follow(self, process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
        """A future of the process's exit code; call this without awaiting anything after the process's start."""
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._exits[process.pid] = exited

        def note(future: asyncio.Future[int]) -> None:
            process.returncode = future.result()  # or Popen would wait for a process that is already reaped

        exited.add_done_callback(note)
        return exited

    def reap(self) -> None:
        """Reap all children that have ended; call this at SIGCHLD."""
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
    """Finds children that are stopped: the kernel reports no end of them, but they do nothing any more."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._suspects: set[int] = set()

    def add(self, pid: int) -> None:
        """Watch this child."""
        self._watched.add(pid)

    def discard(self, pid: int) -> None:
        """Watch this child no longer."""
        self._watched.discard(pid)
        self._suspects.discard(pid)

    def look(self) -> list[int]:
        """The children that are stopped, and were already stopped at the last call."""
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
