"""The guardian's calls through Triton: they detect a replica that runs, but doesn't answer.

The module imports only the standard library, as the guardian does.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

__all__ = ["PROBE_FILE", "Probe"]

PROBE_FILE: Final = "probe"
"""File with a complete HTTP request to Triton; the replica writes it into its folder
(`headwater.replica.probe_call`)."""
HTTP_SOCKET: Final = "h"
PAUSE_LOOKS: Final = 20
"""Checks between a call's answer and the next call."""
PATIENCE_LOOKS: Final = 120
"""Checks within which a replica that computes nothing must answer a call. Checks are counted instead of time: a pause
of the machine, or a machine too busy to run the guardian, is no sign of a broken replica."""
RETRY_LOOKS: Final = 5
"""Checks between a failed call and the next call."""
REFUSALS: Final = 5
"""Consecutive calls that fail immediately after which the replica counts as broken."""


class Probe:
    """Calls one replica repeatedly, and never blocks; the guardian calls `look` at equal intervals.

    Args:
        directory: the replica's folder. A replica that doesn't support such calls has no `PROBE_FILE` in it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket: socket.socket | None = None
        """The connection of a call that is not answered yet."""
        self._is_connected = False
        self._unsent = b""
        self._looks = 0
        """Checks since the current call began, or since the last call ended."""
        self._refusals = 0
        """Failed calls since the last answered call."""

    def look(self, *, is_busy: bool) -> str | None:
        """Return why the replica is broken; None if it isn't, as far as is known.

        Args:
            is_busy: whether a call of the user's code is in progress; the probe's call waits for it.
        """
        self._looks += 1
        if self._socket is None:
            if self._looks < (RETRY_LOOKS if self._refusals else PAUSE_LOOKS):
                return None
            self._looks = 0
            try:
                self._unsent = (self._directory / PROBE_FILE).read_bytes()
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError:  # there is no such file, or the guardian lacks descriptors
                return None
        try:
            answer = self._exchange(self._socket)
        except (ConnectionError, FileNotFoundError) as error:
            return self._refuse(str(error))
        except OSError:  # no answer yet, or the socket's backlog is full
            self._looks = 0 if is_busy else self._looks
            if self._looks < PATIENCE_LOOKS:
                return None
            self.close()
            return "it does not answer: a call of its guardian through Triton got no answer, and it did not compute"
        line = answer.partition(b"\r\n")[0].decode("latin-1")
        if line.split(" ")[1:2] != ["200"]:
            return self._refuse(line or "the connection was closed")
        self.close()
        self._refusals = 0
        return None

    def close(self) -> None:
        """Abort a call in progress."""
        self._looks = 0
        self._is_connected = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, connection: socket.socket) -> bytes:
        """Continue to connect and to send. Returns the beginning of the answer; empty if the connection was closed.

        Raises:
            OSError: the call failed, or can't continue yet (`BlockingIOError`).
        """
        if not self._is_connected:
            connection.connect(str(self._directory / HTTP_SOCKET))
            self._is_connected = True
        while self._unsent:
            self._unsent = self._unsent[connection.send(self._unsent) :]
        return connection.recv(4096)

    def _refuse(self, reason: str) -> str | None:
        self.close()
        self._refusals += 1
        if self._refusals < REFUSALS:
            return None
        return f"it does not answer: {REFUSALS} calls of its guardian through Triton failed, the last: {reason}"
