"""Asks language models for token streams, over bare sockets: many at once, and left or not read as a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import psutil

from tests.running import Running, wait_for

__all__ = [
    "Stream", "figures", "is_idle", "left_alone", "open_stream", "run", "text_of", "together", "whole", "worker_of",
]  # fmt: skip

TIMEOUT_S = 60.0

_T = TypeVar("_T")


class Stream:
    """An answer as it comes: server-sent events, or an error's JSON."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        """Those read so far, in order, without the closing ``[DONE]``."""
        self.times: list[float] = []
        """When each was there."""
        self.pings = 0
        self.is_done = False
        """Whether ``[DONE]`` came."""
        self.body = b""
        """Of an answer that isn't a stream."""

    async def begin(self) -> None:
        """Read the head, and if the status isn't 200 all of it."""
        self.status = int((await self._reader.readline()).split(b" ", 2)[1])
        while line := (await self._reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            self.body = await self._reader.read()

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        """The events."""
        async for line in self._lines():
            if line == ": ping":
                self.pings += 1
            elif line == "data: [DONE]":
                self.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                self.events.append(event)
                self.times.append(time.monotonic())
                yield event
            else:
                assert line == "", line

    async def read(self, count: int) -> None:
        """Read so many events with text more."""
        async for event in self:
            count -= bool(text_of([event]))
            if count <= 0:
                return
        raise AssertionError(f"the stream ended early: {self.status} {self.body[:300]!r} {self.events[-2:]}")

    async def rest(self) -> Stream:
        """Read to the end."""
        async for _ in self:
            pass
        return self

    def leave(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()

    def pause(self) -> None:
        """Read nothing more, whatever comes."""
        transport = self._writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

    @property
    def port(self) -> int:
        """The client's own."""
        return int(self._writer.get_extra_info("sockname")[1])

    @property
    def error(self) -> dict[str, Any] | None:
        """What the stream says went wrong."""
        found = [event["error"] for event in self.events if "error" in event]
        assert len(found) <= 1
        return found[0] if found else None

    @property
    def usage(self) -> dict[str, int] | None:
        """As the stream tells."""
        return next((event["usage"] for event in self.events if event.get("usage")), None)

    async def _lines(self) -> AsyncIterator[str]:
        pending = b""
        while size := int(await self._reader.readline() or b"0", 16):
            pending += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            *lines, pending = pending.split(b"\n")
            for line in lines:
                yield line.decode()
        assert not pending


@contextlib.asynccontextmanager
async def open_stream(
    running: Running, path: str, body: dict[str, Any], *, request_id: str = ""
) -> AsyncIterator[Stream]:
    """POST a body; the block starts when the answer's head is there, and at its end the connection is closed."""
    host, _, port = running.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stream = Stream(reader, writer)
    try:
        content = json.dumps(body).encode()
        name = f"X-Request-Id: {request_id}\r\n" if request_id else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n{name}"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await stream.begin()
        yield stream
    finally:
        stream.leave()


async def whole(running: Running, body: dict[str, Any], path: str = "/v1/completions") -> Stream:
    """A stream that is read to its end."""
    told = {"stream": True} if path.startswith("/v1/") else {}
    async with open_stream(running, path, {**body, **told}) as stream:
        return await stream.rest() if stream.status == 200 else stream


async def together(coroutines: Sequence[Coroutine[Any, Any, _T]], at_once: int = 64) -> list[_T]:
    """Await all, so many at a time; their results in order."""
    places = asyncio.Semaphore(at_once)

    async def one(coroutine: Coroutine[Any, Any, _T]) -> _T:
        async with places:
            return await coroutine

    return await asyncio.gather(*map(one, coroutines))


def run(coroutine: Coroutine[Any, Any, _T], timeout_s: float = TIMEOUT_S) -> _T:
    """Run it, but not for ever."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))


def text_of(events: Sequence[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice, of completions or chats."""
    pieces = []
    for event in events:
        for choice in event.get("choices", []):
            if choice["index"] == index:
                pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
    return "".join(pieces)


def worker_of(running: Running, port: int) -> int | None:
    """The process id of the gateway worker that has the connection from a client's port; None: it is over."""
    connections = (
        (worker, one) for worker in running.workers() for one in psutil.Process(worker).net_connections("tcp")
    )
    return next((worker for worker, one in connections if one.raddr and one.raddr.port == port), None)


def figures(running: Running, model: str) -> dict[str, Any]:
    """What the statistics say of a language model."""
    found: dict[str, Any] = running.get(f"/v2/models/{model}/stats").json()["model_stats"][0]["language_model"]
    return found


def is_idle(running: Running, model: str) -> bool:
    """Whether its engine has nothing: no sequence that runs or waits, and nothing of its cache in use."""
    found = figures(running, model)
    return not (found["sequences"]["active"] or found["sequences"]["waiting"] or found["cache_used"])


@contextlib.contextmanager
def left_alone(running: Running, *models: str) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Wait before and after the block until the engines have nothing to do. Gives what asks for their figures."""
    for model in models:
        wait_for(lambda model=model: is_idle(running, model), 30, f"{model} to be idle")  # type: ignore[misc]
    yield lambda model: figures(running, model)
    for model in models:
        wait_for(lambda model=model: is_idle(running, model), 30, f"{model} to be idle again")  # type: ignore[misc]
