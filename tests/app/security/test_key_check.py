"""Requests with and without keys, against all routes that there are."""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Scope

from headwater_server.config.schema import Server
from headwater_server.control.messages import CommandAnswer
from headwater_server.control.route_kinds import GraphKind
from headwater_server.control.routing import DeploymentRoute, RoutingTable, State
from headwater_server.errors import ConfigError, Unauthorized
from headwater_server.gateway.app import body_reader, create_app
from headwater_server.gateway.http.entry import RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.repository import repository_routes
from headwater_server.gateway.routes.status import metrics_routes, status_routes
from headwater_server.gateway.sampler import Sampler
from headwater_server.security.key_check import UNKNOWN, KeyRing
from headwater_server.security.keys import OPEN, Key, scopes_for
from headwater_server.security.operator import OperatorGuard
from headwater_server.security.rate_limits import LimitFiles
from headwater_server.security.scopes import SCOPES
from headwater_server.telemetry.ledger import Ledger
from headwater_server.telemetry.logs import AccessLog

KEYS = {scope: f"the-key-for-{scope}" for scope in SCOPES}


class Ring:
    """A gateway with all its routes and a key for each scope, which a test changes."""

    def __init__(self, folder: Path) -> None:
        self.keys: list[Key] = [a_key(scope, KEYS[scope], scope) for scope in SCOPES]
        self.failure: Exception | None = None
        self.ring = KeyRing(self._read, LimitFiles(folder / "limits", 0, 1))
        self.models = models = Models()
        self.server = Server(access_log=False)
        sampler = Sampler(models)
        Ledger(folder / "metrics")
        self.records = RequestRecords(None, StreamLimits(15, 30))
        self.app = create_app(
            models,
            self.server,
            repository_routes(self._command, OperatorGuard(False, has_keys=True), body_reader(self.server), models),
            metrics_routes(models, folder / "metrics", sampler),
            status_routes(models, None, sampler),
            keys=self.ring,
            cors_origins=("https://app.example",),
            records=self.records,
        )
        self.commands = 0

    def _read(self) -> list[Key]:
        if self.failure is not None:
            raise self.failure
        return self.keys

    async def _command(self, action: str, model: str, arguments: Mapping[str, Any]) -> CommandAnswer:
        self.commands += 1
        return CommandAnswer(0, 200, {"name": model, "state": "READY"})

    def ask(self, method: str, path: str, headers: Any = None, content: bytes = b"") -> httpx.Response:
        """One request."""

        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server.example:8000") as client:
                return await client.request(method, path, headers=headers, content=content)

        return asyncio.run(send())


def a_key(name: str, text: str, *scopes: Any, **limits: Any) -> Key:
    return Key(name, hashlib.sha256(text.encode()).hexdigest(), scopes, **limits)


