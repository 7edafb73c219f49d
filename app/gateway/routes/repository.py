"""``POST /v2/repository/models/{model}/load``, ``/unload``, ``/reload``: Triton's repository extension."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter, ValidationError

from app.codecs.faults import read_json, shown
from app.config.overlay import FIELD, MAX_CONFIG_BYTES
from app.config.schema import Server
from app.config.sections import ReplicaBounds, Replicas
from app.control.messages import CommandAnswer
from app.errors import BadRequest
from app.gateway.http.bodies import BodyReader
from app.security.operator import OperatorGuard

__all__ = ["repository_routes"]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is wrong, or the configuration in it"},
    403: {"description": "Only for an operator on the server's own machine; or `server.allow_load` forbids it"},
    404: {"description": "There is no such model"},
    409: {"description": "The model's state doesn't allow it, or something else is under way with it"},
}


WITH_CONFIG: Final = ("load", "reload")


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = {}


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    replicas: int | None = None
    min: int | None = None
    max: int | None = None


_REPLICAS: Final[TypeAdapter[ReplicaBounds]] = TypeAdapter(Replicas)


def repository_routes(
    command: Callable[[str, str, Mapping[str, Any]], Awaitable[CommandAnswer]], guard: OperatorGuard, server: Server
) -> APIRouter:
    """The routes.

    Args:
        command: has the supervisor carry out an action on a model, with what the action takes besides.
        guard: of who may.
        server: limits.
    """
    router = APIRouter(tags=["operations"], responses=_REFUSALS)
    reader = BodyReader(server.max_body_bytes, server.client_timeout_s)

    async def answer(request: Request, action: str, model: str) -> JSONResponse:
        guard.check(request.headers)
        body, _ = await reader.read(request.scope, request.receive)
        found = await command(action, model, _arguments(body, action))
        return JSONResponse(found.content, found.status)

    @router.post("/v2/repository/models/{model}/load", summary="Load a model that is not loaded")
    async def load(request: Request, model: str) -> JSONResponse:
        return await answer(request, "load", model)

    @router.post("/v2/repository/models/{model}/unload", summary="Unload a model, and see that nothing of it remains")
    async def unload(request: Request, model: str) -> JSONResponse:
        return await answer(request, "unload", model)

    @router.post("/v2/repository/models/{model}/reload", summary="Replace a model's replicas without a gap")
    async def reload(request: Request, model: str) -> JSONResponse:
        return await answer(request, "reload", model)

    @router.post("/v2/repository/models/{model}/scale", summary="Have another number of a model's replicas")
    async def scale(request: Request, model: str) -> JSONResponse:
        return await answer(request, "scale", model)

    return router


def _bounds(body: bytes) -> dict[str, Any]:
    """The ``min`` and ``max`` that a body asks for."""
    expected = 'expected {"replicas": 3}, or {"min": 1, "max": 3}'
    try:
        asked: _Scale = read_json(body, _Scale)
    except BadRequest as error:
        raise BadRequest(f"{error.message}; {expected}", field=error.field) from None
    if (asked.replicas is None) == (asked.max is None) or (asked.replicas is not None and asked.min is not None):
        raise BadRequest(f"body: {expected}, got {body.decode()[:100]}", field="body")
    wanted = asked.replicas if asked.replicas is not None else {"min": asked.min or 1, "max": asked.max}
    try:
        return _REPLICAS.validate_python(wanted).model_dump()
    except ValidationError as error:
        text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise BadRequest(f"body: {expected}: {text}, got {body.decode()[:100]}", field="body") from error


def _arguments(body: bytes, action: str) -> dict[str, Any]:
    """What a body says of an action; nothing that we don't do."""
    if action == "scale":
        return _bounds(body)
    arguments: dict[str, Any] = {}
    try:
        asked: _Body = read_json(body, _Body) if body.strip() else _Body()
    except BadRequest as error:
        expected = 'expected {"parameters": {...}} or an empty body'
        raise BadRequest(f"{error.message}; {expected}", field=error.field) from None
    for name, value in asked.parameters.items():
        if name == "unload_dependents" and action == "unload":
            if value is not False:
                raise BadRequest(
                    f"parameters.unload_dependents: expected false, got {shown(value)}: not supported; a pipeline "
                    "takes its own steps with it, and no other model depends on one",
                    field="parameters.unload_dependents",
                )
        elif name == "config" and action in WITH_CONFIG:
            if not isinstance(value, str) or len(value) > MAX_CONFIG_BYTES:
                raise BadRequest(
                    f"{FIELD}: expected a deployment's section as JSON text of at most {MAX_CONFIG_BYTES} characters",
                    field=FIELD,
                )
            arguments["config"] = value
        elif name.startswith("file:") and action in WITH_CONFIG:
            raise BadRequest(
                f"parameters.{name[:100]}: not supported: models are read from this machine's files, and none is taken "
                "from a request",
                field="parameters",
            )
        else:
            raise BadRequest(f"parameters.{name[:100]}: unknown; {action} has no such parameter", field="parameters")
    return arguments
