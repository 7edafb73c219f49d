"""What holds for every route: which Host a request names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.types import ASGIApp

from app.config import Server
from app.control import CommandAnswer
from app.gateway import create_app
from app.models import Models
from app.operator_guard import OperatorGuard
from app.routes.repository import repository_routes
from tests.app.serving import connect, serving, until_closed


def exchange(app: ASGIApp, sent: bytes) -> tuple[bytes, bytes]:
    """An answer's head and body, over a real socket."""

    async def main() -> bytes:
        async with serving(app) as server:
            reader, writer = await connect(server.port)
            writer.write(sent)
            answer = await until_closed(reader)
            writer.close()
            return answer

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    return head, body


def ask(line: bytes, headers: bytes = b"Host: x\r\n", app: ASGIApp | None = None) -> tuple[bytes, bytes]:
    app = app or create_app(Models(), Server(access_log=False))
    return exchange(app, line + b"\r\n" + headers + b"Connection: close\r\n\r\n")


# Host (RFC 9112, 3.2)


@pytest.mark.parametrize("line", [b"GET /v2 HTTP/1.1", b"POST /v2/models/m/infer HTTP/1.1", b"GET /nothing HTTP/1.1"])
@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"Host: x\r\nHost: x\r\n",
        b"Host: localhost\r\nHost: models.example\r\n",
        b"Host: two words\r\n",
        b"Host: http://x\r\n",
        b"Host: x/y\r\n",
        b"Host: user@x\r\n",
        b"Host: x:port\r\n",
        b"Host: ::1\r\n",
        b"Host: [x y]\r\n",
        b"Host: caf\xe9\r\n",
    ],
)
def test_a_request_without_one_sound_host_is_refused(line: bytes, headers: bytes) -> None:
    head, body = ask(line, headers)
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"x-request-id: " in head
    assert b"header Host: expected " in body


@pytest.mark.parametrize(
    "host", ["x", "X.example:8000", "127.0.0.1:8000", "[::1]", "[::1]:8000", "a_b-c", "x:", "", "caf%C3%A9", "x \t"]
)
def test_a_sound_host_is_taken(host: str) -> None:
    assert ask(b"GET /v2 HTTP/1.1", f"Host: {host}\r\n".encode())[0].startswith(b"HTTP/1.1 200 ")


def test_an_older_version_needs_no_host_but_may_not_have_two() -> None:
    assert ask(b"GET /v2 HTTP/1.0", b"")[0].startswith(b"HTTP/1.1 200 ")
    assert ask(b"GET /v2 HTTP/1.0", b"Host: a\r\nHost: b\r\n")[0].startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("hosts", [b"Host: localhost\r\nHost: models.example\r\n", b"Host: localhost\r\n"])
def test_nobody_commands_with_a_second_host_behind_localhost(hosts: bytes) -> None:
    commands: list[str] = []

    async def command(action: str, model: str, arguments: Mapping[str, Any]) -> CommandAnswer:
        commands.append(action)
        return CommandAnswer(0, 200, {})

    server = Server(access_log=False)
    app = create_app(Models(), server, repository_routes(command, OperatorGuard(True), server))
    head, _ = ask(b"POST /v2/repository/models/m/load HTTP/1.1", hosts, app)
    assert (head[:12], commands) == ((b"HTTP/1.1 200", ["load"]) if hosts.count(b"\n") == 1 else (b"HTTP/1.1 400", []))
