"""The control socket: the supervisor's end, which tells gateway workers the routing table, and the workers' end.

One JSON line per message. Downwards: `RoutingTable`. Upwards: nothing but the connection, whose end tells the
supervisor that a worker is gone, and a worker that its supervisor is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from app.routing import RoutingTable

__all__ = ["ControlServer", "receive_tables"]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class ControlServer:
    """The supervisor's end."""

    def __init__(self) -> None:
        self._table = RoutingTable()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self, path: Path) -> None:
        """Listen on a unix socket; its folder must be closed to others (0700)."""
        self._server = await asyncio.start_unix_server(self._serve, path)

    def publish(self, table: RoutingTable) -> None:
        """Send the table to every worker, and to those that come later."""
        self._table = table
        line = msgspec.json.encode(table) + b"\n"
        for writer in self._writers:
            writer.write(line)

    async def close(self) -> None:
        """Stop listening and end all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            writer.write(msgspec.json.encode(self._table) + b"\n")
            await reader.read()  # ends when the worker does
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def receive_tables(path: Path) -> AsyncGenerator[RoutingTable, None]:
    """A worker's end: yield each table as it comes; ends when the supervisor does."""
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)
    try:
        while line := await reader.readline():
            yield msgspec.json.decode(line, type=RoutingTable)
    except ConnectionError:
        return
    finally:
        writer.close()
