"""Endpoints are reached past the framework, and nothing else is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from app.gateway.http.entry import Endpoint, EndpointRoute, EndpointShortcut
from app.gateway.http.replies import Reply


class Asked(Endpoint):
    """Notes by what it was asked."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        self.scopes.append(scope)
        return Reply(204, [b""], [])


def ask(method: str, path: str, kind: str = "http") -> tuple[list[Scope], list[Scope]]:
    """What the endpoint is asked, and what the framework."""
    endpoint = Asked()
    others: list[Scope] = []

    async def framework(scope: Scope, receive: Receive, send: Send) -> None:
        others.append(scope)

    async def nothing(*_: Any) -> Any:
        return {}

    routes = [
        EndpointRoute("/v2/models/{model}/generate", endpoint, methods=["POST"]),
        EndpointRoute("/v2/requests/{request_id:path}/cancel", endpoint, methods=["POST"]),
    ]
    scope = {"type": kind, "method": method, "path": path, "headers": [], "state": {}}
    asyncio.run(EndpointShortcut(framework, routes)(scope, nothing, nothing))
    return endpoint.scopes, others


@pytest.mark.parametrize(
    ("path", "found", "route"),
    [
        ("/v2/models/m/generate", {"model": "m"}, "/v2/models/{model}/generate"),
        ("/v2/requests/a/b/cancel", {"request_id": "a/b"}, "/v2/requests/{request_id:path}/cancel"),
    ],
)
def test_an_endpoint_learns_what_the_router_would_have_told(path: str, found: dict[str, str], route: str) -> None:
    (scope,), others = ask("POST", path)
    assert not others
    assert scope["path_params"] == found
    assert scope["route"].path == route


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/v2/models/m/generate", "http"),
        ("POST", "/v2/models/m/generate/", "http"),
        ("POST", "/v2/models/a/b/generate", "http"),
        ("POST", "/v2", "http"),
        ("POST", "/v2/models/m/generate", "websocket"),
    ],
)
def test_all_else_goes_on_as_it_came(method: str, path: str, kind: str) -> None:
    asked, (scope,) = ask(method, path, kind)
    assert not asked
    assert scope == {"type": kind, "method": method, "path": path, "headers": [], "state": {}}
