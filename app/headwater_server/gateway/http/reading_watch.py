"""Notices clients that read nothing of an answer."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios

__all__ = ["ReadingWatch"]


class ReadingWatch:
    """Aborts a connection if its client reads nothing of an answer for a while.

    Args:
        transport: the connection.
        timeout_s: how long the client may read nothing, in seconds; at most twice as long passes until the abort.
    """

    __slots__ = ("_timeout_s", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Watch the client until it has read all data, unless it is watched already."""
        if self._timer is None:
            self._look(None)

    def cancel(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self, unread_before: int | None) -> None:
        """Abort the connection if its client has read nothing since the last check; else check again later, while data
        wait. Closing the connection in order would wait for the client, too.

        Args:
            unread_before: the bytes that the client had not read at the last check; None: this is the first check.
        """
        self._timer = None
        waiting = self._transport.get_write_buffer_size()
        unread = waiting + _unacknowledged(self._transport)
        if waiting and unread == unread_before:
            self._transport.abort()
        elif waiting:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._look, unread)


def _unacknowledged(transport: asyncio.Transport) -> int:
    """The number of bytes in the kernel that the client has not acknowledged.

    They show that a slow client reads, because the kernel takes more data from the process only in large steps.
    """
    try:
        raw_count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
    except OSError:
        return 0
    return int.from_bytes(raw_count, sys.byteorder)
