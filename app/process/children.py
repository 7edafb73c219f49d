"""Child processes in an event loop: those that ended, and those that are stopped (SIGSTOP)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess

import psutil

__all__ = ["Children"]


class Children:
    """Reaps every child of this process, adopted orphans included."""

    def __init__(self) -> None:
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._stopped: set[int] = set()
        """Children that were stopped at the last look."""

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

    def look(self) -> list[int]:
        """The followed children that are stopped, and were already stopped at the last call: the kernel reports no end
        of them, but they do nothing any more."""
        before, self._stopped = self._stopped, set()
        for pid in self._exits:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    self._stopped.add(pid)
        return sorted(before & self._stopped)
