"""What holds for every route: which Host a request names, HEAD, and how its path is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

import httpx
import pytest
from starlette.types import ASGIApp

from headwater_server.config.schema import Server
from headwater_server.control.messages import CommandAnswer
from headwater_server.errors import Unavailable
from headwater_server.gateway.app import body_reader, create_app
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.repository import repository_routes
from headwater_server.security.operator import OperatorGuard
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


def test_a_refused_head_has_no_body() -> None:
    head, body = ask(b"HEAD /v2 HTTP/1.1", b"")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert body == b""


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
    app = create_app(Models(), server, repository_routes(command, OperatorGuard(True), body_reader(server), Models()))
    head, _ = ask(b"POST /v2/repository/models/m/load HTTP/1.1", hosts, app)
    assert (head[:12], commands) == ((b"HTTP/1.1 200", ["load"]) if hosts.count(b"\n") == 1 else (b"HTTP/1.1 400", []))


# The access log


@pytest.mark.parametrize(("access_log", "logged"), [(False, ""), (True, "NotFound"), ("full", "unknown")])
def test_requests_are_logged_as_the_server_is_told(
    access_log: bool | Literal["full"], logged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = create_app(Models(), Server(access_log=access_log, log_format="json"))
    ask(b"POST /v2/models/m/infer HTTP/1.1", b"Host: x\r\nContent-Length: 0\r\n", app)
    if app.records.log is not None:
        app.records.log.flush()
    lines = [json.loads(line)["error"] for line in capsys.readouterr().err.splitlines()]
    assert [logged in line for line in lines] == ([True] if logged else [])


# Bodies

READ_FIRST = [
    b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/v1/embeddings", b"/tokenize", b"/detokenize",
]  # fmt: skip
"""Routes that find the model's name in the body."""


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("size", "status"), [(1000, b"400"), (1001, b"413")])
@pytest.mark.parametrize("path", READ_FIRST)
def test_a_body_is_read_up_to_the_limit(path: bytes, size: int, status: bytes, is_chunked: bool) -> None:
    app = create_app(Models(), Server(access_log=False, max_body_bytes=1000))
    framing, body = b"Content-Length: %d" % size, b"x" * size
    if is_chunked:
        framing, body = b"Transfer-Encoding: chunked", b"3e8\r\n%b\r\n1\r\nx\r\n0\r\n\r\n" % (b"x" * 1000)
        body = body if size > 1000 else body.replace(b"1\r\nx\r\n", b"")
    head, content = exchange(
        app,
        b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%b\r\nConnection: close\r\n\r\n%b"
        % (path, framing, body),
    )
    assert head.startswith(b"HTTP/1.1 %b " % status), head
    error = json.loads(content)["error"]
    assert (error["type"], error["message"][:15]) == ("invalid_request_error", "body: expected ")


@pytest.mark.parametrize("length", [b"x", b"", b"-1", b"1 2", b"0x1"])
def test_a_length_that_is_none_is_refused(length: bytes) -> None:
    head, _ = ask(b"POST /v1/chat/completions HTTP/1.1", b"Host: x\r\nContent-Length: %b\r\n" % length)
    assert head.startswith(b"HTTP/1.1 400 ")


# HEAD


@pytest.mark.parametrize(
    "path", ["/v2", "/v2/health/live", "/v2/health/ready", "/v1/models", "/docs", "/", "/v2/nothing"]
)
def test_head_is_answered_as_get_is_without_the_body(path: str) -> None:
    got, body = ask(f"GET {path} HTTP/1.1".encode())
    head, nothing = ask(f"HEAD {path} HTTP/1.1".encode())
    assert head.partition(b"\r\n")[0] == got.partition(b"\r\n")[0]
    assert nothing == b""
    assert f"content-length: {len(body)}".encode() in head.lower().split(b"\r\n")
    assert got.lower().count(b"content-type") == head.lower().count(b"content-type")


def test_head_of_what_get_does_not_answer_is_not_allowed() -> None:
    head, body = ask(b"HEAD /v2/models/m/infer HTTP/1.1")
    assert head.startswith(b"HTTP/1.1 405 ")
    assert b"allow: POST" in head.split(b"\r\n")
    assert body == b""


async def test_what_get_answers_allows_head() -> None:
    app = create_app(Models(), Server(access_log=False))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        answer = await client.delete("/v2")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


# Paths


def test_the_root_has_a_slash_behind_it_or_not() -> None:
    assert ask(b"GET /v2/ HTTP/1.1")[1] == ask(b"GET /v2 HTTP/1.1")[1] != b""


@pytest.mark.parametrize("slash", [b"%2f", b"%2F"])
@pytest.mark.parametrize(
    "line",
    [
        b"POST /v2/models/unknown%sinfer HTTP/1.1",
        b"GET /v2/models/unknown%sconfig HTTP/1.1",
        b"POST /v2%smodels/unknown/infer HTTP/1.1",
        b"GET /v2%shealth/live HTTP/1.1",
        b"GET /%sv2 HTTP/1.1",
    ],
)
def test_an_encoded_slash_separates_nothing(line: bytes, slash: bytes) -> None:
    head, body = ask(line % slash)
    assert head.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 405 "))
    assert b"model 'unknown'" not in body


def test_other_encoded_characters_are_what_they_stand_for() -> None:
    assert ask(b"GET /v%32/health/live HTTP/1.1")[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("path", "request_id"), [("a/b", "a/b"), ("a%2Fb", "a/b"), ("a%252Fb", "a%2Fb"), ("%3Ca%3E", "<a>")]
)
def test_the_id_of_a_request_to_cancel_may_have_slashes_either_way(path: str, request_id: str) -> None:
    head, body = ask(f"POST /v2/requests/{path}/cancel HTTP/1.1".encode())
    assert head.startswith(b"HTTP/1.1 404 ")
    assert f"request '{request_id}'".encode() in body


@pytest.mark.parametrize("name", ["Content-Type", "Content-Encoding", "Inference-Header-Content-Length", "Origin"])
async def test_a_header_that_a_proxy_may_read_otherwise_is_refused_twice(name: str) -> None:
    gateway = create_app(Models(), Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://test") as client:
        answer = await client.post("/v2/models/m/infer", headers=[(name, "1"), (name, "2")])
    assert answer.status_code == 400
    assert answer.json()["error"] == f"header {name}: expected one, got 2"


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
async def test_no_page_frames_the_docs(path: str) -> None:
    gateway = create_app(Models(), Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://test") as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_an_index_may_leave_ready_open() -> None:
    gateway = create_app(Models(), Server(access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://test") as client:
        answer = await client.post("/v2/repository/index", json={"ready": None})
    assert (answer.status_code, answer.json()) == (200, [])


@pytest.mark.parametrize(
    ("workers", "max_body_bytes", "share_bytes"),
    [(1, 1 << 20, 1 << 30), (4, 1 << 20, 1 << 28), (4, 200 << 20, 400 << 20), (64, 1 << 20, 1 << 24)],
)
def test_workers_have_equal_shares_of_the_memory_of_bodies_and_room_for_the_largest_twice(
    workers: int, max_body_bytes: int, share_bytes: int
) -> None:
    reader = body_reader(Server(workers=workers, max_body_bytes=max_body_bytes))
    scope: dict[str, Any] = {"type": "http", "state": {}}
    lease = reader.lease(scope)
    with pytest.raises(Unavailable, match=f"may hold {share_bytes} bytes"):
        lease.take(share_bytes + 1, 1)
