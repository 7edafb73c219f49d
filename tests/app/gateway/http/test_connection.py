"""Connections: how many there may be, and what clients may do with them that the application never sees."""

from __future__ import annotations

import asyncio
import functools
import resource
import socket

import pytest
from starlette.types import Receive, Scope, Send

from app.gateway.http.connection import OTHER_FILES, Closable, Connections, allow_open_files
from tests.app.serving import TIMEOUT_S, connect, run_with, serving, until, until_closed


class Fake(Closable):
    """A connection that notes its end."""

    def __init__(self) -> None:
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_the_one_that_is_idle_longest_goes() -> None:
    connections = Connections(3)
    one, two, three, four, five = (Fake() for _ in range(5))
    for connection in (one, two, three):
        assert connections.add(connection)
    connections.begin(one)
    connections.end(one)
    assert connections.add(four)
    assert connections.add(five)
    assert [item.is_aborted for item in (one, two, three, four, five)] == [False, True, True, False, False]


def test_one_with_a_request_stays_and_without_another_there_is_no_room() -> None:
    connections = Connections(2)
    one, two, three = (Fake() for _ in range(3))
    for connection in (one, two):
        assert connections.add(connection)
        connections.begin(connection)
    assert not connections.add(three)
    connections.remove(three)
    assert not connections.add(three)
    connections.remove(one)
    assert connections.add(three)
    assert not any(item.is_aborted for item in (one, two, three))


def test_one_that_had_to_go_counts_once() -> None:
    connections = Connections(1)
    one, two, three = (Fake() for _ in range(3))
    assert connections.add(one)
    assert connections.add(two)
    connections.begin(one)  # its bytes were there already
    connections.end(one)
    connections.remove(one)
    connections.begin(two)
    assert not connections.add(three)


def test_open_files_are_allowed_as_far_as_may_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[int, int]] = []
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: asked.append(wanted))
    assert allow_open_files(100) == 100
    assert asked == []
    assert allow_open_files(1000) == 1000
    assert asked.pop() == (1000 + OTHER_FILES, 4096)
    assert caplog.text == ""
    assert allow_open_files(10_000) == 4096 - OTHER_FILES
    assert asked.pop() == (4096, 4096)
    assert "server.max_connections" in caplog.text
    limits[1] = resource.RLIM_INFINITY
    assert allow_open_files(10_000) == 10_000


# Over real sockets


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


run = functools.partial(run_with, application)
served = functools.partial(serving, application)


def test_idle_connections_keep_nobody_out() -> None:
    async def scenario(port: int) -> None:
        held = [await connect(port) for _ in range(3)]
        for _, writer in held:
            writer.write(b"GET / HT")  # a head that is not complete is idle, too
        for _ in range(3):
            reader, writer = await connect(port)
            writer.write(GET)
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            held.append((reader, writer))
        assert [await until_closed(reader) for reader, _ in held[:3]] == [b"", b"", b""]
        for _, writer in held:
            writer.close()

    run(scenario, limit=3)


def test_without_an_idle_one_a_new_connection_is_refused() -> None:
    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(b"POST /0?read HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
        refused, other = await connect(port)
        while b"503" not in (answer := await until_closed(refused)):  # the head may not have been read before
            assert answer == b""
            other.close()
            refused, other = await connect(port)
        assert b"max_connections" in answer
        writer.write(b"x")
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        for one in (writer, other):
            one.close()

    run(scenario, limit=1)


def test_a_body_that_is_sent_on_after_the_answer_is_read_for_a_while_only() -> None:
    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(b"POST /2 HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        closed = asyncio.create_task(until_closed(reader))
        began_s = asyncio.get_running_loop().time()
        while not closed.done() and asyncio.get_running_loop().time() < began_s + 10:
            writer.write(b"x")
            await asyncio.wait([closed], timeout=0.05)
        assert b" 200 " in await closed
        writer.close()

    run(scenario)


def test_a_body_that_ends_after_the_answer_leaves_the_connection_good() -> None:
    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(b"POST /0 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.write(b"12345")
        # Longer than what a body may take after its answer, had it not ended.
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), 3 * TIMEOUT_S)
        writer.write(GET)
        assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.close()

    run(scenario)


@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"])
def test_an_answer_that_nobody_reads_is_given_up(header: bytes) -> None:
    async def main() -> None:
        async with served() as server:
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", server.port))
                await loop.sock_sendall(client, b"GET /50000000 HTTP/1.1\r\nHost: x\r\n" + header + b"\r\n")
                await until(lambda: len(server.connections) == 1)
                await until(lambda: not server.connections)

    asyncio.run(main())


def test_an_answer_that_is_read_slowly_arrives() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_bytes_between_requests_do_not_keep_a_connection_for_ever() -> None:
    async def scenario(port: int) -> None:
        reader, writer = await connect(port)
        writer.write(GET)
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        writer.write(b"\r\n")
        assert len(await until_closed(reader)) <= 2
        writer.close()

    run(scenario, keep_alive_s=1)
