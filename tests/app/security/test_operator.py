"""Who may command a server, and the routes that ask."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from headwater_server.config.schema import Server
from headwater_server.control.messages import CommandAnswer
from headwater_server.errors import Forbidden
from headwater_server.gateway.app import body_reader, create_app
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.http.body_budget import BodyBudget
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.repository import repository_routes
from headwater_server.security.operator import OperatorGuard, is_loopback, warn_if_exposed


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost"},
        {"host": "LocalHost:8000"},
        {"host": "127.0.0.1:65535"},
        {"host": "[::1]"},
        {"host": "[::1]:8000"},
    ],
)
def test_somebody_on_this_machine_is_let_through(headers: dict[str, str]) -> None:
    OperatorGuard(True).check(headers)


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, "Host"),
        ({"host": ""}, "Host"),
        ({"host": "models.example"}, "Host"),
        ({"host": "models.example:8000"}, "Host"),
        ({"host": "localhost.models.example"}, "Host"),
        ({"host": "127.0.0.1.models.example"}, "Host"),
        ({"host": "127.0.0.1:8000@models.example"}, "Host"),
        ({"host": "10.0.0.1"}, "Host"),
        ({"host": "localhost:8000", "origin": "http://models.example"}, "Origin"),
        ({"host": "localhost:8000", "origin": "null"}, "Origin"),
        ({"host": "localhost:8000", "origin": "http://localhost:3000"}, "Origin"),
        ({"host": "localhost:8000", "origin": "http://127.0.0.1:8000"}, "Origin"),
        ({"host": "localhost:8000", "origin": ""}, "Origin"),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, "Origin"),
        ({"host": "localhost:8000", "x-forwarded-for": "10.0.0.1"}, "x-forwarded-for"),
    ],
)
def test_what_may_come_from_elsewhere_is_refused_and_told_why(headers: dict[str, str], named: str) -> None:
    with pytest.raises(Forbidden, match=named):
        OperatorGuard(True).check(headers)


def test_a_server_that_others_reach_takes_no_commands() -> None:
    with pytest.raises(Forbidden, match=r"loopback address.*server\.host"):
        OperatorGuard(False).check({"host": "localhost"})


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (("127.0.0.1", 8000), True),
        (("127.8.0.1", 8000), True),
        (("::1", 8000, 0, 0), True),
        (("0.0.0.0", 8000), False),
        (("::", 8000, 0, 0), False),
        (("192.168.0.1", 8000), False),
        ("/run/socket", False),
        ("", False),
    ],
)
def test_which_addresses_are_this_machines_only(address: Any, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("::1", False), ("0.0.0.0", True), ("::", True)])
def test_a_server_without_keys_that_others_reach_says_who_may_what(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_exposed((host, 8000))
    text = f"other machines reach {host}; without API keys, anyone may use every model, and commands"
    assert (text in caplog.text) == bool(caplog.text) == warned


# The routes


class Asked:
    """A gateway whose supervisor notes what it is asked."""

    def __init__(self, *, is_local: bool = True, reader: BodyReader | None = None) -> None:
        self.commands: list[tuple[str, str, dict[str, Any]]] = []
        self.answer = CommandAnswer(0, 200, {"name": "a", "state": "READY"})
        server = Server(access_log=False)
        reader = reader or body_reader(server)
        routes = repository_routes(self._command, OperatorGuard(is_local), reader, Models())
        app = create_app(Models(), server, routes, reader=reader)
        self._transport = httpx.ASGITransport(app)

    async def _command(self, action: str, model: str, arguments: Mapping[str, Any]) -> CommandAnswer:
        self.commands.append((action, model, dict(arguments)))
        return self.answer

    def post(self, path: str, content: str = "", **headers: str) -> httpx.Response:
        """A command on a model; or another request, if the path begins with a slash."""
        path = path if path.startswith("/") else f"/v2/repository/models/{path}"

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=self._transport, base_url="http://127.0.0.1:8000") as client:
                sent = {"content-type": "application/json", **headers}
                return await client.post(path, content=content, headers=sent)

        return asyncio.run(ask())


@pytest.mark.parametrize("action", ["load", "unload", "reload"])
def test_a_command_goes_to_the_supervisor_and_its_answer_comes_back(action: str) -> None:
    asked = Asked()
    answer = asked.post(f"a.b/{action}")
    assert (answer.status_code, answer.json()) == (200, {"name": "a", "state": "READY"})
    assert asked.commands == [(action, "a.b", {})]
    asked.answer = CommandAnswer(0, 409, {"error": "no"})
    answer = asked.post(f"a.b/{action}", "{}")
    assert (answer.status_code, answer.json()) == (409, {"error": "no"})


@pytest.mark.parametrize(
    ("path", "content", "arguments"),
    [
        ("a/load", '{"parameters": {"config": "{\\"replicas\\": 2}"}}', {"config": '{"replicas": 2}'}),
        ("a/reload", '{"parameters": {"config": "{}"}}', {"config": "{}"}),
        ("a/scale", '{"replicas": 3}', {"min": 3, "max": 3}),
        ("a/scale", '{"min": 1, "max": 3}', {"min": 1, "max": 3}),
        ("a/scale", '{"max": 2}', {"min": 1, "max": 2}),
    ],
)
def test_what_a_command_takes_goes_with_it(path: str, content: str, arguments: dict[str, Any]) -> None:
    asked = Asked()
    assert asked.post(path, content).status_code == 200
    assert asked.commands == [(path[2:], "a", arguments)]


@pytest.mark.parametrize("action", ["load", "unload", "reload"])
def test_what_the_guard_refuses_never_reaches_the_supervisor(action: str) -> None:
    asked = Asked()
    assert asked.post(f"a/{action}", host="models.example").status_code == 403
    assert asked.post(f"a/{action}", origin="http://models.example").status_code == 403
    open_to_all = Asked(is_local=False)
    refused = open_to_all.post(f"a/{action}")
    assert (refused.status_code, "loopback" in refused.json()["error"]) == (403, True)
    assert asked.commands == open_to_all.commands == []


@pytest.mark.parametrize(
    ("path", "content", "named"),
    [
        ("a/load", '{"parameters": {"config": {}}}', "config: expected a deployment's section as JSON text"),
        ("a/load", '{"parameters": {"file:1/model.onnx": "aaaa"}}', "not supported"),
        ("a/reload", '{"parameters": {"config": 1}}', "config: expected"),
        ("a/unload", '{"parameters": {"config": "{}"}}', "config: unknown"),
        ("a/scale", "", 'body: expected a JSON object, got an empty body; expected {"replicas": 3}'),
        ("a/scale", '{"replicas": 1, "replicas": 2}', "replicas: expected every key of an object once"),
        ("a/scale", '{"many": 1}', "many: expected one of the fields replicas, min, max, got 'many'; expected"),
        ("a/scale", '{"replicas": 0}', "expected 1 to 1000"),
        ("a/scale", '{"replicas": 1001}', "expected 1 to 1000"),
        ("a/scale", '{"replicas": 2, "min": 1, "max": 2}', 'expected {"replicas": 3}'),
        ("a/scale", '{"min": 3, "max": 2}', "min"),
        ("a/scale", '{"replicas": "many"}', "replicas"),
        ("a/unload", '{"parameters": {"unload_dependents": true}}', "unload_dependents"),
        ("a/load", '{"parameters": {"unload_dependents": false}}', "unknown"),
        ("a/unload", '{"parameters": {"force": true}}', "force: unknown"),
        ("a/load", '{"config": "{}"}', "body"),
        ("a/load", "[]", "body: expected an object, got an array; expected"),
        ("a/load", "{", "body: expected JSON, got malformed JSON: Input data was truncated; expected"),
        ("a/load", "[" * 50_000, "body"),
    ],
)
def test_a_body_that_asks_for_more_than_we_do_is_refused(path: str, content: str, named: str) -> None:
    asked = Asked()
    answer = asked.post(path, content)
    assert (answer.status_code, named in answer.json()["error"]) == (400, True), answer.text
    assert asked.commands == []


@pytest.mark.parametrize("content", ["", "{}", '{"parameters": {}}', '{"parameters": {"unload_dependents": false}}'])
def test_what_tritonclient_sends_is_taken(content: str) -> None:
    assert Asked().post("a/unload", content).status_code == 200


OBJECTS = '{"parameters": {"a": [%s0]}}' % ("[]," * 300)


@pytest.mark.parametrize("path", ["a/load", "a/unload", "a/scale", "a/promote", "a/rollback", "/v2/repository/index"])
def test_what_operators_send_shares_the_memory_of_all_bodies(path: str) -> None:
    budget = BodyBudget(100_000)
    asked = Asked(reader=BodyReader(10_000, 5, budget))
    assert asked.post(path, OBJECTS).status_code == 400
    others = budget.limit - 20 * len(OBJECTS)
    assert budget.take(others, 0)  # the text has room, and what it is decoded to has none
    refused = asked.post(path, OBJECTS)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert "the bodies of all requests together" in refused.json()["error"]
    assert (budget.used, asked.commands) == (others, [])
