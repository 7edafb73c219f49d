"""A stand-in for a replica's Triton: an HTTP server on a unix socket that answers what a test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from headwater.signature import Signature, TritonSpec
from headwater.wire.open_requests import OpenRequests
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.route_kinds import TritonKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, State
from headwater_server.triton.relayed_calls import RelayedRequest
from headwater_server.triton.repository_dispatcher import TritonDispatcher
from tests.app.serving import until

__all__ = [
    "INFER", "RelayBench", "RelayedExchange", "TritonStandIn", "answers", "benched", "events", "hangs",
    "repository_route",
]  # fmt: skip

INFER = RelayedRequest("POST", "/v2/models/m/infer", b'{"inputs": []}')
SIGNATURE = Signature("models", (), (), triton=TritonSpec(("m", "n")), idempotent=False)


class RelayedExchange:
    """A request that the stand-in got, and its answer."""

    def __init__(self, head: str, body: bytes, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        line, *lines = head.strip().split("\r\n")
        self.line = line
        self.headers = dict(text.split(": ", 1) for text in lines)
        self.body = body
        self._reader, self.writer = streams

    async def has_left(self) -> None:
        """Wait until the gateway has closed the connection."""
        await until(lambda: self._reader.at_eof() or self._reader.exception() is not None)

    def answer(self, body: bytes = b"{}", status: int = 200, **headers: str) -> None:
        """Answer at once; underscores in the names of headers become hyphens."""
        texts = {"content_type": "application/json", **headers}
        lines = "".join(f"{name.replace('_', '-').title()}: {value}\r\n" for name, value in texts.items())
        head = f"HTTP/1.1 {status} x\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    def begin(self) -> None:
        """Begin a stream of events."""
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        self.writer.write(head)

    def piece(self, data: bytes) -> None:
        """Send a piece of a stream."""
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """End the stream."""
        self.writer.write(b"0\r\n\r\n")

    def lose(self) -> None:
        """The replica ends."""
        self.writer.transport.abort()


RelayScript = Callable[[RelayedExchange], Awaitable[None]]


def answers(body: bytes = b"{}", status: int = 200, **headers: str) -> RelayScript:
    """A script that answers at once."""

    async def script(exchange: RelayedExchange) -> None:
        exchange.answer(body, status, **headers)

    return script


def events(*pieces: bytes) -> RelayScript:
    """A script that sends a stream in these pieces."""

    async def script(exchange: RelayedExchange) -> None:
        exchange.begin()
        for piece in pieces:
            exchange.piece(piece)
        exchange.end()

    return script


async def hangs(exchange: RelayedExchange) -> None:
    """Never answers."""
    await exchange.has_left()


class TritonStandIn:
    """Listens on a unix socket until it is closed; `script` answers each request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script: RelayScript = answers()
        self.exchanges: list[RelayedExchange] = []
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    def close(self) -> None:
        """End, with all connections."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self.path.unlink(missing_ok=True)

    @property
    def is_idle(self) -> bool:
        """Whether there are no connections."""
        return not self._writers

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                    length = next(
                        (int(line[16:]) for line in head.split("\r\n") if line.lower().startswith("content-length: ")),
                        0,
                    )
                    exchange = RelayedExchange(head, await reader.readexactly(length), (reader, writer))
                    self.exchanges.append(exchange)
                    await self.script(exchange)
        finally:
            writer.close()
            self._writers.discard(writer)


def repository_route(replicas: dict[str, TritonStandIn], **fields: Any) -> DeploymentRoute:
    """The deployment ``models``, ready on these replicas."""
    routes = tuple(ReplicaRoute(name, f"unix:{replica.path}", "") for name, replica in replicas.items())
    kind = TritonKind(
        fields.pop("max_requests", 100), fields.pop("header_pattern", ""), fields.pop("load_timeout_s", 60.0)
    )
    values: dict[str, Any] = {"timeout_s": 10.0, "kind": kind, **fields}
    return DeploymentRoute(
        "models", values.pop("state", State.READY), "", values.pop("signature", SIGNATURE), routes, **values
    )


class RelayBench:
    """A dispatcher with stand-ins."""

    def __init__(self, replicas: dict[str, TritonStandIn], folder: str, **fields: Any) -> None:
        self.replicas = replicas
        self.folder = folder
        self.losses: list[ReplicaLoss] = []
        self.dispatcher = TritonDispatcher(
            repository_route(replicas, **fields), on_lost=self.losses.append, open_requests=OpenRequests(folder)
        )

    @property
    def replica(self) -> TritonStandIn:
        """The only replica."""
        (replica,) = self.replicas.values()
        return replica

    def counts(self) -> list[int]:
        """The number of requests that each replica got."""
        return [len(replica.exchanges) for replica in self.replicas.values()]


@contextlib.asynccontextmanager
async def benched(*names: str, **fields: Any) -> AsyncIterator[RelayBench]:
    """A dispatcher with stand-ins of these names, until the block ends; nothing may be in flight then."""
    # Not pytest's own folders: their names are too long for unix sockets.
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        replicas = {name: TritonStandIn(Path(folder, name)) for name in names or ("a",)}
        for replica in replicas.values():
            await replica.open()
        bench = RelayBench(replicas, folder, **fields)
        try:
            yield bench
            assert bench.dispatcher.in_flight == 0
        finally:
            bench.dispatcher.close()
            await until(lambda: all(replica.is_idle for replica in replicas.values()))
            for replica in replicas.values():
                replica.close()
