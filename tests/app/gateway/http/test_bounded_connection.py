"""Connections: what clients may do with them that the application never sees."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import socket
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater_server.errors import ClientGone
from headwater_server.gateway.http.connections import SPARE_PLACES
from headwater_server.gateway.http.event_stream import PING, EventStream, StreamLimits
from headwater_server.gateway.http.exchange import EXTENSION, DisconnectWatch, exchange_of
from headwater_server.telemetry.logs import AccessLog
from tests.app.serving import TIMEOUT_S, connect, serving, until, until_closed


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with as many bytes as the path says, and reads the body first where the query says so."""
    while scope["query_string"] == b"read":
        if not (await receive()).get("more_body"):
            break
    body = bytes(int(scope["path"][1:]))
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


GET = b"GET /2 HTTP/1.1\r\nHost: x\r\n\r\n"


served = functools.partial(serving, application)


async def test_each_ends_with_its_next_answer_when_clients_are_to_go_elsewhere() -> None:
    async def in_pieces(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for is_last in (False, True):
            await send({"type": "http.response.body", "body": b"x", "more_body": not is_last})

    async def at_once(scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"][EXTENSION].answer(200, [], [b"x"])

    answer: ASGIApp
    for answer in (application, in_pieces, at_once):
        async with serving(answer) as server:
            reader, writer = await connect(server.port)
            writer.write(GET)
            assert b"connection: close" not in await reader.readuntil(b"\r\n\r\n")
            server.places.is_closing = True
            writer.write(GET)
            assert (await until_closed(reader)).count(b"connection: close") == 1
            writer.close()


async def test_idle_connections_keep_nobody_out() -> None:
    async with served(limit=3) as server:
        held = [await connect(server.port) for _ in range(3)]
        for _, writer in held:
            writer.write(b"GET / HT")  # a head that is not complete is idle, too
        for _ in range(3):
            reader, writer = await connect(server.port)
            writer.write(GET)
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            held.append((reader, writer))
        assert [await until_closed(reader) for reader, _ in held[:3]] == [b"", b"", b""]
        for _, writer in held:
            writer.close()


async def test_a_body_that_is_sent_on_after_the_answer_is_read_for_a_while_only() -> None:
    async with served() as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        closed = asyncio.create_task(until_closed(reader))
        while not closed.done():
            writer.write(b"x")
            await asyncio.wait([closed], timeout=0.05)
        assert b" 200 " in await closed
        writer.close()


@pytest.mark.slow
async def test_a_body_that_ends_after_the_answer_leaves_the_connection_good() -> None:
    async with served() as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /0 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.write(b"12345")
        # Longer than what a body may take after its answer, had it not ended.
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), 3 * TIMEOUT_S)
        writer.write(GET)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.close()


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
async def test_an_answer_that_nobody_reads_is_given_up(header: bytes) -> None:
    async with served() as server:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"GET /50000000 HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
            await until(lambda: len(server.connections) == 1)
            await until(lambda: not server.connections)


@pytest.mark.slow
async def test_an_answer_that_is_read_slowly_arrives() -> None:
    async with served(timeout_s=1) as server:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"GET /8000000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            began_s, size = loop.time(), 0
            while piece := await asyncio.wait_for(loop.sock_recv(client, 65536), 10):
                size += len(piece)
                if loop.time() < began_s + 2.5:
                    await asyncio.sleep(0.015)
            assert size > 8_000_000
            assert loop.time() > began_s + 2


@pytest.mark.slow
async def test_bytes_between_requests_do_not_keep_a_connection_for_ever() -> None:
    async with served(keep_alive_s=1) as server:
        reader, writer = await connect(server.port)
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.write(b"\r\n")
        assert len(await until_closed(reader)) <= 2
        writer.close()


# Pipelining, and what is refused without the application


