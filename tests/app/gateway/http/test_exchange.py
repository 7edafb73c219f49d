"""A request and its answer on their connection, past ASGI's messages."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from starlette.types import Message, Receive, Scope, Send

from headwater_server.config.schema import Server
from headwater_server.errors import ClientGone
from headwater_server.gateway.app import create_app
from headwater_server.gateway.http.exchange import DisconnectWatch, Exchange, exchange_of
from tests.app.gateway.routes.test_status import served
from tests.app.serving import connect, serving, until, until_closed

ANSWER = b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: %d\r\n%b\r\n%b"

LARGE = 8_000_000
"""More than a kernel takes for a client that reads nothing: sockets may buffer 4 MiB and more."""


class Application:
    """Answers with the request's body, and with the path before it."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.kept: list[Exchange] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        assert exchange is not None
        path = scope["path"]
        if path == "/waits":
            self.kept.append(exchange)
            await self._wait(scope, receive)
            return
        if path in ("/pieces", "/unread-pieces"):
            await self._stream(exchange, send, 50 if path == "/unread-pieces" else 2)
            return
        body = exchange.take_body()
        if body is None:
            self.events.append("in pieces")
            body = await (exchange.gather_body(lambda size, total: None) if path == "/gathers" else _read(receive))
            assert body is not None
        if path == "/reads-and-waits":
            await self._wait(scope, receive)
            return
        if path == "/large":
            body = bytes(LARGE)
        headers = [(b"x-a", b"b\r\nx-c: d" if path == "/forged" else b"b")]
        while not exchange.answer(200, headers, [path.encode(), memoryview(body)]):
            self.events.append("unread")
            await asyncio.sleep(0.01)
        self.kept.append(exchange)
        self.events.append(path)

    async def _stream(self, exchange: Exchange, send: Send, pieces: int) -> None:
        assert not exchange.write(b"too early")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(pieces):
            piece = b"%d" % number + bytes(LARGE // 10 if pieces > 2 else 0)
            if not exchange.write(piece):
                self.events.append("unread")
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        assert not exchange.write(b"too late")
        self.events.append("streamed")

    async def _wait(self, scope: Scope, receive: Receive) -> None:
        try:
            with DisconnectWatch(scope, receive):
                self.events.append("waits")
                await asyncio.Event().wait()
        except ClientGone:
            self.events.append("gone")


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message: Message = await receive()
        piece: bytes = message["body"]
        body += piece
        if not message["more_body"]:
            return body


@pytest.fixture
def application() -> Application:
    return Application()


def post(path: bytes, body: bytes, headers: bytes = b"") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n%b" % (path, headers, len(body), body)


async def test_answers_one_after_the_other_on_one_connection(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        for body in (b"one", b"", b"three" * 50_000):
            writer.write(post(b"/a", body))
            expected = ANSWER % (2 + len(body), b"", b"/a" + body)
            assert await asyncio.wait_for(reader.readexactly(len(expected)), 10) == expected
        writer.close()


async def test_pipelined_requests_are_answered_in_turn(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(b"".join(post(b"/%d" % index, b"x" * index) for index in range(5)))
        for index in range(5):
            expected = ANSWER % (2 + index, b"", b"/%d" % index + b"x" * index)
            assert await asyncio.wait_for(reader.readexactly(len(expected)), 10) == expected
        writer.close()


async def test_an_idle_connection_keeps_nothing_of_its_last_request(application: Application) -> None:
    async with serving(application) as served:
        reader, writer = await connect(served.port)
        writer.write(post(b"/a", b"one"))
        await asyncio.wait_for(reader.readuntil(b"/aone"), 10)
        (connection,) = served.connections
        await until(lambda: connection.cycle is None)
        assert connection.scope is connection.headers is None
        writer.close()


async def test_a_body_that_is_not_here_yet_is_received(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc")
        await until(lambda: application.events == ["in pieces"])
        writer.write(b"def")
        expected = ANSWER % (8, b"", b"/aabcdef")
        assert await asyncio.wait_for(reader.readexactly(len(expected)), 10) == expected
        writer.close()


async def test_a_body_that_is_gathered_ends_where_the_next_request_begins(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /gathers HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc")
        await until(lambda: application.events == ["in pieces"])
        writer.write(b"def" + post(b"/b", b"ghi"))
        expected = ANSWER % (14, b"", b"/gathersabcdef") + ANSWER % (5, b"", b"/bghi")
        assert await asyncio.wait_for(reader.readexactly(len(expected)), 10) == expected
        writer.close()


@pytest.mark.parametrize("end", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nConnection: close\r\n"])
async def test_the_last_answer_says_so_and_ends_the_connection(application: Application, end: bytes) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /a " + end + b"Host: x\r\nContent-Length: 1\r\n\r\nz")
        assert await until_closed(reader) == ANSWER % (3, b"connection: close\r\n", b"/az")
        writer.close()


async def test_no_header_passes_for_two(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(post(b"/forged", b""))
        answer = await until_closed(reader)
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"x-c" not in answer
        writer.close()
    assert application.events == []


async def test_a_client_that_leaves_ends_the_work_at_once(application: Application) -> None:
    async with serving(application) as server:
        _, writer = await connect(server.port)
        writer.write(post(b"/waits", b"x"))
        await until(lambda: application.events == ["waits"])
        writer.transport.abort()
        await until(lambda: application.events == ["waits", "gone"])
        assert application.kept[0].task is None


async def test_one_that_leaves_after_a_large_body_does_too(application: Application) -> None:
    async with serving(application) as server:
        _, writer = await connect(server.port)
        writer.write(post(b"/reads-and-waits", bytes(100_000)))
        await until(lambda: "waits" in application.events)
        writer.transport.abort()
        await until(lambda: application.events[-1] == "gone")


async def test_pieces_are_chunks_of_the_answer_that_send_began(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        for _ in range(2):
            writer.write(post(b"/pieces", b""))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            assert b"transfer-encoding: chunked" in head
            assert await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10) == b"1\r\n0\r\n1\r\n1\r\n0\r\n\r\n"
        writer.close()
    assert application.events == ["streamed", "streamed"]


async def test_pieces_wait_for_a_client_that_does_not_read(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(post(b"/unread-pieces", b"", b"Connection: close\r\n"))
        await until(lambda: "unread" in application.events)
        assert "streamed" not in application.events
        body = await until_closed(reader)
        assert body.count(b"\0") == 5 * LARGE
        assert body.endswith(b"\r\n0\r\n\r\n")
        writer.close()
    assert application.events[-1] == "streamed"


async def test_a_client_that_reads_late_is_waited_for(application: Application) -> None:
    async with serving(application, timeout_s=20) as server:
        reader, writer = await connect(server.port)
        writer.write(post(b"/large", b"") * 2)
        await until(lambda: "unread" in application.events)
        expected = 2 * len(ANSWER % (LARGE + 6, b"", bytes(LARGE + 6)))
        assert len(await asyncio.wait_for(reader.readexactly(expected), 20)) == expected
        writer.close()


TENSOR = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'


@pytest.mark.parametrize(
    ("model", "body", "status"),
    [("unknown", b"", 404), ("m", b"{", 400), ("m", TENSOR, 500)],
    ids=["no model", "no JSON", "a replica that fails"],
)
def test_what_has_failed_holds_nothing(model: str, body: bytes, status: int) -> None:
    class Mark:
        pass

    async def ask() -> weakref.ref[Mark]:
        sent = list[Message]()

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            sent.append(message)

        mark = Mark()
        scope = {
            "type": "http", "method": "POST", "path": f"/v2/models/{model}/infer", "query_string": b"", "headers": [],
            "mark": mark,
        }  # fmt: skip
        gateway = create_app(served(), Server(access_log=False))
        await gateway(scope, receive, send)
        assert sent[0]["status"] == status
        return weakref.ref(mark)

    gc.disable()
    try:
        assert asyncio.run(ask())() is None
    finally:
        gc.enable()


async def test_what_is_answered_holds_nothing(application: Application) -> None:
    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(post(b"/a", b"x"))
        await asyncio.wait_for(reader.readuntil(b"/ax"), 10)
        (exchange,) = application.kept
        assert (exchange.task, exchange.on_gone) == (None, None)
        writer.close()
