"""Connections with TLS count from the moment they are accepted."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import pytest
from starlette.types import Receive, Scope, Send

from headwater_server.gateway.http.connections import SPARE_PLACES
from tests.app.serving import connect, serving, until, until_closed

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")

GET = b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LIMIT = 8


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A server's."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj",
         "/CN=x", "-days", "2", "-keyout", folder / "key", "-out", folder / "pem"], check=True, capture_output=True,
    )  # fmt: skip
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(folder / "pem", folder / "key")
    return made


def client_context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """The scheme and the body's size."""
    size, more = 0, True
    while more:
        message = await receive()
        size, more = size + len(message["body"]), message["more_body"]
    body = f"{scope['scheme']} {size}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def ask(port: int, request: bytes = GET) -> bytes:
    reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port, ssl=client_context()), 30)
    writer.write(request)
    found = await until_closed(reader)
    writer.close()
    return found


async def test_requests_are_answered(context: ssl.SSLContext) -> None:
    async with serving(answer, tls=context, timeout_s=30) as server:
        assert (await ask(server.port)).endswith(b"https 0")
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3000000\r\n\r\n"
        assert (await ask(server.port, head + bytes(3_000_000))).endswith(b"https 3000000")


async def test_connections_that_never_shake_hands_keep_nobody_out(context: ssl.SSLContext) -> None:
    async with serving(answer, limit=LIMIT, tls=context, timeout_s=60) as server:
        silent = [await connect(server.port) for _ in range(4 * LIMIT)]
        for _ in range(3):
            assert (await ask(server.port)).endswith(b"https 0")
        ended = [await until_closed(reader) for reader, _ in silent[: 3 * LIMIT]]
        assert set(ended) == {b""}
        for _, writer in silent:
            writer.close()


@pytest.mark.slow
async def test_a_handshake_has_its_time_and_the_log_says_so(
    context: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(answer, tls=context, timeout_s=0.2) as server:
        silent = [await connect(server.port) for _ in range(5)]
        silent[0][1].write(b"\x16\x03\x01")
        silent[1][1].write(b"GET / HTTP/1.1\r\n\r\n")
        for reader, writer in silent:
            await until_closed(reader)
            writer.close()
        await until(lambda: "handshakes did not succeed" in caplog.text)
    assert "TLS: 5 handshakes did not succeed" in caplog.text


async def test_where_all_are_busy_health_is_answered(context: ssl.SSLContext) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/held":
            begun.set()
            await gate.wait()
        await answer(scope, receive, send)

    async with serving(held, limit=1, tls=context, timeout_s=60) as server:
        busy = asyncio.create_task(ask(server.port, GET.replace(b"/v2", b"/held")))
        await asyncio.wait_for(begun.wait(), 30)
        silent = [await connect(server.port) for _ in range(SPARE_PLACES)]
        assert b" 503 " in await ask(server.port)
        assert b" 200 " in await ask(server.port, GET.replace(b"/v2", b"/v2/health/live"))
        gate.set()
        assert b" 200 " in await busy
        for _, writer in silent:
            writer.close()