class Gated:
    """Answers with the path and the body's length; ``/held`` only when its gate is open, half of it before."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.longest_pipeline = 0
        self.connection: Any = None
        self.gone = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.connection is not None:
            self.longest_pipeline = max(self.longest_pipeline, len(self.connection.pipeline))
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone += 1
                return
            size += len(message["body"])
            if not message["more_body"]:
                break
        body = b"%b %d\n" % (scope["path"].encode(), size)
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        if scope["path"] == "/held":
            await send({"type": "http.response.body", "body": body[:3], "more_body": True})
            self.begun.set()
            await self.gate.wait()
            body = body[3:]
        await send({"type": "http.response.body", "body": body})


HELD = b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
HELD_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n/held 0\n"


async def ask(port: int, request: bytes) -> bytes:
    """The whole answer on a connection of its own."""
    reader, writer = await connect(port)
    writer.write(request)
    answer = await until_closed(reader)
    writer.close()
    return answer


async def test_where_all_are_busy_a_new_connection_is_refused_but_health_is_answered() -> None:
    application = Gated()

    async with serving(application, limit=1, timeout_s=10) as server:
        reader, writer = await connect(server.port)
        writer.write(HELD)
        await asyncio.wait_for(application.begun.wait(), 10)
        for _ in range(2 * SPARE_PLACES):
            refused = await ask(server.port, GET)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"max_connections" in refused
            assert b"retry-after: " in refused
            health = await ask(server.port, b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert health.startswith(b"HTTP/1.1 200 ")
            assert b"connection: close" in health
        silent = [await connect(server.port) for _ in range(SPARE_PLACES + 1)]
        assert b" 200 " in await ask(server.port, b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n")
        application.gate.set()
        assert await asyncio.wait_for(reader.readuntil(b"/held 0\n"), 10) == HELD_ANSWER
        for other in (writer, *(pair[1] for pair in silent)):
            other.close()


async def test_slow_bodies_keep_nobody_out() -> None:
    application = Gated()

    async with serving(application, limit=20, timeout_s=60) as server:
        head = b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx"
        held = [await connect(server.port) for _ in range(25)]
        for _, writer in held:
            writer.write(head)
        answers = await asyncio.gather(*(ask(server.port, LAST) for _ in range(10)))
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers)
        for _, writer in held:
            writer.close()


async def test_a_body_is_no_part_of_the_head_behind_it() -> None:
    async with serving(Gated(), timeout_s=10) as server:
        reader, writer = await connect(server.port)
        await until(lambda: len(server.connections) == 1)
        (connection,) = server.connections
        for piece in (
            b"POST /first HTTP/1.1\r\nHo",
            b"st: x\r\nContent-Length: 100000\r\n\r\n" + bytes(100_000) + b"GET /second HTTP/1.1\r\nHo",
            b"st: x\r\nConnection: close\r\n\r\n",
        ):
            connection.data_received(piece)
        answers = await until_closed(reader)
        assert b"/first 100000\n" in answers
        assert answers.endswith(b"/second 0\n")
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "status"),
    [
        (b"no request\r\n\r\n", b"400 Bad Request"),
        (b"GET /a HTTP/1.1\r\nX: " + b"x" * 60_000, b"431 Request Header Fields Too Large"),
        (b"GET /a HT", b"408 Request Timeout"),
        (GET + b"POST /b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size", b"400 Bad Request"),
    ],
    ids=["garbage", "too large", "too slow", "a body behind a request"],
)
async def test_a_refusal_waits_for_the_answers_before_it(more: bytes, status: bytes) -> None:
    application = Gated()

    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(HELD)
        await asyncio.wait_for(application.begun.wait(), 10)
        writer.write(more)
        asyncio.get_running_loop().call_later(2 * TIMEOUT_S, application.gate.set)
        answers = await until_closed(reader)
        assert answers.startswith(HELD_ANSWER)
        others, _, refusal = answers[len(HELD_ANSWER) :].rpartition(b"\nHTTP/1.1 " if GET in more else b"HTTP/1.1 ")
        assert others.endswith(b"/2 0") if GET in more else not others
        assert refusal.startswith(status + b"\r\n")
        assert b"connection: close\r\n" in refusal
        writer.close()


async def test_a_request_in_front_of_garbage_is_answered() -> None:
    async with served() as server:
        reader, writer = await connect(server.port)
        writer.write(GET + b"garbage\r\n\r\n")
        answers = await until_closed(reader)
        assert answers.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answers.count(b"HTTP/1.1 ") == 2 + answers.count(b"expected HTTP/1.1 ")
        assert b"HTTP/1.1 400 Bad Request\r\n" in answers
        writer.close()


async def test_a_body_that_is_not_chunked_as_it_says_is_refused_in_place_of_its_answer() -> None:
    application = Gated()

    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nxno end")
        answers = await until_closed(reader)
        assert answers.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answers.count(b"x-request-id: ") == 1
        await until(lambda: application.gone == 1)
        writer.close()


async def test_nothing_is_said_of_the_rest_of_a_body_whose_request_is_answered() -> None:
    async with served() as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n\0\0"), 10)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        writer.write(b"no size\r\n")
        assert await until_closed(reader) == b""
        writer.close()


@pytest.mark.slow
async def test_a_connection_is_read_no_further_while_requests_wait_on_it() -> None:
    application = Gated()
    count = 5000

    async with serving(application, timeout_s=10) as server:
        reader, writer = await connect(server.port)
        writer.write(HELD)
        await asyncio.wait_for(application.begun.wait(), 10)
        (application.connection,) = server.connections
        writer.write(b"GET / HTTP/1.1\r\nHost:x\r\n\r\n" * count + LAST)
        await until(lambda: len(application.connection.pipeline) > 0)
        application.gate.set()
        answers = await until_closed(reader)
        assert answers.endswith(b"/last 0\n")
        assert answers.count(b"\r\n\r\n/ 0\n") == count
        assert 0 < application.longest_pipeline < 1000
        writer.close()


async def test_a_body_behind_a_request_that_is_answered_late_arrives() -> None:
    application = Gated()

    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(HELD)
        await asyncio.wait_for(application.begun.wait(), 10)
        for _ in range(2):
            writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n" + bytes(300_000))
        application.gate.set()
        answers = await asyncio.wait_for(reader.readuntil(b"/a 300000\n"), 10)
        answers += await asyncio.wait_for(reader.readuntil(b"/a 300000\n"), 10)
        assert answers.startswith(HELD_ANSWER)
        writer.close()


@pytest.mark.slow
async def test_a_head_that_nobody_reads_yet_is_not_late() -> None:
    application = Gated()

    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(HELD)
        await asyncio.wait_for(application.begun.wait(), 10)
        writer.write(GET + b"GET /late HTTP/1.1\r\nHost: ")
        writer.write(b"x" + b"x" * 20_000 + b"\r\n\r\n")
        asyncio.get_running_loop().call_later(3 * TIMEOUT_S, application.gate.set)
        assert b"408" not in await asyncio.wait_for(reader.readuntil(b"/late 0\n"), 10)
        writer.close()


@pytest.mark.slow
async def test_empty_lines_keep_no_connection() -> None:
    async with served(keep_alive_s=1) as server:
        reader, writer = await connect(server.port)
        closed = asyncio.create_task(until_closed(reader))
        while not closed.done():
            writer.write(b"\r\n")
            await asyncio.wait([closed], timeout=0.1)
        assert await closed == b""
        writer.close()


async def test_empty_lines_are_bounded_as_headers_are() -> None:
    async with served() as server:
        reader, writer = await connect(server.port)
        writer.write(b"\r\n" * 100_000)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        writer.close()


async def test_trailers_are_bounded_as_headers_are() -> None:
    async with serving(Gated()) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_a_refusal_has_an_id_and_a_line_of_the_access_log_and_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = io.StringIO()
    log = AccessLog(stream, "json", payloads=True)

    async with served(access_log=log) as server:
        reader, writer = await connect(server.port)
        writer.write(b"garbage\r\n\r\n")
        head, _, body = (await until_closed(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        log.flush()
        line = json.loads(stream.getvalue())
        assert f"x-request-id: {line['request_id']}" in head.decode().split("\r\n")
        assert (line["status"], line["method"], line["path"], line["client"]) == (400, "-", "-", "127.0.0.1")
        assert line["error"] == json.loads(body)["error"]
        assert "Invalid method" in line["error"]
        writer.close()
    assert caplog.records == []


# Clients that send nothing more


class Waiting:
    """Answers with the path when its gate is open, in a stream on ``/stream``; notes clients that leave before."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gone = asyncio.Event()

    async def _events(self, path: str) -> AsyncGenerator[bytes, None]:
        yield b"0"
        self.begun.set()
        await self.gate.wait()
        yield path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/stream":
            scope["state"]["stream_limits"] = StreamLimits()
            await EventStream(self._events(scope["path"]), lambda error: [], self.gone.set)(scope, receive, send)
            return
        self.begun.set()
        try:
            with DisconnectWatch(scope, receive):
                await self.gate.wait()
        except ClientGone:
            self.gone.set()
            return
        exchange = exchange_of(scope)
        assert exchange is not None
        exchange.answer(200, [], [scope["path"].encode()])


