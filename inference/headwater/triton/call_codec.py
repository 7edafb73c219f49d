"""The messages between the bridge in Triton's stub (`stub_bridge`) and the host of a ``model.py`` (`model_host`).

They are framed as in `headwater.wire.bridge`: a head, JSON, and the bytes of the tensors that the JSON describes. The
modules of this package run in Triton's stub and in the user's Python: they import only the standard library, numpy and
`headwater.wire.bridge`.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.wire.bridge import HEAD, describe, message, read_body, read_tensors

__all__ = ["BFLOAT16", "CODES", "Disconnected", "Frames", "Received", "Told", "read_request", "request_content"]

CODES: Final = (
    "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED",
)  # fmt: skip
"""Names of the codes of errors, in the order of ``TRITONSERVER_Error_Code``."""
BFLOAT16: Final = "bfloat16"
"""The dtype of a tensor that numpy has no type for; its bytes travel as UINT16."""

Told = tuple[str, np.ndarray[Any, np.dtype[Any]]]
"""A tensor's name and array."""


class Disconnected(ConnectionError):
    """The other process has ended, or has closed the connection."""


class Received(NamedTuple):
    """A message's JSON and the tensors that follow it."""

    content: Any
    body: memoryview
    start: int
    """Offset of the first tensor's bytes in ``body``."""


class Frames:
    """One end of a connection. Any thread may send; a single thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = io.BufferedReader(connection.makefile("rb", 0), 1 << 16)
        self._lock = threading.Lock()

    def send(self, content: Any, data: Iterable[bytes | memoryview] = ()) -> None:
        """Send JSON and the bytes of the tensors that it describes.

        Raises:
            Disconnected: the other end is closed.
        """
        pieces = message(0, content, list(data))
        try:
            with self._lock:
                for piece in pieces:
                    self._connection.sendall(piece)
        except OSError as error:
            raise Disconnected(str(error)) from error

    def receive(self) -> Received:
        """Wait for the next message.

        Raises:
            Disconnected: the other end is closed.
        """
        try:
            head = self._file.read(HEAD.size)
            if len(head) == HEAD.size:
                call, length, more = HEAD.unpack(head)
                body = np.empty(length + more, np.uint8).data  # bytearray() would fill it with zeros
                if self._file.readinto(body) == len(body):
                    received = read_body(call, body, length)
                    return Received(received.content, body, received.start)
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            raise Disconnected(str(error)) from error
        raise Disconnected("the connection was closed")

    def close(self) -> None:
        """Close the connection; a `receive` under way ends."""
        with contextlib.suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def request_content(
    inputs: Iterable[Told], data: list[bytes | memoryview], wanted: Iterable[str], about: Mapping[str, Any]
) -> list[Any]:
    """The JSON of a request. The bytes of its inputs are appended to ``data``."""
    return [describe(inputs, data), list(wanted), about]


def read_request(content: list[Any], body: memoryview, start: int) -> tuple[list[Told], list[str], dict[str, Any], int]:
    """The inputs, the wanted outputs and the properties of a request, and the offset at which its last input ends."""
    described, wanted, about = content
    inputs, start = read_tensors(described, body, start)
    return inputs, wanted, about, start
