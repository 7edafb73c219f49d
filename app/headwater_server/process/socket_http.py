"""HTTP requests to a replica's unix socket."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

__all__ = ["ask_socket"]


class _LocalConnection(http.client.HTTPConnection):
    """HTTP on a unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("replica", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask_socket(path: Path, method: str, url: str, body: str | None, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of the answer to a request to the HTTP server at a unix socket.

    Each operation of the socket may take ``timeout_s``. The body of the request is JSON; None: no body.

    Raises:
        OSError, http.client.HTTPException: the server didn't answer.
    """
    connection = _LocalConnection(path, timeout_s)
    try:
        connection.request(method, url, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