POST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n/a"
GOES_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "answers"),
    [(POST, 1), (POST + POST, 2), (POST + POST[:-1], 1), (POST + POST[:20], 1)],
    ids=["one request", "two requests", "one request and a part of another", "one request and a part of a head"],
)
async def test_a_client_that_ends_its_sending_side_gets_its_answers(sent: bytes, answers: int) -> None:
    application = Waiting()

    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(sent)
        writer.write_eof()
        await asyncio.wait_for(application.begun.wait(), 10)
        application.gate.set()
        received = (await until_closed(reader)).replace(b"connection: close\r\n", b"")
        for _ in range(answers):
            answer, received = received[: len(ANSWER)], received[len(ANSWER) :]
            assert answer == ANSWER
        assert received == b"" or received.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "meanwhile", "end"),
    [
        (POST, GOES_ON, b"\r\nconnection: close\r\n\r\n/a"),
        (POST.replace(b"/a", b"/stream"), PING, b"data: /stream\n\n\r\n0\r\n\r\n"),
    ],
    ids=["whole", "stream"],
)
async def test_a_client_that_waits_gets_what_it_ignores_until_its_answer(
    request_: bytes, meanwhile: bytes, end: bytes
) -> None:
    application = Waiting()

    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(request_)
        writer.write_eof()
        for _ in range(2):
            await asyncio.wait_for(reader.readuntil(meanwhile), 10)
        application.gate.set()
        assert (await until_closed(reader)).endswith(end)
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", [b"/a", b"/stream"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("ends_its_side_before", [False, True])
async def test_a_client_that_leaves_before_its_answer_is_noticed(
    path: bytes, version: bytes, ends_its_side_before: bool
) -> None:
    application = Waiting()

    async with serving(application) as server:
        reader, writer = await connect(server.port)
        writer.write(POST.replace(b"/a", path).replace(b"1.1", version))
        await asyncio.wait_for(application.begun.wait(), 10)
        if ends_its_side_before:
            writer.write_eof()
            if version == b"1.1":
                await reader.readuntil(PING if path == b"/stream" else GOES_ON)
        writer.close()
        await asyncio.wait_for(application.gone.wait(), 10)


