"""Targets: what an operator sends."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from starlette.types import Message

from headwater_server.config.overlay import check_allowed, lay_over, parse_overlay
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config, Server
from headwater_server.control.messages import CommandAnswer
from headwater_server.errors import HeadwaterError
from headwater_server.gateway.app import body_reader
from headwater_server.gateway.http.body_budget import release_body
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.repository import repository_routes
from headwater_server.security.operator import OperatorGuard
from tests.fuzz.draw import body_of
from tests.fuzz.promises import check_refusal

__all__ = ["overlay", "repository"]

_CONTENT: Final[dict[str, Any]] = {
    "deployments": {
        "m": {
            "model": "headwater_server.gateway.models:M",
            "batching": {"max_batch_size": 8},
            "options": {"a": [1, {"b": 2}]},
            "replicas": 2,
        },
        "p": {"pipeline": {"trunk": {"model": "a:T"}, "heads": {"h": {"model": "a:H"}}}},
    },
}
CONFIGS: Final[dict[str, Config]] = {
    allow: read_config({**_CONTENT, "server": {"allow_load": allow}}, source="fuzz", environment={}, flags={})
    for allow in ("any", "settings", "never")
}
SEEDS: Final = Path(__file__).parent / "seeds"
OVERLAYS: Final = [path.read_bytes() for path in sorted((SEEDS / "overlay").glob("*.json"))]
BODIES: Final = [path.read_bytes() for path in sorted((SEEDS / "repository").glob("*.json"))]
ACTIONS: Final = ("load", "unload", "reload", "scale")
NAMES: Final = ("m", "p", "new", "not a name \u2028")


def overlay(data: bytes) -> bool:
    """A configuration in a request to load: refused, or one that holds, and leaves the rest as it was."""
    text = body_of(data, OVERLAYS).decode("utf-8", "replace")
    accepted = [_is_laid_over(config, name, text) for config in CONFIGS.values() for name in NAMES]
    return any(accepted)


def _is_laid_over(config: Config, name: str, text: str) -> bool:
    try:
        fields = parse_overlay(text)
        check_allowed(config, name, fields)
        laid = lay_over(config, config, name, fields)
    except HeadwaterError as error:
        check_refusal(error)
        return False
    assert set(laid.deployments) == {*config.deployments, name}
    assert laid.server == config.server
    others = {other: section for other, section in laid.deployments.items() if other != name}
    assert others == {other: section for other, section in config.deployments.items() if other != name}
    return True


def repository(data: bytes) -> bool:
    """The bodies of ``POST /v2/repository/models/{m}/...``: refused, or a command that the supervisor can read."""
    body = body_of(data, BODIES)
    statuses = [_loop().run_until_complete(_commanded(action, body)) for action in ACTIONS]
    return 200 in statuses


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _routes() -> FastAPI:
    async def command(action: str, model: str, arguments: Mapping[str, Any]) -> CommandAnswer:
        assert (action in ACTIONS, model) == (True, "m")
        assert set(arguments) <= ({"min", "max"} if action == "scale" else {"config"})
        return CommandAnswer(1, 200, {})

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HeadwaterError)
        check_refusal(error)
        return Response(status_code=error.status)

    app = FastAPI()
    app.include_router(repository_routes(command, OperatorGuard(False, has_keys=True), body_reader(Server()), Models()))
    app.add_exception_handler(HeadwaterError, refused)
    return app


async def _commanded(action: str, body: bytes) -> int:
    """The status that a command is answered with."""

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    sent: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    path = f"/v2/repository/models/m/{action}"
    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"headers": [(b"host", b"x"), (b"content-type", b"application/json")], "state": {}, "root_path": ""},
        **{"http_version": "1.1"},
    }
    await _routes()(scope, receive, send)
    release_body(scope)
    (status,) = sent
    assert status < 500
    return status
