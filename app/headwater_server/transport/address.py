"""Addresses of replicas, ``unix:PATH`` on this machine and ``HOST:PORT`` on any, and connections to them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import anyio

from headwater_server.errors import RETRY_AFTER_LOST_S, ReplicaUnreachable

__all__ = ["LOCAL", "TOKEN_HEADER", "UNSENT_HEADER", "PeerTls", "dial", "host_and_port", "is_local", "keep_alive"]

LOCAL: Final = "unix:"
"""Begins the address of a unix socket."""
TOKEN_HEADER: Final = "triton-access-token"
"""Carries a replica's token: Triton's own name for it, which a replica's port takes too."""
UNSENT_HEADER: Final = b"headwater-unsent"
"""In an answer of a replica's port: the replica did not get the request, and another one should."""
CONNECT_TIMEOUT_S: Final = 3.0
KEEP_ALIVE_S: Final = (10, 5, 3)
"""Of a quiet TCP connection: seconds until the first probe and between probes, and how many may stay unanswered."""


class PeerTls(Protocol):
    """The TLS of the cluster, as clients need it."""

    @property
    def server_name(self) -> str:
        """The name that each certificate must have."""
        ...

    def client_context(self) -> ssl.SSLContext:
        """For connections to other machines."""
        ...

    def channel_credentials(self) -> Any:
        """The same for gRPC."""
        ...


P = TypeVar("P", bound=asyncio.BaseProtocol)


def is_local(address: str) -> bool:
    """Whether an address is a unix socket's."""
    return address.startswith(LOCAL)


def host_and_port(address: str) -> tuple[str, int]:
    """Split ``HOST:PORT``; an IPv6 host is in brackets.

    Raises:
        ValueError: it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"address: expected unix:PATH or HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


async def dial(address: str, make: Callable[[], P], tls: PeerTls | None = None) -> P:
    """Connect to a replica.

    Args:
        address: ``unix:PATH`` or ``HOST:PORT``.
        make: makes the connection's protocol.
        tls: the cluster's, for ``HOST:PORT``; None: plain text.

    Raises:
        ReplicaUnreachable: nobody listens there, or what does is not to be trusted.
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
    except OSError as error:  # a timeout is one
        raise ReplicaUnreachable("the replica ended", retry_after_s=RETRY_AFTER_LOST_S) from error
    keep_alive(transport)
    return protocol


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Have a quiet TCP connection probed, so that it ends if the other machine is gone."""
    found = transport.get_extra_info("socket")
    idle_s, every_s, count = KEEP_ALIVE_S
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle_s)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
