"""The guardian's own calls through Triton: they find a replica that runs, and answers nothing.

It imports the standard library only, as the guardian does.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

__all__ = ["PROBE_FILE", "Probe"]

PROBE_FILE: Final = "probe"
"""A whole HTTP request to Triton, written by the replica into its folder (`headwater.replica.probe_call`)."""
HTTP_SOCKET: Final = "h"
PAUSE_LOOKS: Final = 20
"""Looks between a call's answer and the next call."""
PATIENCE_LOOKS: Final = 120
"""A replica that computes nothing answers a call within so many looks. Looks are counted, not time: a machine that is
paused, or too busy for the guardian, is no sign of a replica that is out of order."""
RETRY_LOOKS: Final = 5
"""Looks between a call that failed and the next one."""
REFUSALS: Final = 5
"""So many calls in a row that failed at once mean that the replica is out of order."""


class Probe:
    """Calls one replica again and again, and never waits; `look` is to be called at equal intervals.

    Args:
        directory: the replica's folder. A replica that can't be called so has no `PROBE_FILE` in it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket: socket.socket | None = None
        """The connection of a call that is not answered yet."""
        self._is_connected = False
        self._unsent = b""
        self._looks = 0
        """Since the call began, or since the last one ended."""
        self._refusals = 0
        """How many calls have failed since one was answered."""

    def look(self, *, is_busy: bool) -> str | None:
        """Why the replica is out of order; None if it isn't, as far as known.

        Args:
            is_busy: whether a call of the user's code is under way, for which the probe's call waits.
        """
        self._looks += 1
        if self._socket is None:
            if self._looks < (RETRY_LOOKS if self._refusals else PAUSE_LOOKS):
                return None
            self._looks = 0
            try:
                self._unsent = (self._directory / PROBE_FILE).read_bytes()
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError:  # no such file, or the guardian's own trouble
                return None
        try:
            answer = self._exchange(self._socket)
        except (ConnectionError, FileNotFoundError) as error:
            return self._refuse(str(error))
        except OSError:  # no answer yet, or too many connect at once
            self._looks = 0 if is_busy else self._looks
            if self._looks < PATIENCE_LOOKS:
                return None
            self.close()
            return "it answers nothing: a call of its guardian's through Triton got no answer, and it computed nothing"
        line = answer.partition(b"\r\n")[0].decode("latin-1")
        if line.split(" ")[1:2] != ["200"]:
            return self._refuse(line or "the connection was closed")
        self.close()
        self._refusals = 0
        return None

    def close(self) -> None:
        """End a call that is under way."""
        self._looks = 0
        self._is_connected = False
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, connection: socket.socket) -> bytes:
        """Connect and send as far as that has not been done, and return the answer's beginning."""
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
        return f"it answers nothing: {REFUSALS} calls of its guardian's through Triton failed, the last: {reason}"