def bearer(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


@pytest.fixture
def gateway(tmp_path: Path) -> Ring:
    return Ring(tmp_path)


@pytest.fixture(scope="module")
def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> Ring:
    """A gateway for tests that change nothing of it."""
    return Ring(tmp_path_factory.mktemp("ring"))


# Scope x route

ANY = ("infer", "metrics", "admin")
M, V = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
TABLE: dict[tuple[str, str], tuple[str, ...]] = {
    ("GET", "/"): (),
    ("GET", "/static/{name}"): (),
    ("GET", "/docs"): (),
    ("GET", "/docs/assets/x"): (),
    ("GET", "/openapi.json"): ANY,
    ("GET", "/health"): (),
    ("GET", "/health/ready"): (),
    ("GET", "/ping"): (),
    ("GET", "/v2/health/live"): (),
    ("GET", "/v2/health/ready"): (),
    ("GET", f"{M}/ready"): (),
    ("GET", f"{V}/ready"): (),
    ("GET", "/info"): ANY,
    ("GET", "/version"): ANY,
    ("GET", "/api/version"): ANY,
    ("GET", "/api/tags"): ANY,
    ("POST", "/api/show"): ANY,
    ("GET", "/props"): ANY,
    ("GET", "/v2"): ANY,
    ("GET", "/v2/"): ANY,
    ("GET", "/v2/models/stats"): ANY,
    ("GET", M): ANY,
    ("GET", V): ANY,
    ("GET", f"{M}/config"): ANY,
    ("GET", f"{V}/config"): ANY,
    ("GET", f"{M}/stats"): ANY,
    ("GET", f"{V}/stats"): ANY,
    ("GET", "/v2/repository/index"): ANY,
    ("POST", "/v2/repository/index"): ANY,
    ("GET", "/v2/status"): ANY,
    ("GET", "/v1/models"): ANY,
    ("GET", "/v1/models/{model}"): ANY,
    ("POST", f"{M}/infer"): ("infer",),
    ("POST", f"{V}/infer"): ("infer",),
    ("POST", f"{M}/generate"): ("infer",),
    ("POST", f"{V}/generate"): ("infer",),
    ("POST", f"{M}/generate_stream"): ("infer",),
    ("POST", f"{V}/generate_stream"): ("infer",),
    ("POST", "/v2/requests/{request_id:path}/cancel"): ("infer",),
    ("POST", "/v1/chat/completions"): ("infer",),
    ("POST", "/v1/completions"): ("infer",),
    ("POST", "/v1/responses"): ("infer",),
    ("POST", "/v1/messages"): ("infer",),
    ("POST", "/v1/messages/count_tokens"): ("infer",),
    ("POST", "/v1/embeddings"): ("infer",),
    ("POST", "/v1/embed"): ("infer",),
    ("POST", "/v2/embed"): ("infer",),
    ("POST", "/embed"): ("infer",),
    ("POST", "/embed_all"): ("infer",),
    ("POST", "/embed_sparse"): ("infer",),
    ("POST", "/similarity"): ("infer",),
    ("POST", "/predict"): ("infer",),
    ("POST", "/decode"): ("infer",),
    ("POST", "/classify"): ("infer",),
    ("POST", "/score"): ("infer",),
    ("POST", "/v1/score"): ("infer",),
    ("POST", "/pooling"): ("infer",),
    ("POST", "/invocations"): ("infer",),
    ("POST", "/"): ("infer",),
    ("POST", "/v1/rerank"): ("infer",),
    ("POST", "/v2/rerank"): ("infer",),
    ("POST", "/rerank"): ("infer",),
    ("POST", "/v1/audio/transcriptions"): ("infer",),
    ("POST", "/v1/classify"): ("infer",),
    ("POST", "/tokenize"): ("infer",),
    ("POST", "/detokenize"): ("infer",),
    ("GET", "/metrics"): ("metrics",),
    ("POST", "/v2/repository/models/{model}/load"): ("admin",),
    ("POST", "/v2/repository/models/{model}/unload"): ("admin",),
    ("POST", "/v2/repository/models/{model}/reload"): ("admin",),
    ("POST", "/v2/repository/models/{model}/scale"): ("admin",),
    ("POST", "/v2/repository/models/{model}/promote"): ("admin",),
    ("POST", "/v2/repository/models/{model}/rollback"): ("admin",),
}


def routes(found: list[BaseRoute]) -> set[tuple[str, str]]:
    """Method and path of every route; FastAPI keeps what was included in routers of its own."""
    pairs: set[tuple[str, str]] = set()
    for route in found:
        if isinstance(route, Mount):
            pairs.add(("GET", f"{route.path}/x"))
        elif isinstance(route, (Route, APIRoute)):
            pairs.update((method, route.path) for method in (route.methods or ()) if method != "HEAD")
        else:
            original = getattr(route, "original_router", None) or getattr(route, "router", None)
            assert original is not None, route
            pairs |= routes(original.routes)
    return pairs


def test_the_table_has_every_route(gateway: Ring) -> None:
    framework = gateway.app.framework
    assert isinstance(framework, FastAPI)
    assert routes(framework.routes) == set(TABLE)


def filled(path: str) -> str:
    for name, value in (("{model}", "m"), ("{version}", "1"), ("{request_id:path}", "a/b"), ("{name}", "page.js")):
        path = path.replace(name, value)
    return path


def test_the_page_on_security_has_the_scope_of_each_route() -> None:
    page = (Path(__file__).parents[3] / "docs/security.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.partition("### Scopes")[2].split("\n\n")[1].splitlines()[2:]]
    named = {row[1].strip("`"): re.findall("`([^`]+)`", row[0]) for row in rows}
    assert named.keys() == {"none", "infer", "metrics", "admin", "any"}
    for (method, path), scopes in TABLE.items():
        place = {(): "none", ANY: "any"}.get(scopes) or scopes[0]
        path = "POST /" if (method, path) == ("POST", "/") else path  # GET needs no key
        short = path.replace("{model}", "{m}").replace("{request_id:path}", "{id}").replace("/versions/{version}", "")
        found = [
            scope
            for scope, names in named.items()
            for name in names
            if name in (short, short.rpartition("/")[2]) or (name.endswith("/...") and short.startswith(name[:-3]))
        ]
        assert set(found) == {place} or (not found and place == "any") or short.startswith("/docs/"), (path, found)


OPENAI = [(method, path) for method, path in TABLE if path.startswith("/v1/")]


@pytest.mark.parametrize(("method", "path"), OPENAI, ids=lambda one: one)
def test_further_slashes_change_no_scope(shared_gateway: Ring, method: str, path: str) -> None:
    path = filled(path)
    for other in (f"{path}/", path.replace("/v1/", "/v1//"), f"{path}//", path.replace("/v1/", "/v1%2F%2F")):
        assert shared_gateway.ask(method, other).status_code == 401
        for scope in SCOPES:
            plain = shared_gateway.ask(method, path, bearer(scope))
            assert shared_gateway.ask(method, other, bearer(scope)).status_code == plain.status_code, (other, scope)


@pytest.mark.parametrize(("method", "path"), TABLE, ids=lambda one: one)
def test_each_route_takes_keys_of_its_scopes_only(shared_gateway: Ring, method: str, path: str) -> None:
    scopes = TABLE[method, path]
    assert scopes_for(method, filled(path)) == scopes
    anonymous = shared_gateway.ask(method, filled(path))
    assert (anonymous.status_code != 401) == (not scopes)
    assert shared_gateway.ask(method, filled(path), bearer("wrong")).status_code == anonymous.status_code
    if not scopes:
        return
    assert anonymous.headers["www-authenticate"] == "Bearer"
    for scope in SCOPES:
        for headers in (bearer(KEYS[scope]), {"x-api-key": KEYS[scope]}):
            answer = shared_gateway.ask(method, filled(path), headers, b"{}")
            assert (answer.status_code in (401, 403)) == (scope not in scopes), (scope, answer.text)
            if scope not in scopes:
                assert answer.status_code == 403
                assert f"`{scope}`" in answer.text


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "TRACE", "OPTIONS", "POKE"])
@pytest.mark.parametrize(
    "path",
    ["/nothing", "/v3", "//v2/models/m/infer", "/v2/models/m/infer/", "/v2/health/live/", "/v2/health/../models",
     "/v2/models/a%2Fb/ready", "/metrics/", "/METRICS", "/docs/", "/v2/models//ready", "/v2/health/live%00"],
)  # fmt: skip
def test_what_is_no_route_asks_for_a_key_too(shared_gateway: Ring, method: str, path: str) -> None:
    assert shared_gateway.ask(method, path).status_code == 401


