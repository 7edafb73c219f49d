"""Connections between processes of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from headwater_server.control.messages import MAX_MESSAGE_BYTES
from headwater_server.security.peer_tls import PeerTls
from headwater_server.transport.address import CONNECT_TIMEOUT_S, host_and_port, keep_alive

__all__ = ["connected", "within"]

T = TypeVar("T")


@contextlib.asynccontextmanager
async def connected(
    address: str, tls: PeerTls | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is closed when the context ends, even if a cancellation arrives just as the connection opens.

    Args:
        address: ``HOST:PORT``.
        tls: the cluster's TLS; None: plain text.

    Raises:
        OSError: the address can't be reached.
        asyncio.TimeoutError: the address does not answer within `CONNECT_TIMEOUT_S`.
    """
    host, port = host_and_port(address)
    context, name = (None, None) if tls is None else (tls.client_context(), tls.server_name)
    opened: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            host, port, ssl=context, server_hostname=name, limit=MAX_MESSAGE_BYTES
        )
        opened.append(writer)
        keep_alive(writer.transport)
        return reader, writer

    try:
        yield await within(CONNECT_TIMEOUT_S, connect())
    finally:
        for writer in opened:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine with a time limit, and return its result. `asyncio.wait_for` before Python 3.12 loses a
    cancellation that arrives just as the coroutine ends; this function doesn't.

    Raises:
        asyncio.TimeoutError: the coroutine is not done in time; it is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()
            await asyncio.wait({task})
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
