"""A stand-in for vLLM: a server on a unix socket that answers what a test has it say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from headwater.signature import VllmSpec, text_signature
from headwater_server.control.route_kinds import VllmKind
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, State
from headwater_server.vllm.relay import Relay
from headwater_server.vllm.requests import VllmRequest, read_request
from headwater_server.vllm.vllm_model import VllmDispatcher
from tests.app.serving import until

__all__ = [
    "POOLING", "SIGNATURE", "Bench", "Exchange", "StandIn", "benched", "chunk", "completion", "cuts", "embeddings",
    "error", "request", "route_of", "says", "stand_ins", "usage",
]  # fmt: skip

SIGNATURE = text_signature(
    "m", Path("m"), vllm=VllmSpec(max_sequences=8, context_length=64, cache_tokens=1000, version="0")
)
POOLING = text_signature(
    "m",
    Path("m"),
    vllm=VllmSpec(max_sequences=8, context_length=64, cache_tokens=0, version="0", max_requests=10, embedding_length=2),
)
"""Of a model that gives embeddings of two numbers, and takes ten inputs at once."""


def chunk(
    text: str, tokens: int, index: int = 0, finish: str | None = None, prompt: int = 3, **more: Any
) -> dict[str, Any]:
    """A chunk of ``/v1/completions`` after so many tokens of a choice, as vLLM writes it."""
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None, **more}
    counted = {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}
    return {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [choice],
            "usage": counted}  # fmt: skip


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    """The chunk with the usage."""
    counted = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"id": "cmpl-1", "object": "text_completion", "created": 7, "model": "m", "choices": [],
            "usage": counted | details}  # fmt: skip


def completion(*texts: str, tokens: int = 2, finish: str = "stop") -> dict[str, Any]:
    """A whole answer of ``/v1/completions``."""
    choices = [
        {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None,
         "token_ids": None, "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
        for index, text in enumerate(texts)
    ]  # fmt: skip
    return {**usage(3, tokens * len(texts), 1), "choices": choices, "kv_transfer_params": None, "service_tier": None}


def embeddings(exchange: Exchange) -> dict[str, Any]:
    """An answer of ``/v1/embeddings``: of a text its length, of token ids their sum; one token an input."""
    asked = exchange.body["input"]
    inputs = [asked] if isinstance(asked, str) or isinstance(asked[0], int) else asked
    found = [float(len(one) if isinstance(one, str) else sum(one)) for one in inputs]
    data = [{"index": n, "object": "embedding", "embedding": [one, 0.5]} for n, one in enumerate(found)]
    counted = {"prompt_tokens": len(data), "total_tokens": len(data), "completion_tokens": 0}
    return {"id": "embd-1", "object": "list", "created": 7, "model": "m", "data": data,
            "usage": {**counted, "prompt_tokens_details": None}}  # fmt: skip


def error(message: str, code: int = 400, param: str | None = None) -> dict[str, Any]:
    """An error's body."""
    return {"error": {"message": message, "type": "Error", "param": param, "code": code}}


class Exchange:
    """One request that the stand-in got, and its answer."""

    def __init__(self, path: str, headers: dict[str, str], body: Any, streams: tuple[Any, Any]) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self._reader: asyncio.StreamReader = streams[0]
        self.writer: asyncio.StreamWriter = streams[1]

    @property
    def is_left(self) -> bool:
        """Whether the gateway has closed the connection."""
        return self._reader.at_eof() or self._reader.exception() is not None

    async def left(self) -> None:
        """Wait until the gateway closes the connection."""
        await until(lambda: self.is_left)

    def whole(self, body: Any, status: int = 200) -> None:
        """Answer at once."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(raw), raw))

    def begin(self) -> None:
        """Begin a stream."""
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    def event(self, data: Any, name: str = "") -> None:
        """Send an event, in a piece of its own."""
        raw = data if isinstance(data, bytes) else json.dumps(data, separators=(",", ":")).encode()
        raw = (f"event: {name}\n".encode() if name else b"") + b"data: %b\n\n" % raw
        self.writer.write(b"%x\r\n%b\r\n" % (len(raw), raw))

    def end(self, *, done: bool = True) -> None:
        """End the stream."""
        if done:
            self.event(b"[DONE]")
        self.writer.write(b"0\r\n\r\n")

    def lose(self) -> None:
        """The replica ends."""
        self.writer.transport.abort()


Script = Callable[[Exchange], Awaitable[None]]


def says(*events: Any, status: int = 200, done: bool = True) -> Script:
    """A script: a stream of these events, or with another status an error's body."""

    async def script(exchange: Exchange) -> None:
        if status != 200:
            exchange.whole(events[0], status)
            return
        exchange.begin()
        for one in events:
            exchange.event(*one) if isinstance(one, tuple) else exchange.event(one)
        exchange.end(done=done)

    return script


