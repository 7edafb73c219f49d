"""The command line against a running server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.errors import CommandError
from app.server_client import ServerClient, command_line, status_table

UNLOADED = {
    "name": "a", "state": "UNAVAILABLE", "took_s": 1.25, "drained": 3, "ended": 1,
    "freed": {"host_bytes": 300 * 1024 * 1024, "gpu_bytes": None}, "leftovers": [],
}  # fmt: skip


def client(answer: httpx.Response | Exception, asked: list[httpx.Request] | None = None) -> ServerClient:
    def handle(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ServerClient("http://127.0.0.1:8000/", httpx.MockTransport(handle))


def test_it_asks_the_route_of_the_action() -> None:
    asked: list[httpx.Request] = []
    assert client(httpx.Response(200, json=UNLOADED), asked).command("unload", "a b/c") == UNLOADED
    assert (asked[0].method, str(asked[0].url)) == (
        "POST",
        "http://127.0.0.1:8000/v2/repository/models/a%20b%2Fc/unload",
    )


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(409, json={"error": "model `a` is READY"}), "model `a` is READY"),
        (httpx.Response(404, json={"detail": "?"}), "status 404"),
        (httpx.Response(502, text="<html>"), "status 502 with something else"),
        (httpx.Response(200, json=[]), "is it a Headwater server?"),
        (httpx.ConnectError("refused"), "is the server running there?"),
    ],
)
def test_a_failure_is_told_as_the_server_tells_it(answer: httpx.Response | Exception, told: str) -> None:
    with pytest.raises(CommandError) as raised:
        client(answer).command("load", "a")
    assert told in str(raised.value)


def test_a_url_that_is_none_is_told() -> None:
    with pytest.raises(CommandError, match="no answer"):
        ServerClient("nonsense").index()


def test_the_table_has_a_line_per_model_with_columns_below_each_other() -> None:
    index: list[dict[str, Any]] = [
        {"name": "a", "version": "1", "state": "READY", "since": "2026-01-02T03:04:05.678Z", "reason": "replica a-1"},
        {"name": "longer", "version": "1", "state": "UNAVAILABLE", "since": "2026-01-02T03:04:05.678Z", "reason": ""},
    ]
    assert status_table(client(httpx.Response(200, json=index)).index()).splitlines() == [
        "MODEL   VERSION  STATE        SINCE                     REASON",
        "a       1        READY        2026-01-02T03:04:05.678Z  replica a-1",
        "longer  1        UNAVAILABLE  2026-01-02T03:04:05.678Z",
    ]


def test_what_came_of_a_command_is_one_line() -> None:
    assert command_line("unload", UNLOADED) == (
        "a: unload done in 1.2 s, now UNAVAILABLE; 3 requests finished, 1 ended; freed 300 MiB"
    )
    assert command_line("load", {"name": "a", "state": "READY", "took_s": 4.06}) == "a: load done in 4.1 s, now READY"
    on_gpu = {**UNLOADED, "freed": {"host_bytes": 0, "gpu_bytes": 1024 * 1024}, "warnings": ["unload() raised"]}
    assert command_line("unload", on_gpu).endswith("; freed 0 MiB, 1 MiB on GPUs; unload() raised")
