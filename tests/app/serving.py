"""An application behind the worker's own connections, in a test's process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, cast

import uvicorn
from starlette.types import ASGIApp

from headwater_server.gateway.http.bounded_connection import BoundedConnection
from headwater_server.gateway.http.connections import Closable, Connections
from headwater_server.gateway.http.entry import RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.http.tls_handshake import TlsAcceptor
from headwater_server.telemetry.logs import AccessLog

__all__ = ["TIMEOUT_S", "Served", "connect", "serving", "until", "until_closed"]

TIMEOUT_S = 0.3


class Served(NamedTuple):
    """A server in this process."""

    port: int
    connections: set[Any]
    """That it has."""
    places: Connections


@contextlib.asynccontextmanager
async def serving(
    application: ASGIApp,
    limit: int = 100,
    keep_alive_s: int = 75,
    timeout_s: float = TIMEOUT_S,
    access_log: AccessLog | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Served]:
    """Serve an application as a worker does."""
    records = RequestRecords(access_log, StreamLimits())
    connections = Connections(limit)
    connection = functools.partial(
        BoundedConnection, head_timeout_s=timeout_s, connections=connections, records=records
    )
    config = uvicorn.Config(
        cast(Any, application), log_config=None, lifespan="off", ws="none", timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=5, http=cast("type[asyncio.Protocol]", connection),
    )  # fmt: skip
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    listener = socket.create_server(("127.0.0.1", 0))
    await server.startup(sockets=[listener] if tls is None else [])
    accepting: asyncio.Task[None] | None = None
    if tls is not None:

        def with_tls(accepted: Closable) -> asyncio.Protocol:
            return connection(config=config, server_state=server.server_state, app_state={}, accepted=accepted)

        accepting = asyncio.create_task(TlsAcceptor(tls, with_tls, connections, timeout_s).run(listener))
    try:
        yield Served(listener.getsockname()[1], server.server_state.connections, connections)
    finally:
        if accepting is not None:
            accepting.cancel()
        await server.shutdown(sockets=[listener])
        listener.close()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 10)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""

    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 20)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server ends the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.wait_for(reader.read(65536), 10):
            data += piece
    return data
