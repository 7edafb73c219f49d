"""Endpoints are reached past the framework, and nothing else is; what proxies say of clients."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater_server.gateway.http.endpoint import Endpoint, EndpointRoute
from headwater_server.gateway.http.entry import INFER_PATH, Entry, RequestRecords
from headwater_server.gateway.http.event_stream import StreamLimits
from headwater_server.gateway.http.replies import Reply


class Asked(Endpoint):
    """Notes by what it was asked."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        self.scopes.append(scope)
        return Reply(204, [b""], [])


def ask(method: str, path: str, kind: str = "http", **more: Any) -> tuple[list[Scope], list[Scope]]:
    """What the endpoint is asked, and what the framework."""
    endpoint = Asked()
    others: list[Scope] = []

    async def framework(scope: Scope, receive: Receive, send: Send) -> None:
        others.append(scope)

    async def nothing(*_: Any) -> Any:
        return {}

    routes = [
        EndpointRoute("/v2/models/{model}/generate", endpoint),
        EndpointRoute(INFER_PATH, endpoint),
        EndpointRoute("/v2/requests/{request_id:path}/cancel", endpoint),
        EndpointRoute("/v1/chat/completions", endpoint),
        EndpointRoute("/rerank", endpoint),
    ]
    scope = {"type": kind, "method": method, "path": path, "query_string": b"", "headers": [], "state": {}, **more}
    entry = Entry(framework, routes, RequestRecords(None, StreamLimits()))
    asyncio.run(entry(scope, nothing, nothing))
    return endpoint.scopes, others


@pytest.mark.parametrize(
    ("path", "found", "route"),
    [
        ("/v2/models/m/generate", {"model": "m"}, "/v2/models/{model}/generate"),
        ("/v2/models/m/infer", {"model": "m"}, INFER_PATH),
        ("/v2/requests/a/b/cancel", {"request_id": "a/b"}, "/v2/requests/{request_id:path}/cancel"),
    ],
)
def test_an_endpoint_learns_what_the_router_would_have_told(path: str, found: dict[str, str], route: str) -> None:
    (scope,), others = ask("POST", path)
    assert not others
    assert scope["path_params"] == found
    assert scope["route"].path == route


@pytest.mark.parametrize(
    "path",
    [
        "/v1//chat/completions", "/v1/chat/completions/", "//v1/chat/completions", "///v1//chat///completions//",
    ],
)  # fmt: skip
def test_further_slashes_in_a_path_of_openais_api_are_taken_out(path: str) -> None:
    (scope,), others = ask("POST", path, raw_path=path.encode())
    assert not others
    assert (scope["path"], scope["raw_path"]) == ("/v1/chat/completions", b"/v1/chat/completions")
    assert scope["route"].path == "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "mended"),
    [
        ("/v1/models/", "/v1/models"), ("//v1//models", "/v1/models"), ("/v1/models/m/", "/v1/models/m"),
        ("/v1//models/m", "/v1/models/m"), ("/v1/models//m", "/v1/models/m"), ("/v1/models/é/", "/v1/models/é"),
    ],
)  # fmt: skip
def test_so_are_those_of_the_list_of_models(path: str, mended: str) -> None:
    _, (scope,) = ask("GET", path)
    assert (scope["path"], scope["raw_path"]) == (mended, quote(mended).encode())


@pytest.mark.parametrize(
    "path",
    [
        "/", "//", "/rerank/", "//rerank", "/v2//models/m/infer", "/v1//", "/v1/nothing/", "/v1/models/a/b/",
        "/v1/chat//", "/v2/requests/a//b/cancel", "/v1/../v1/chat/completions", "/v1/chat/completions/x/",
    ],
)  # fmt: skip
def test_other_paths_keep_their_slashes(path: str) -> None:
    asked, others = ask("GET", path)
    (scope,) = asked + others
    assert scope["path"] == path


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("GET", "/v2/models/m/generate", "http"),
        ("POST", "/v2/models/m/generate/", "http"),
        ("POST", "/v2/models/a/b/generate", "http"),
        ("POST", "/v2", "http"),
        ("GET", "/v2/models/m/infer", "http"),
        ("POST", "/v2/models//infer", "http"),
        ("POST", "/v2/models/a/b/infer", "http"),
        ("POST", "/v2/models/infer", "http"),
        ("POST", "/v2/models/m/generate", "websocket"),
    ],
)
def test_all_else_goes_on_as_it_came(method: str, path: str, kind: str) -> None:
    asked, (scope,) = ask(method, path, kind)
    assert not asked
    del scope["state"]  # has what the records put there
    assert scope == {"type": kind, "method": method, "path": path, "query_string": b"", "headers": []}


@pytest.mark.parametrize(
    ("proxy", "client", "scheme"), [("127.0.0.1", "192.0.2.7", "https"), ("192.0.2.1", "192.0.2.1", "http")]
)
@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/models/m/load"])
def test_only_a_trusted_proxy_names_the_client(path: str, proxy: str, client: str, scheme: str) -> None:
    headers = [(b"x-forwarded-for", b"192.0.2.7, 127.0.0.1"), (b"x-forwarded-proto", b"https")]
    asked, others = ask("POST", path, headers=headers, client=(proxy, 1234), scheme="http")
    (scope,) = asked or others
    assert (scope["client"][0], scope["scheme"]) == (client, scheme)
