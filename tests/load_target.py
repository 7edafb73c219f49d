"""A small server that load is put on in tests: it answers as late, as wrong or as piecemeal as it is told.

``python -m tests.load_target`` runs one until it is killed; its first line is its address.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import httptools

__all__ = ["INFERRED", "Answer", "Asked", "LoadTarget", "events", "load_target", "model"]

INFERRED = b'{"model_name":"m","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":[1.0]}]}'


class Asked(NamedTuple):
    """One request."""

    number: int
    """Of this route and method, from 1."""
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """How to answer one."""

    body: bytes = INFERRED
    status: int = 200
    delay_s: float = 0.0
    pieces: Sequence[tuple[float, bytes]] = ()
    """Of a chunked answer: each so long after the one before."""
    hangs_up: bool = False
    """Whether the connection ends in the middle of it, without the last chunk or byte."""
    says_nothing: bool = False


class LoadTarget:
    """The server while it runs, in a thread with a loop of its own."""

    def __init__(self, answer: Callable[[Asked], Answer], tls: ssl.SSLContext | None = None) -> None:
        self.answer = answer
        self._tls = tls
        self.url = ""
        self.asked: dict[str, int] = {}
        """Requests by method and path."""
        self.connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> None:
        """Listen on a free port."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    def stop(self) -> None:
        """Listen no more, and end all connections at once."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)

    def close(self) -> None:
        """After which nothing of it is left."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, ssl=self._tls)
        self.url = f"http{'s' if self._tls else ''}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        while self.connections or len(asyncio.all_tasks()) > 1:  # the other tasks accept a connection each
            for connection in list(self.connections):
                connection.abort()
            await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._transport: asyncio.Transport
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body = b""

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._target.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._target.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method, path = self._parser.get_method().decode(), self._url.decode()
        number = self._target.asked.get(f"{method} {path}", 0) + 1
        self._target.asked[f"{method} {path}"] = number
        answer = self._target.answer(Asked(number, method, path, self._headers, self._body))
        if answer.says_nothing:
            return
        loop = asyncio.get_running_loop()
        if not answer.pieces:
            length = len(answer.body) + answer.hangs_up
            head = (
                f"HTTP/1.1 {answer.status} Said\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
            )
            self._write_later(loop, answer.delay_s, head.encode() + answer.body, answer.hangs_up)
            return
        head = f"HTTP/1.1 {answer.status} Said\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        when = answer.delay_s
        self._write_later(loop, when, head.encode())
        for gap, piece in answer.pieces:
            when += gap
            self._write_later(loop, when, b"%x\r\n%b\r\n" % (len(piece), piece))
        self._write_later(loop, when, b"" if answer.hangs_up else b"0\r\n\r\n", answer.hangs_up)

    def _write_later(
        self, loop: asyncio.AbstractEventLoop, delay_s: float, data: bytes, hangs_up: bool = False
    ) -> None:
        def write() -> None:
            self._transport.write(data)
            if hangs_up:
                self._transport.close()

        if delay_s:
            loop.call_later(delay_s, write)
        else:
            write()


def events(*contents: dict[str, Any] | str, gap_s: float = 0.0) -> list[tuple[float, bytes]]:
    """Pieces of an answer, an event each."""
    texts = [content if isinstance(content, str) else json.dumps(content) for content in contents]
    return [(gap_s if place else 0.0, f"data: {text}\n\n".encode()) for place, text in enumerate(texts)]


def model(name: str = "m", **metadata: Any) -> dict[str, Any]:
    """A model's metadata, of one input of one number unless it says more."""
    tensor = {"datatype": "FP32", "shape": [-1, 1]}
    return {"name": name, "versions": ["1"], "platform": "python", "inputs": [{"name": "x", **tensor}],
            "outputs": [{"name": "y", **tensor}], **metadata}  # fmt: skip


@contextlib.contextmanager
def load_target(
    answer: Callable[[Asked], Answer], *models: dict[str, Any], tls: ssl.SSLContext | None = None
) -> Iterator[LoadTarget]:
    """Run one until the block ends.

    Args:
        answer: what to say to a POST.
        models: their metadata; it answers the other routes of the protocol with them.
        tls: for HTTPS.
    """
    known = {one["name"]: one for one in models or (model(),)}

    def say(asked: Asked) -> Answer:
        if asked.method == "POST":
            return answer(asked)
        told: Any
        if asked.path == "/v2":
            told = {"name": "headwater", "version": "1.2.3", "extensions": []}
        elif asked.path == "/v2/repository/index":
            told = [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in known]
        elif (name := asked.path.removeprefix("/v2/models/")) in known:
            told = known[name]
        else:
            return Answer(b'{"error": "unknown"}', 404)
        return Answer(json.dumps(told).encode())

    target = LoadTarget(say, tls)
    target.start()
    try:
        yield target
    finally:
        target.close()


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0, help="seconds")
    parser.add_argument("--fail-every", type=int, default=0, help="0: never")
    options = parser.parse_args()

    def answer(asked: Asked) -> Answer:
        if options.fail_every and asked.number % options.fail_every == 0:
            return Answer(b'{"error": "the fifth, or so"}', 500, options.delay)
        return Answer(delay_s=options.delay)

    with load_target(answer) as target:
        print(target.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