@given(st.sampled_from(["GET", "POST", "HEAD", "PUT"]), st.text(max_size=30))
def test_only_what_is_named_is_open(method: str, rest: str) -> None:
    for path in (f"/{rest}", f"/v2/{rest}", f"/v2/models/{rest}", f"/v2/repository/models/{rest}", f"/v1/{rest}"):
        if scopes_for(method, path) == OPEN:
            assert method in ("GET", "HEAD")
            assert path in ("/", "/docs") or path.startswith(("/static/", "/docs/assets/")) or path.endswith(
                ("/ready", "/live")
            )  # fmt: skip
    assert scopes_for("POST", f"/v2/repository/models/{rest}") == ("admin",)
    assert scopes_for("POST", f"/v2/models/{rest}") == ("infer",)


# Routes without a scope

SECRET = "postgres://user:password@db"


@pytest.mark.parametrize(
    ("path", "about"),
    [
        ("/v2/health/ready", {"ready": False}),
        ("/health", {"ready": False}),
        ("/health/ready", {"ready": False}),
        ("/v2/health/ready?model=hidden", {"ready": False}),
        ("/v2/models/hidden/ready", {"ready": False, "name": "hidden"}),
        ("/v2/models/hidden/versions/1/ready", {"ready": False, "name": "hidden"}),
        ("/v2/models/hidden/versions/77/ready", {}),
        ("/v2/models/nope/ready", {}),
        ("/v2/health/ready?model=nope", {}),
        ("/v2/health/ready?model=hidden&model=nope", {}),
    ],
)
@pytest.mark.parametrize("state", [State.LOADING, State.FAILED])
def test_without_a_key_nobody_learns_reasons_or_names(gateway: Ring, path: str, about: object, state: State) -> None:
    reason = f"RuntimeError: can't connect to {SECRET}"
    route = DeploymentRoute("hidden", state, reason, failure=reason, kind=GraphKind(is_open=False))
    gateway.models.update(RoutingTable((route, msgspec.structs.replace(route, name="hidden-too"))))
    for headers in ({}, bearer("wrong")):
        answer = gateway.ask("GET", path, headers)
        body = answer.json()
        text = body.pop("error")
        assert (answer.status_code, body) == (503 if about else 404, about)
        assert "hidden-too" not in text
        assert SECRET not in text
        assert state.value not in text
        assert ("hidden" in text) == (about != {} and "hidden" in path)
        assert answer.headers.get("retry-after") == ("2" if about else None)
    with_key = gateway.ask("GET", path, bearer(KEYS["metrics"])).json()["error"]
    assert SECRET in with_key or "hidden" in with_key or "expected '1'" in with_key


