"""Commands on models under ``POST /v2/repository/models/{model}/``: ``load`` and ``unload`` of Triton's repository
extension, and Headwater's ``reload``, ``scale``, ``promote`` and ``rollback``."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import TypeAdapter, ValidationError

from headwater_server.codecs.faults import at, read_json, shown
from headwater_server.config.overlay import FIELD, MAX_CONFIG_BYTES
from headwater_server.config.sections import ReplicaBounds, Replicas
from headwater_server.control.messages import CommandAnswer
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.triton_requests import change_repository
from headwater_server.security.operator import OperatorGuard
from headwater_server.triton.request_json import check_depth

__all__ = ["repository_routes"]

_WITH_CONFIG: Final = ("load", "reload")
_WITH_TRITON: Final = ("load", "unload")
"""The commands that a Triton has for a model of its repository."""
_NO_FILES: Final = "not supported: models are read from this machine's files, never from a request"
_REPLICAS: Final[TypeAdapter[ReplicaBounds]] = TypeAdapter(Replicas)
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is wrong, or the configuration in it"},
    403: {"description": "Only for an operator on the server's own machine; or `server.allow_load` forbids it"},
    404: {"description": "There is no such model"},
    409: {"description": "The model's state doesn't allow it, or something else is under way with it"},
}


class _CommandBody(msgspec.Struct, forbid_unknown_fields=True):
    parameters: dict[str, Any] = {}


class _Scale(msgspec.Struct, forbid_unknown_fields=True):
    replicas: int | None = None
    min: int | None = None
    max: int | None = None


class _Promote(msgspec.Struct, forbid_unknown_fields=True):
    version: str


class _Rollback(msgspec.Struct, forbid_unknown_fields=True):
    undo: bool = False


def repository_routes(
    command: Callable[[str, str, Mapping[str, Any]], Awaitable[CommandAnswer]],
    guard: OperatorGuard,
    reader: BodyReader,
    models: Models,
) -> APIRouter:
    """The routes of the commands.

    Args:
        command: has the supervisor carry out an action on a model, given the action's arguments.
        guard: decides who may give commands.
        reader: reads the bodies.
        models: has the models of Triton's repositories, whose commands are relayed.
    """
    router = APIRouter(tags=["operations"], responses=_REFUSALS)

    def add(action: str, summary: str) -> None:
        @router.post(f"/v2/repository/models/{{model}}/{action}", summary=summary, name=action)
        async def answer(request: Request, model: str) -> Response:
            guard.check(request.headers)
            body, _ = await reader.read(request.scope, request.receive)
            repository = models.repository(model)
            if repository is not None and action in _WITH_TRITON:
                await decoded(_check_load, body, request.scope)
                reply = await change_repository(repository, model, action, body)
                content, headers = reply.content()
                return Response(content, reply.status, {name.decode(): value.decode() for name, value in headers})
            arguments = await decoded(functools.partial(_arguments, action=action), body, request.scope)
            answer = await command(action, model, arguments)
            return JSONResponse(answer.content, answer.status)

    add("load", "Load a model that is not loaded")
    add("unload", "Unload a model, and see that nothing of it remains")
    add("reload", "Replace a model's replicas without a gap")
    add("scale", "Have another number of a model's replicas")
    add("promote", "Give a version all of a model's requests")
    add("rollback", "Undo the last change of how a model's versions share its requests")
    return router


def _check_load(body: bytes) -> None:
    """Refuse a command to load a model of a repository from files in the request, or with a configuration that would
    end Triton. Raises `BadRequest`."""
    hint = 'expected {"parameters": {...}} or an empty body'
    options: _CommandBody = read_json(body if body.strip() else b"{}", _CommandBody, hint=hint)
    for name, value in options.parameters.items():
        if name.startswith("file:"):
            raise BadRequest(f"parameters.{name[:100]}: {_NO_FILES}", field="parameters")
        if isinstance(value, str):
            check_depth(value.encode("utf-8", "surrogatepass"), f"parameters.{name[:100]}")


def _bounds(body: bytes) -> dict[str, Any]:
    """The ``min`` and ``max`` of replicas that a body asks for; equal if it asks for ``replicas``.

    Raises:
        BadRequest: the body has neither ``replicas`` nor ``max``, has both, or has a wrong value.
    """
    expected = 'expected {"replicas": 3}, or {"min": 1, "max": 3}'
    scale: _Scale = read_json(body, _Scale, hint=expected)
    if (scale.replicas is None) == (scale.max is None) or (scale.replicas is not None and scale.min is not None):
        raise at("body", None, f"{expected}, got {body.decode()[:100]}")
    wanted = scale.replicas if scale.replicas is not None else {"min": scale.min or 1, "max": scale.max}
    try:
        return _REPLICAS.validate_python(wanted).model_dump()
    except ValidationError as error:
        text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise at("body", None, f"{expected}: {text}, got {body.decode()[:100]}") from error


def _arguments(body: bytes, action: str) -> dict[str, Any]:
    """Read an action's arguments from a body.

    Raises:
        BadRequest: the body is wrong, or has a parameter of Triton's that is not supported.
    """
    if action == "scale":
        return _bounds(body)
    if action == "promote":
        promoted: _Promote = read_json(body, _Promote, hint='expected {"version": "2"}')
        return {"version": promoted.version}
    if action == "rollback":
        hint = 'expected {"undo": true} or an empty body'
        rollback: _Rollback = read_json(body if body.strip() else b"{}", _Rollback, hint=hint)
        return {"undo": rollback.undo}
    arguments: dict[str, Any] = {}
    hint = 'expected {"parameters": {...}} or an empty body'
    options: _CommandBody = read_json(body if body.strip() else b"{}", _CommandBody, hint=hint)
    for name, value in options.parameters.items():
        if name == "unload_dependents" and action == "unload":
            if value is not False:
                why = "a pipeline is unloaded together with its steps, and no other model depends on them"
                message = f"expected false, got {shown(value)}: not supported; {why}"
                raise at("parameters.unload_dependents", None, message)
        elif name == "config" and action in _WITH_CONFIG:
            if not isinstance(value, str) or len(value) > MAX_CONFIG_BYTES:
                expected = f"expected a deployment's section as JSON text of at most {MAX_CONFIG_BYTES} characters"
                raise at(FIELD, None, expected)
            arguments["config"] = value
        elif name.startswith("file:") and action in _WITH_CONFIG:
            raise BadRequest(f"parameters.{name[:100]}: {_NO_FILES}", field="parameters")
        else:
            raise BadRequest(f"parameters.{name[:100]}: unknown; {action} has no such parameter", field="parameters")
    return arguments
