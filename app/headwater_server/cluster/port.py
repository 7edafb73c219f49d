"""A replica's port: the address at which gateway workers on any machine reach a replica whose sockets are on this
machine.

``POST /v2/models/NAME/infer`` with the replica's token goes to its Triton. With ``Headwater-Segment: INPUT_BYTES
SIZE_BYTES`` the body begins with INPUT_BYTES bytes for a segment of this machine (`headwater.wire.shared_memory`), and
the bytes that the replica left in the segment follow Triton's answer. ``POST /segment`` has only the inputs' bytes,
for a call over gRPC, and is answered with the segment's path. gRPC is relayed byte by byte; Triton checks its token.
Gateways' requests to a replica without Triton are relayed after a check of each token. ``GET /control`` is answered
with 101; after that `OnControl` handles the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final

from headwater_server.cluster.port_connection import HEAD_TIMEOUT_S, READ_BYTES, PortConnection
from headwater_server.cluster.request_head import Refusal
from headwater_server.control.routing import ReplicaRoute
from headwater_server.errors import ConfigError
from headwater_server.security.peer_tls import PeerTls
from headwater_server.transport.address import keep_alive
from headwater_server.transport.segments import SegmentFiles

__all__ = ["OnControl", "Port"]

logger = logging.getLogger("headwater.port")

MOST_CONNECTIONS: Final = 1024
"""Limit of connections at once, TLS handshakes included, connections for control left out."""
ACCEPT_RETRY_S: Final = 0.1
"""Seconds to pause after a connection could not be accepted, for example because there are too many open files."""
_SWITCHED: Final = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: headwater-control\r\n\r\n"
_FULL: Final = Refusal("503 Service Unavailable", "connections: the replica has too many", unsent=True)

OnControl = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Port:
    """A replica's port.

    Args:
        name: the deployment's name, which is the model's name in Triton.
        route: the replica's id and token, and the addresses of its unix sockets.
        relayed: see `headwater_server.supervisor.kind_programs.KindProgram.relayed`.
        tls: the cluster's TLS; None: plain text, on a loopback address only.
        on_control: handles a connection that asked for ``/control`` with the token; the port closes it afterwards.
    """

    def __init__(
        self,
        name: str,
        route: ReplicaRoute,
        *,
        relayed: Collection[tuple[str, str]] = (),
        tls: PeerTls | None = None,
        on_control: OnControl,
    ) -> None:
        self.name = name
        self.route = route
        self.relayed = relayed
        self.files = SegmentFiles()
        self.buffer = bytearray(READ_BYTES)
        self.connections: set[PortConnection] = set()
        self._tls = tls
        self._on_control = on_control
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening: set[socket.socket] = set()

    async def start(self, host: str, port: int = 0) -> str:
        """Listen. Returns the address, ``HOST:PORT``.

        Args:
            host: an address of this machine.
            port: the TCP port; 0: any free port.

        Raises:
            OSError: the address can't be listened on.
            ConfigError: other machines could reach the address, and there is no TLS.
        """
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        if self._tls is None and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"cluster.tls: expected a folder with ca.crt, tls.crt and tls.key, since other machines reach replicas "
                f"at {host}, got none; set it, or listen on 127.0.0.1"
            )
        self._listener = socket.create_server(address, family=family, backlog=128)
        self._listener.setblocking(False)
        self._listen()
        number = self._listener.getsockname()[1]
        return f"[{host}]:{number}" if family == socket.AF_INET6 else f"{host}:{number}"

    async def close(self) -> None:
        """End all connections, and stop listening."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for opening in self._opening:
            opening.close()
        self._opening.clear()
        for connection in list(self.connections):
            connection.abort()

    def is_peer(self, transport: asyncio.BaseTransport) -> bool:
        """Whether the other side belongs to the cluster."""
        return self._tls is None or self._tls.is_peer(transport.get_extra_info("peercert"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it ends or the port closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def control(self, transport: asyncio.Transport, first: bytes) -> None:
        """Take over a connection to ``/control``; ``first`` has the bytes that came after the request's head."""
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        reader.feed_data(first)
        writer = asyncio.StreamWriter(transport, protocol, reader, asyncio.get_running_loop())
        writer.write(_SWITCHED)
        self.spawn(self._control(reader, writer))

    async def _control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._on_control(reader, writer)
        except ConnectionError:
            pass  # the other side has gone
        except Exception:
            logger.exception("%s: a connection for control failed", self.route.id)
        finally:
            writer.close()

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # the other side has gone
        except OSError as error:
            logger.warning("%s: can't accept a connection: %s", self.route.id, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener)
            loop.call_later(ACCEPT_RETRY_S, self._listen)
            return
        connection.setblocking(False)
        if len(self.connections) + len(self._opening) < MOST_CONNECTIONS:
            self._opening.add(connection)
            self.spawn(self._open(connection))
            return
        logger.warning("%s: refused a connection: there are %d", self.route.id, MOST_CONNECTIONS)
        if self._tls is None:
            with contextlib.suppress(OSError):
                connection.send(_FULL.encoded())
        connection.close()

    async def _open(self, connection: socket.socket) -> None:
        tls = None if self._tls is None else self._tls.server_context()
        timeout_s = None if tls is None else HEAD_TIMEOUT_S
        try:
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: PortConnection(self), connection, ssl=tls, ssl_handshake_timeout=timeout_s
            )
            keep_alive(transport)
        except OSError as error:  # TLS errors are OSErrors, too
            logger.info("%s: refused a connection: %s", self.route.id, error)
            connection.close()
        self._opening.discard(connection)
