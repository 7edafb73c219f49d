"""A process that does jobs: one line to it, one line back."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypeVar

__all__ = ["Child", "give_back"]

_Child = TypeVar("_Child", bound="Child")


class Child:
    """A module of ours as a process; at the end of its input it ends.

    Args:
        module: run as ``python -m``.
        arguments: after it.
        environment: beside our own.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )

    def __enter__(self: _Child) -> _Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # in the middle of a job
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def send(self, line: bytes) -> None:
        """Give it a job.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"{self._module} ended; it says above why") from None

    def has_line(self, timeout_s: float) -> bool:
        """Wait so long for a line from it, or its end."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], timeout_s)[0])

    def receive(self) -> bytes:
        """Wait for what it made of the job.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self._process.stdout is not None
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(b"\n"):
            pieces.append(os.read(self._process.stdout.fileno(), 1 << 20))
            if not pieces[-1]:
                raise RuntimeError(f"{self._module} ended; it says above why")
        return b"".join(pieces)


def give_back(line: bytes) -> None:
    """In the process: say what it made of the job.

    Not through ``sys.stdout``, which PYTHONUNBUFFERED makes a bare file: the end of uvloop's io_uring interrupts a
    write that waits for the reader, and what it had not written then would be lost.
    """
    with open(1, "wb", closefd=False) as output:
        output.write(line + b"\n")