# Upgrades, which nobody has to take (RFC 9110, 7.8)

UPGRADE = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"TLS/1.0"])
@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 5\r\n\r\n12345", b"Transfer-Encoding: chunked\r\n\r\n2\r\n12\r\n3\r\n345\r\n0\r\n\r\n"],
    ids=["length", "chunked"],
)
@pytest.mark.parametrize("piece_bytes", [1, 50, 100_000])
async def test_a_request_that_would_upgrade_is_answered_as_if_it_would_not(
    protocol: bytes, body: bytes, piece_bytes: int
) -> None:
    async with serving(Gated(), timeout_s=10) as server:
        reader, writer = await connect(server.port)
        await until(lambda: len(server.connections) == 1)
        (connection,) = server.connections
        sent = b"POST /a HTTP/1.1\r\n" + UPGRADE % protocol + body
        sent += b"GET /b HTTP/1.1\r\n" + UPGRADE % protocol + b"\r\n" + sent + LAST
        for start in range(0, len(sent), piece_bytes):
            connection.data_received(sent[start : start + piece_bytes])
        answers = await until_closed(reader)
        assert [line for line in answers.split(b"\n") if line.startswith(b"/")] == [
            b"/a 5", b"/b 0", b"/a 5", b"/last 0",
        ]  # fmt: skip
        assert answers.count(b"HTTP/1.1 200 OK\r\n") == 4
        writer.close()


async def test_an_upgrade_of_an_older_version_is_answered_too() -> None:
    async with serving(Gated()) as server:
        reader, writer = await connect(server.port)
        writer.write(b"POST /a HTTP/1.0\r\n" + UPGRADE % b"h2c" + b"Content-Length: 3\r\n\r\nabc")
        assert (await until_closed(reader)).endswith(b"connection: close\r\n\r\n/a 3\n")
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n", b"405 Method Not Allowed"),
        (b"CONNECT /v2 HTTP/1.1\r\nHost: x\r\n", b"405 Method Not Allowed"),
        (b"GET /v2 HTTP/2.0\r\nHost: x\r\n", b"505 HTTP Version Not Supported"),
        (b"POST /v2 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", b"501 Not Implemented"),
        (b"GET http://x HTTP/1.1\r\nHost: x\r\n", b"400 Bad Request"),
        (b"GET http://x HTTP/1.1\r\n" + UPGRADE % b"h2c", b"400 Bad Request"),
    ],
)
async def test_a_head_that_this_server_does_not_follow_is_refused(head: bytes, status: bytes) -> None:
    async with serving(Gated()) as server:
        reader, writer = await connect(server.port)
        writer.write(head + b"\r\n")
        answer = await until_closed(reader)
        assert answer.startswith(b"HTTP/1.1 %b\r\n" % status)
        assert (b"\r\nallow: " in answer) == status.startswith(b"405")
        writer.close()
