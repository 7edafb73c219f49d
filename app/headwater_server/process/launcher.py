"""Becomes a replica's host under another Python, or reports why that Python can't run one.

Started by `headwater_server.process.guardian` as ``python -m headwater_server.process.launcher PYTHON NAME FOLDER
STATUS_FD``, under Headwater's own Python and environment. It is a process of its own, and has the replica's process id
from the start: the supervisor never waits for an interpreter that hangs, and stopping the replica ends the launcher
too. Before it becomes the host, it forks the binder, whose environment is Headwater's, too: what the deployment sets
(PYTHONPATH, LD_LIBRARY_PATH) is meant for the other Python.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

from headwater_server.process.interpreter import (
    InterpreterError,
    find_interpreter,
    foreign_environment,
    stage_package,
    with_changes,
)

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Entry point; see the module's docstring."""
    python, name, directory, status_fd = sys.argv[1:]
    # End with the guardian even if it is killed. The setting survives becoming the replica.
    _end_with_parent()
    spec = json.loads(Path(directory, "spec.json").read_bytes())
    environment = foreign_environment(
        with_changes(os.environ, spec["environment"]), stage_package(Path(directory, "python"))
    )
    host, binder = socket.socketpair()
    if not os.fork():
        os.close(int(status_fd))
        _become_binder(directory, binder)
    os.set_inheritable(host.fileno(), True)
    try:
        path = find_interpreter(python, environment)
        command = [path, "-m", "headwater.replica", name, directory, status_fd, str(host.fileno())]
        os.execve(path, command, environment)
    except (InterpreterError, OSError) as error:
        # This is a `ReplicaStatus`, whose module is slow to import.
        status: dict[str, object] = {"event": "failed", "text": str(error), "cause": "its Python can't run a replica"}
        if isinstance(error, InterpreterError) and error.is_permanent:
            status = {**status, "cause": f"its Python can't run a replica: {error.reason}", "is_permanent": True}
        os.write(int(status_fd), json.dumps(status).encode() + b"\n")
        sys.exit(1)


def _become_binder(directory: str, connection: socket.socket) -> None:
    _end_with_parent()
    os.set_inheritable(connection.fileno(), True)
    os.execv(sys.executable, [sys.executable, "-m", "headwater.replica.binder", directory, str(connection.fileno())])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
