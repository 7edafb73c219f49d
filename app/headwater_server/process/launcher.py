"""Becomes a replica under another Python, or reports why that Python can't run one.

Started by `headwater_server.process.guardian` as ``python -m headwater_server.process.launcher PYTHON NAME FOLDER
STATUS_FD``, under Headwater's own Python. It is a process of its own, and has the replica's process id from the start:
the supervisor never waits for an interpreter that hangs, and stopping the replica ends the launcher too.

Imports the standard library only; see `headwater_server.process.interpreter`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

from headwater_server.process.interpreter import InterpreterError, find_interpreter, foreign_environment, stage_package

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Entry point; see the module's docstring."""
    python, name, directory, status_fd = sys.argv[1:]
    # End with the guardian even if it is killed. The setting survives becoming the replica.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    environment = foreign_environment(os.environ, stage_package(Path(directory) / "python"))
    try:
        interpreter = find_interpreter(python, environment)
        environment["LD_LIBRARY_PATH"] = interpreter.library_path(environment)
        arguments = [interpreter.path, "-m", "headwater.replica", name, directory]
        os.execve(interpreter.path, arguments, environment)
    except (InterpreterError, OSError) as error:
        # This is a `ReplicaStatus`, whose module can't be imported here: it needs msgspec.
        status: dict[str, object] = {"event": "failed", "text": str(error), "cause": "its Python can't run a replica"}
        if isinstance(error, InterpreterError) and error.is_permanent:
            status = {**status, "cause": f"its Python can't run a replica: {error.reason}", "is_permanent": True}
        os.write(int(status_fd), json.dumps(status).encode() + b"\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
