"""A Ray actor that holds a process of Headwater: it starts the process on the node that Ray chose, and the process ends
with the actor.

Ray's workers get this class by value, so this module imports only the standard library, and Ray only inside functions.
The process runs as long as its standard input is open, so it ends when the actor does, however the actor ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from typing import IO, Any

__all__ = ["Holder", "outlive_no_holder", "own_output", "read_spec", "write_spec"]

FENCE_EVERY_S = 0.25
END_TIMEOUT_S = 30.0
"""Seconds that the process may take to end after its standard input was closed."""
LENGTH_BYTES = 8
PR_SET_PDEATHSIG = 1


def read_spec(stream: IO[bytes]) -> bytes:
    """Read the specification that `Holder` was given for its process: the first bytes on the process's standard
    input.

    Raises:
        EOFError: the input ended before.
    """
    # Read from the descriptor: a buffered stream would also take the bytes behind the specification.
    return _read(stream.fileno(), int.from_bytes(_read(stream.fileno(), LENGTH_BYTES), "little"))


def _read(fd: int, size: int) -> bytes:
    content = b""
    while len(content) < size:
        piece = os.read(fd, size - len(content))
        if not piece:
            raise EOFError("the specification is incomplete")
        content += piece
    return content


def outlive_no_holder() -> None:
    """Have the kernel send SIGCONT when the holder dies, so that a stopped process still sees the end of its input and
    exits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def own_output() -> IO[str]:
    """This process's standard output, reserved for Headwater: from now on libraries that print write to standard
    error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def write_spec(stream: IO[bytes], spec: bytes) -> None:
    """Write a specification for `read_spec`."""
    stream.write(len(spec).to_bytes(LENGTH_BYTES, "little") + spec)
    stream.flush()


class Holder:
    """Starts a process, and fences it: the process ends when this node's raylet does.

    A raylet that is killed leaves its actors running, while Ray counts them as dead and starts replacements.

    Args:
        command: the process's command. `said` returns its first line of output.
        spec: written to the process's standard input; see `read_spec`.
        environment: variables for the process, which also gets the actor's variables, ``HEADWATER_NODE`` (this node's
            address), ``HEADWATER_NODE_ID``, and ``HEADWATER_RAY`` (the address of Ray's head). ``PWD`` is the
            process's working folder, if that exists on this node.
        is_restarted: whether Ray restarts the actor if the process ends by itself with a status other than 0.
    """

    def __init__(self, command: list[str], spec: bytes, environment: dict[str, str], is_restarted: bool) -> None:
        import ray

        self._raylet = os.getppid()
        context = ray.get_runtime_context()
        about = {
            "HEADWATER_NODE": ray.util.get_node_ip_address(),
            "HEADWATER_NODE_ID": context.get_node_id(),
            "HEADWATER_RAY": context.gcs_address,
        }
        self._is_restarted = is_restarted
        folder = environment.get("PWD", "")
        self._first = b""
        self._has_said = threading.Event()
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment, **about},
            cwd=folder if os.path.isdir(folder) else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._input = self._process.stdin
        write_spec(self._input, spec)
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._fence, daemon=True).start()

    def said(self) -> str:
        """Wait for the process's first line of output, and return it; empty: it ended before it wrote a line."""
        self._has_said.wait()
        return self._first.decode().strip()

    def order(self, line: str) -> None:
        """Write a line to the process's standard input."""
        self._input.write(line.encode() + b"\n")
        self._input.flush()

    def _read(self) -> None:
        output: Any = self._process.stdout
        self._first = output.readline()
        self._has_said.set()
        for line in output:
            print(line.decode(errors="replace"), end="", flush=True)
        self._end(self._process.wait())

    def _fence(self) -> None:
        while os.getppid() == self._raylet:
            time.sleep(FENCE_EVERY_S)
        self._input.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        os._exit(1)

    def _end(self, status: int) -> None:
        """End the actor after its process has ended with ``status``. Ray does not restart an actor that is killed with
        ``no_restart``."""
        import ray

        if status == 0 or not self._is_restarted:
            context = ray.get_runtime_context()
            ray.kill(context.current_actor, no_restart=True)
            time.sleep(END_TIMEOUT_S)
        os._exit(1)
