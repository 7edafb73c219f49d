"""``POST /v2/repository/models/{model}/load``, ``/unload``, ``/reload``: Triton's repository extension."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from app.bodies import BodyReader
from app.config import Server
from app.control import CommandAnswer
from app.errors import BadRequest
from app.operator_guard import OperatorGuard

__all__ = ["repository_routes"]


_REFUSALS: dict[int | str, dict[str, Any]] = {
    403: {"description": "Only for an operator on the server's own machine"},
    409: {"description": "The model's state doesn't allow it, or something else is under way with it"},
}


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = {}


def repository_routes(
    command: Callable[[str, str], Awaitable[CommandAnswer]], guard: OperatorGuard, server: Server
) -> APIRouter:
    """The routes.

    Args:
        command: has the supervisor carry out an action on a model.
        guard: of who may.
        server: limits.
    """
    router = APIRouter(tags=["operations"], responses=_REFUSALS)
    reader = BodyReader(server.max_body_bytes, server.body_timeout_s)

    async def answer(request: Request, action: str, model: str) -> JSONResponse:
        guard.check(request.headers)
        body, _ = await reader.read(request.scope, request.receive)
        _check(body, action)
        found = await command(action, model)
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

    return router


def _check(body: bytes, action: str) -> None:
    """See whether a body asks for nothing that we don't do."""
    try:
        parameters = msgspec.json.decode(body, type=_Body).parameters if body.strip() else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f'body: expected {{"parameters": {{...}}}} or nothing: {error}', field="body") from error
    for name, value in parameters.items():
        if name == "unload_dependents" and action == "unload":
            if value is not False:
                raise BadRequest(
                    f"parameters.unload_dependents: expected false, got {value!r}: not supported; a pipeline takes its "
                    "own steps with it, and no other model depends on one",
                    field="parameters.unload_dependents",
                )
        elif name == "config" or name.startswith("file:"):
            raise BadRequest(
                f"parameters.{name[:100]}: not supported yet: a model is loaded as the server's configuration has it",
                field="parameters",
            )
        else:
            raise BadRequest(f"parameters.{name[:100]}: unknown; {action} has no such parameter", field="parameters")