class StandIn:
    """Listens on a unix socket until it is closed; `script` answers each request."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.script: Script = says(chunk("a", 1), chunk("b", 2, finish="stop"), usage(3, 2))
        self.metrics = b""
        self.exchanges: list[Exchange] = []
        self.connections = 0
        """That were made, in all."""
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, self.path)

    def close(self) -> None:
        """End, with all connections."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self.path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, TimeoutError):
                while True:
                    head = (await reader.readuntil(b"\r\n\r\n")).decode()
                    line, *lines = head.strip().split("\r\n")
                    headers = dict(one.lower().split(": ", 1) for one in lines)
                    raw = await reader.readexactly(int(headers.get("content-length", 0)))
                    path = line.split(" ")[1]
                    exchange = Exchange(path, headers, json.loads(raw) if raw else None, (reader, writer))
                    if path == "/metrics":
                        exchange.whole(self.metrics)
                    else:
                        self.exchanges.append(exchange)
                        await self.script(exchange)
        finally:
            writer.close()
            self._writers.discard(writer)


@contextlib.asynccontextmanager
async def stand_ins(*names: str) -> AsyncIterator[dict[str, StandIn]]:
    """Stand-ins by name, until the block ends."""
    # Not pytest's own folders: their names are too long for unix sockets.
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        found = {name: StandIn(Path(folder, name)) for name in names}
        for one in found.values():
            await one.open()
        try:
            yield found
        finally:
            for _ in range(5):  # turns in which who has just connected is accepted
                await asyncio.sleep(0)
            for one in found.values():
                one.close()


def route_of(replicas: dict[str, StandIn], **fields: Any) -> DeploymentRoute:
    """The deployment ``m``, ready on these replicas."""
    routes = tuple(ReplicaRoute(name, f"unix:{one.path}", "") for name, one in replicas.items())
    kind = VllmKind(fields.pop("adapters", {}), fields.pop("prefix_affinity", 0), fields.pop("media_hosts", ()))
    told: dict[str, Any] = {"timeout_s": 10.0, "kind": kind, **fields}
    return DeploymentRoute("m", State.READY, "", told.pop("signature", SIGNATURE), routes, **told)


class Bench:
    """A dispatcher with stand-ins."""

    def __init__(self, replicas: dict[str, StandIn], **fields: Any) -> None:
        self.replicas = replicas
        self.begun: list[tuple[Relay, Any]] = []
        """Requests, and their events, which must be kept until the test's end."""
        self.dispatcher = VllmDispatcher(route_of(replicas, **fields))

    def leave(self) -> None:
        """Close what is under way."""
        for relay, _ in self.begun:
            relay.close()

    @property
    def replica(self) -> StandIn:
        (replica,) = self.replicas.values()
        return replica

    @property
    def exchanges(self) -> list[Exchange]:
        """All requests that came."""
        return [exchange for one in self.replicas.values() for exchange in one.exchanges]


def request(**body: Any) -> VllmRequest:
    """For a stream of completions."""
    return read_request("completions", {"model": "m", "prompt": "x", "stream": True, **body})


@contextlib.asynccontextmanager
async def benched(*names: str, **fields: Any) -> AsyncIterator[Bench]:
    """A dispatcher with stand-ins of these names, until the block ends; nothing must be under way then."""
    async with stand_ins(*(names or ("a",))) as replicas:
        bench = Bench(replicas, **fields)
        try:
            yield bench
            assert bench.dispatcher.in_flight == 0
        finally:
            bench.dispatcher.close()


def cuts(data: bytes, places: list[int]) -> Iterator[bytes]:
    """The bytes, cut at these places."""
    for start, end in zip([0, *places], [*places, len(data)], strict=True):
        yield data[start:end]


async def hangs(exchange: Exchange) -> None:
    """Says one thing, and then nothing."""
    exchange.begin()
    exchange.event(chunk("a", 1))
    await exchange.left()
