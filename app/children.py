"""Child processes in an event loop: who ended, and how."""

from __future__ import annotations

import asyncio
import os
import subprocess

__all__ = ["Children"]


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
