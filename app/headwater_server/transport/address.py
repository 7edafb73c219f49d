"""Addresses of replicas, ``unix:PATH`` on this machine and ``HOST:PORT`` on any machine, and connections to them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import anyio

from headwater_server.errors import RETRY_AFTER_LOST_S, ReplicaUnreachable

__all__ = ["LOCAL", "TOKEN_HEADER", "UNSENT_HEADER", "ClientTls", "dial", "host_and_port", "is_local", "keep_alive"]

LOCAL: Final = "unix:"
"""Prefix of a unix socket's address."""
TOKEN_HEADER: Final = "triton-access-token"
"""Header with a replica's access token. The name is Triton's; a replica's port uses it too."""
UNSENT_HEADER: Final = b"headwater-unsent"
"""Header in an answer of a replica's port: the replica did not receive the request, so another replica should get
it."""
CONNECT_TIMEOUT_S: Final = 3.0
"""Seconds to wait for a TCP connection, and for its TLS handshake."""
KEEP_ALIVE_S: Final = (10, 5, 3)
"""Probes of a quiet TCP connection: seconds until the first probe, seconds between probes, and the number of unanswered
probes that end the connection."""


class ClientTls(Protocol):
    """The cluster's TLS, as its clients use it."""

    @property
    def server_name(self) -> str:
        """The DNS name that each certificate of the cluster must contain."""
        ...

    def client_context(self) -> ssl.SSLContext:
        """The TLS context for connections to other machines."""
        ...

    def channel_credentials(self) -> Any:
        """The TLS credentials for gRPC connections to other machines."""
        ...


P = TypeVar("P", bound=asyncio.BaseProtocol)


def is_local(address: str) -> bool:
    """Whether an address is a unix socket's; else it is ``HOST:PORT``."""
    return address.startswith(LOCAL)


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``. An IPv6 host is in brackets, which are removed.

    Raises:
        ValueError: the address is not of this form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address: expected unix:PATH or HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


async def dial(address: str, make: Callable[[], P], tls: ClientTls | None = None) -> P:
    """Connect to a replica.

    Args:
        address: ``unix:PATH`` or ``HOST:PORT``.
        make: makes the connection's protocol.
        tls: the cluster's TLS, used for ``HOST:PORT``; None: plain text.

    Raises:
        ReplicaUnreachable: nobody listens at the address, no connection was made within `CONNECT_TIMEOUT_S`, or the
            listener's certificate can't be trusted.
        ValueError: the address has neither form.
    """
    loop = asyncio.get_running_loop()
    try:
        if is_local(address):
            return (await loop.create_unix_connection(make, address.removeprefix(LOCAL)))[1]
        host, port = host_and_port(address)
        context, name = (None, None) if tls is None else (tls.client_context(), tls.server_name)
        with anyio.fail_after(CONNECT_TIMEOUT_S):  # not asyncio's `wait_for`, which may lose a cancellation
            transport, protocol = await loop.create_connection(make, host, port, ssl=context, server_hostname=name)
    except ssl.SSLError as error:
        message = f"the replica can't be trusted: {error.reason or error}"
        raise ReplicaUnreachable(message, retry_after_s=RETRY_AFTER_LOST_S) from error
    except OSError as error:  # a timeout is an OSError, too
        raise ReplicaUnreachable("the replica ended", retry_after_s=RETRY_AFTER_LOST_S) from error
    keep_alive(transport)
    return protocol


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have the kernel probe a quiet TCP connection, so that it ends when the other machine is gone."""
    tcp_socket = transport.get_extra_info("socket")
    idle_s, every_s, count = KEEP_ALIVE_S
    tcp_socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    tcp_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
