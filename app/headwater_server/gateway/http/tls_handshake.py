"""Connections with TLS, until their handshakes are done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final

from headwater_server.gateway.http.connections import Closable, Connections

__all__ = ["TlsAcceptor"]

logger = logging.getLogger("headwater")

HANDSHAKE_TIMEOUT_S: Final = 5.0
REPORT_AFTER_S: Final = 1.0
ACCEPT_AGAIN_S: Final = 1.0


class HandshakeFaults:
    """Logs failed handshakes: a single line for all failures within a second, since anybody can cause them."""

    def __init__(self) -> None:
        self._count = 0
        self._last = ""

    def note(self, fault: str) -> None:
        """Note a failed handshake."""
        if not self._count:
            asyncio.get_running_loop().call_later(REPORT_AFTER_S, self._report)
        self._count += 1
        self._last = fault

    def _report(self) -> None:
        count, self._count = self._count, 0
        logger.warning("TLS: %d handshakes did not succeed; the last one: %s", count, self._last)


class Accepted:
    """A connection that was accepted and has not completed its handshake."""

    def __init__(self, socket: socket.socket) -> None:
        self._socket = socket

    def abort(self) -> None:
        """See `headwater_server.gateway.http.connections.Closable`. The end of the connection makes the handshake
        fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


class TlsAcceptor:
    """Accepts connections with TLS, and counts each connection from that moment.

    asyncio's servers call a protocol only after the handshake, so a connection without a handshake would not be
    counted.

    Args:
        context: TLS context with the certificate.
        make: makes the protocol that reads requests, given the `Accepted` that counted for its connection so far.
        connections: the connections of this worker.
        timeout_s: how long a handshake may take, in seconds.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        make: Callable[[Closable], asyncio.Protocol],
        connections: Connections,
        timeout_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._context = context
        self._make = make
        self._others = connections
        self._timeout_s = timeout_s
        self._faults = HandshakeFaults()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # the process has too many open files, or the client is gone
                logger.warning("TLS: a connection can't be accepted: %s", error.strerror)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            task = loop.create_task(self._shake_hands(accepted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        connection = Accepted(accepted)
        self._others.add(connection)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._make(connection), accepted, ssl=self._context, ssl_handshake_timeout=self._timeout_s
            )
        except OSError as error:  # includes ssl.SSLError
            self._faults.note(str(error) or type(error).__name__)
            accepted.close()
        finally:
            self._others.remove(connection)
