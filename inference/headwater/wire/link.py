"""Messages between two processes of a replica, over a socket. Each message is a length and a MessagePack document."""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import Final, TypeVar

import msgspec

__all__ = ["Link"]

_LENGTH: Final = struct.Struct("<Q")

T = TypeVar("T")


class Link:
    """One end of a socket.

    Args:
        fd: the socket's descriptor. It is made non-inheritable, so that no program started later keeps the socket open.
    """

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._file = self._socket.makefile("rb")

    def send(self, message: msgspec.Struct) -> None:
        """Send a message.

        Raises:
            OSError: the process at the other end has ended.
        """
        data = msgspec.msgpack.encode(message)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive_descriptor(self) -> int:
        """Wait for a descriptor that is sent with a single byte, before the first message.

        Raises:
            OSError: the process at the other end has ended.
        """
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not descriptors:
            raise ConnectionResetError("the other end was closed")
        return descriptors[0]

    def wait(self) -> None:
        """Wait until a message arrives, or the process at the other end has ended."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def receive(self, kind: type[T]) -> T:
        """Wait for a message of this type.

        Raises:
            OSError: the process at the other end has ended.
            msgspec.DecodeError: the message is of another type.
        """
        head = self._file.read(_LENGTH.size)
        data = self._file.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else b""
        if not data:
            raise ConnectionResetError("the other end was closed")
        return msgspec.msgpack.decode(data, type=kind)

    def close(self) -> None:
        """Close this end."""
        self._file.close()
        self._socket.close()
