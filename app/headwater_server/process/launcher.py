"""Starts a replica's binder and becomes its host, or reports why the deployment's Python can't run it.

Started by `headwater_server.process.guardian` as ``python -m headwater_server.process.launcher PYTHON NAME FOLDER
STATUS_FD``, under Headwater's Python and environment; an empty PYTHON means this Python. The launcher is a separate
process, so the supervisor never waits for an interpreter that hangs. It has the host's process id from the start, so
stopping the replica ends the launcher, too. The binder gets Headwater's environment: the variables that the deployment
sets (PYTHONPATH, LD_LIBRARY_PATH) are meant for its model only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from headwater.user_folders import decides_modules

__all__ = ["BINDER", "main", "with_changes"]

PR_SET_PDEATHSIG = 1
BINDER = "headwater_server.binder"
"""The binder's module."""


def main() -> None:
    """Entry point; see the module's docstring."""
    python, name, directory, status_fd = sys.argv[1:]
    # End with the guardian even if the guardian is killed. The setting survives execve.
    _end_with_parent()
    spec = json.loads(Path(directory, "spec.json").read_bytes())
    environment = with_changes(os.environ, spec["environment"])
    host, binder = socket.socketpair()
    if not os.fork():
        os.close(int(status_fd))
        _become_binder(binder)
    socket.send_fds(host, [b"\0"], [1])  # see `headwater.wire.link.Link.receive_descriptor`
    os.set_inheritable(host.fileno(), True)
    arguments = ["-m", "headwater.replica", name, directory, status_fd, str(host.fileno())]
    if not python and not decides_modules(spec["environment"]):
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    from headwater.errors import shortage_of
    from headwater_server.process.interpreter import (  # a start under Headwater's Python doesn't need it
        InterpreterError,
        find_interpreter,
        foreign_environment,
        stage_package,
    )

    try:
        if python:
            environment = foreign_environment(environment, stage_package(Path(directory, "python")))
        path = find_interpreter(python or sys.executable, environment)
        os.execve(path, [path, *arguments], environment)
    except (InterpreterError, OSError) as error:
        # This is a `ReplicaStatus` as a dictionary, since the module of that class is slow to import.
        status: dict[str, object] = {"event": "failed", "text": str(error), "cause": "its Python can't run a replica"}
        if isinstance(error, InterpreterError) and error.is_permanent:
            status = {**status, "cause": f"its Python can't run a replica: {error.reason}", "is_permanent": True}
        status["is_shortage"] = shortage_of(error.__cause__ or error) is not None
        os.write(int(status_fd), json.dumps(status).encode() + b"\n")
        sys.exit(1)


def with_changes(environ: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """An environment with changed variables; the value None removes a variable."""
    environment = {name: value for name, value in environ.items() if name not in changes}
    return environment | {name: value for name, value in changes.items() if value is not None}


def _become_binder(connection: socket.socket) -> None:
    _end_with_parent()
    os.set_inheritable(connection.fileno(), True)
    os.execv(sys.executable, [sys.executable, "-m", BINDER, str(connection.fileno())])


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