# What is refused, and how


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer("wrong"),
        bearer(KEYS["infer"] + "x"),
        bearer(KEYS["infer"][:-1]),
        bearer("x" * 513),
        bearer("x" * 20_000),
        {"authorization": KEYS["infer"]},
        {"authorization": f"Basic {KEYS['infer']}"},
        {"x-api-key": ""},
        {"x-api-key": "clé".encode()},
        {"x-api-key": b"\xff\xfe\x80"},
        [("x-api-key", KEYS["infer"]), ("x-api-key", "other")],
    ],
    ids=str,
)
def test_every_reason_is_the_same_401(gateway: Ring, headers: Any) -> None:
    answer = gateway.ask("POST", "/v2/models/m/infer", headers)
    assert (answer.status_code, answer.json()) == (401, {"error": UNKNOWN})
    openai = gateway.ask("POST", "/v1/chat/completions", headers)
    about = {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
    assert openai.json() == {"error": {"message": UNKNOWN, **about}}
    assert openai.headers["x-request-id"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(name=st.sampled_from([b"authorization", b"x-api-key"]), value=st.binary(max_size=600))
def test_any_bytes_for_a_key_are_a_401(gateway: Ring, name: bytes, value: bytes) -> None:
    assert gateway.ask("GET", "/v2", [(name, value)]).status_code == 401


def test_neither_logs_nor_answers_tell_a_key(gateway: Ring, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    log = AccessLog(stream, "json", payloads=True)
    gateway.records.log = log

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(gateway.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server.example:8000") as client:
            answers = [
                await client.request(method, path, headers=bearer(text), content=b"{")
                for text in (*KEYS.values(), "a-wrong-key")
                for method, path in (("POST", "/v2/models/m/infer"), ("GET", "/v2"), ("GET", "/nothing"))
            ]
        log.flush()
        return answers

    with caplog.at_level(logging.DEBUG):
        answers = asyncio.run(ask())
    texts = stream.getvalue() + caplog.text + "".join(f"{answer.text} {answer.headers}" for answer in answers)
    assert not any(text in texts for text in (*KEYS.values(), "a-wrong-key"))
    assert stream.getvalue().count('"key":"infer"') == 3
    assert stream.getvalue().count('"status":401') == 3


# Changes


def test_a_revoked_key_is_good_no_more_and_a_new_one_is(gateway: Ring) -> None:
    gateway.keys = [a_key("new", "new-text", "infer")]
    assert gateway.ask("GET", "/v2", bearer(KEYS["infer"])).status_code == 200
    gateway.ring.renew()
    assert gateway.ask("GET", "/v2", bearer(KEYS["infer"])).status_code == 401
    assert gateway.ask("GET", "/v2", bearer("new-text")).status_code == 200


class Revoking(Ring):
    """A gateway whose keys are all revoked while a command runs."""

    async def _command(self, action: str, model: str, arguments: Mapping[str, Any]) -> CommandAnswer:
        self.keys = []
        self.ring.renew()
        return await super()._command(action, model, arguments)


def test_a_request_under_way_finishes_when_its_key_is_revoked(tmp_path: Path) -> None:
    gateway = Revoking(tmp_path)
    path = "/v2/repository/models/m/unload"
    assert [gateway.ask("POST", path, bearer(KEYS["admin"])).status_code for _ in range(2)] == [200, 401]


def test_keys_that_cannot_be_read_leave_those_that_were(gateway: Ring, caplog: pytest.LogCaptureFixture) -> None:
    gateway.failure = ConfigError("keys.json: broken")
    gateway.ring.renew()
    assert "keeping the previous ones: keys.json: broken" in caplog.text
    assert gateway.ask("GET", "/v2", bearer(KEYS["infer"])).status_code == 200


def test_a_worker_that_never_could_read_them_lets_nobody_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def read() -> list[Key]:
        raise ConfigError("broken")

    ring = KeyRing(read, LimitFiles(tmp_path / "limits", 0, 1))
    with pytest.raises(Unauthorized):
        ring.admit({"method": "GET", "path": "/v2", "headers": [(b"x-api-key", KEYS["infer"].encode())], "state": {}})
    assert "no API key is valid" in caplog.text


# Limits


def test_a_keys_limit_is_its_own(gateway: Ring) -> None:
    gateway.keys += [a_key("slow", "slow-text", "infer", requests_per_second=0.01)]
    gateway.ring.renew()
    assert gateway.ask("GET", "/v2", bearer("slow-text")).status_code == 200
    answer = gateway.ask("GET", "/v2", bearer("slow-text"))
    assert answer.status_code == 429
    assert 98 <= int(answer.headers["retry-after"]) <= 100
    assert "requests_per_second" in answer.json()["error"]
    assert gateway.ask("POST", "/v1/embeddings", bearer("slow-text")).json()["error"]["type"] == "rate_limit_error"
    assert gateway.ask("GET", "/v2", bearer(KEYS["infer"])).status_code == 200
    assert gateway.ask("GET", "/v2/health/live", bearer("slow-text")).status_code == 200


def test_a_request_that_ends_in_any_way_makes_room(gateway: Ring) -> None:
    gateway.keys += [a_key("one", "one-text", "infer", concurrent=1)]
    gateway.ring.renew()
    for path in ("/v2", "/v2/models/m", "/nothing", "/v2/models/m/infer"):
        assert gateway.ask("GET", path, bearer("one-text")).status_code != 429


def test_a_wrong_scope_costs_nothing(gateway: Ring) -> None:
    gateway.keys += [a_key("one", "one-text", "metrics", requests_per_second=0.01)]
    gateway.ring.renew()
    for _ in range(3):
        assert gateway.ask("POST", "/v2/models/m/infer", bearer("one-text")).status_code == 403
    assert gateway.ask("GET", "/v2", bearer("one-text")).status_code == 200


# Operators, and web pages

ADMIN = bearer(KEYS["admin"])


def test_an_operator_with_a_key_commands_from_anywhere(gateway: Ring) -> None:
    for headers in ({}, {"x-forwarded-for": "10.0.0.1"}, {"origin": "http://server.example:8000"},
                    {"origin": "https://server.example:8000"}):  # fmt: skip
        assert gateway.ask("POST", "/v2/repository/models/m/unload", {**ADMIN, **headers}).status_code == 200
    assert gateway.commands == 4


@pytest.mark.parametrize("origin", ["https://app.example", "http://server.example", "null", "https://evil.example"])
def test_no_other_page_commands_even_with_a_key(gateway: Ring, origin: str) -> None:
    answer = gateway.ask("POST", "/v2/repository/models/m/unload", {**ADMIN, "origin": origin})
    assert answer.status_code == 403
    assert "no web page may" in answer.json()["error"]
    assert gateway.commands == 0


def test_a_page_of_a_named_origin_may_ask(gateway: Ring) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST",
             "access-control-request-headers": "authorization, content-type"}  # fmt: skip
    preflight = gateway.ask("OPTIONS", "/v1/chat/completions", asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    for headers in ({}, bearer(KEYS["infer"])):
        answer = gateway.ask("GET", "/v2", {"origin": "https://app.example", **headers})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "access-control-allow-credentials" not in answer.headers


def test_a_page_of_another_origin_may_not(gateway: Ring) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in gateway.ask("OPTIONS", "/v1/chat/completions", asked).headers
    answer = gateway.ask("GET", "/v2", {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("method", "path"), [("GET", "/v2"), ("POST", "/v2/models/m/infer")])
def test_who_is_no_page_hears_nothing_of_origins(gateway: Ring, method: str, path: str) -> None:
    headers = gateway.ask(method, path, bearer(KEYS["infer"])).headers
    assert "vary" not in headers
    assert not any(name.startswith("access-control-") for name in headers)


async def test_without_origins_and_keys_neither_is_in_the_way() -> None:
    app = create_app(Models(), Server(access_log=False))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server.example") as client:
        headers = {"origin": "https://app.example"}
        answers = [await client.get("/v2", headers=headers), await client.post("/v2/models/m/infer", headers=headers)]
    assert [answer.status_code for answer in answers] == [200, 404]
    assert not any("access-control-allow-origin" in answer.headers for answer in answers)


@pytest.mark.parametrize(("method", "path"), [("POST", "/v2/models/m/infer"), ("GET", "/v2")])
async def test_a_fault_before_any_endpoint_is_answered_and_logged_with_the_requests_id(
    gateway: Ring, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    def fail(scope: Scope) -> None:
        raise OSError("no locks")

    monkeypatch.setattr(gateway.ring, "admit", fail)

    transport = httpx.ASGITransport(gateway.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server.example") as client:
        answer = await client.request(method, path, headers={**bearer(KEYS["infer"]), "x-request-id": "r-1"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "r-1")
    assert "request id r-1" in answer.json()["error"]
    assert "request r-1 failed in the gateway" in caplog.text


def test_a_page_of_a_named_origin_may_infer(gateway: Ring) -> None:
    headers = {"origin": "https://app.example", **bearer(KEYS["infer"])}
    answer = gateway.ask("POST", "/v2/models/m/infer", headers, b"{}")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (404, "https://app.example")


# The schema


def test_the_schema_says_which_keys_are_taken(gateway: Ring) -> None:
    schema = gateway.ask("GET", "/openapi.json", bearer(KEYS["infer"])).json()
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "header"}
    assert schema["paths"]["/v2/health/live"]["get"]["security"] == []
    load = schema["paths"]["/v2/repository/models/{model}/load"]["post"]
    assert load["security"] == [{"bearer": []}, {"header": []}]
    assert "401" in load["responses"]
