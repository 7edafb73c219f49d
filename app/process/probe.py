"""The guardian's own calls through Triton: they find a replica that runs, and answers nothing.

It imports the standard library only, as the guardian does.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Final

__all__ = ["PROBE_FILE", "Probe"]

PROBE_FILE: Final = "probe"
"""A whole HTTP request to Triton, written by the replica into its folder (`inference.replica.probe_call`)."""
HTTP_SOCKET: Final = "h"
PAUSE_LOOKS: Final = 20
"""Looks between a call's answer and the next call."""
PATIENCE_LOOKS: Final = 40
"""A replica that computes nothing answers a call within so many looks. Looks are counted, not time: a machine that is
paused, or too busy for the guardian, is no sign of a replica that is out of order."""
REFUSALS: Final = 3
"""So many calls in a row that failed at once mean that the replica is out of order."""
SEND_TIMEOUT_S: Final = 1.0


class Probe:
    """Calls one replica again and again; `look` is to be called at equal intervals.

    Args:
        directory: the replica's folder. A replica that can't be called so has no `PROBE_FILE` in it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._socket: socket.socket | None = None
        """The connection of a call that is not answered yet."""
        self._looks = 0
        """Since the call began, or since the last one ended."""
        self._refusals: list[str] = []
        """Why the last calls failed, since one was answered."""

    def look(self, *, is_busy: bool) -> str | None:
        """Why the replica is out of order; None if it isn't, as far as known.

        Args:
            is_busy: whether a call of the user's code is under way, for which the probe's call waits.
        """
        self._looks += 1
        if self._socket is None:
            if self._looks < PAUSE_LOOKS and not self._refusals:
                return None
            self._looks = 0
            try:
                self._begin((self._directory / PROBE_FILE).read_bytes())
            except FileNotFoundError:
                return None
            except OSError as error:
                return self._refuse(str(error))
            return None
        try:
            answer = self._socket.recv(4096)
        except BlockingIOError:
            self._looks = 0 if is_busy else self._looks
            if self._looks < PATIENCE_LOOKS:
                return None
            self.close()
            return "it answers nothing: a call of its guardian's through Triton got no answer, and it computed nothing"
        except OSError as error:
            return self._refuse(str(error))
        self.close()
        line = answer.partition(b"\r\n")[0].decode("latin-1")
        if line.split(" ")[1:2] != ["200"]:
            return self._refuse(line or "the connection was closed")
        self._refusals.clear()
        return None

    def close(self) -> None:
        """End a call that is under way."""
        self._looks = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _begin(self, request: bytes) -> None:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(SEND_TIMEOUT_S)
            connection.connect(str(self._directory / HTTP_SOCKET))
            connection.sendall(request)
            connection.setblocking(False)
            stack.pop_all()
        self._socket = connection

    def _refuse(self, reason: str) -> str | None:
        self.close()
        self._refusals.append(reason)
        if len(self._refusals) < REFUSALS:
            return None
        return f"it answers nothing: {REFUSALS} calls of its guardian's through Triton failed, the last: {reason}"
