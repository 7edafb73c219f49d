"""Requests for the models of a Triton model repository: they are checked, counted, and relayed as they are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Literal
from urllib.parse import quote

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from headwater_server.errors import HeadwaterError
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.http.exchange import DisconnectWatch
from headwater_server.gateway.http.replies import Reply, error_reply
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.gateway.routes.streams import open_stream
from headwater_server.lm.openai_answer import Event
from headwater_server.telemetry.recorder import accept
from headwater_server.triton.relayed_calls import RelayedRequest, TritonAnswer
from headwater_server.triton.repository_dispatcher import TritonDispatcher
from headwater_server.triton.request_json import check_depth, sequence_parameters

__all__ = ["RelayedMetadata", "answer_relayed", "change_repository", "repository_index", "repository_statistics"]

Action = Literal["infer", "generate", "generate_stream"]
_MODELS: Final = "/v2/models/"
MAX_DIGITS: Final = 18
"""Most digits of ``Inference-Header-Content-Length``."""
_SAFE: Final = "+@:,=~"
"""What stays as it is in a path: Triton decodes no names."""
_READ: Final = frozenset({"", "config", "stats", "ready"})
"""What can be read of a model: the last part of the path, empty for the metadata."""


async def answer_relayed(
    models: Models, reader: BodyReader, scope: Scope, receive: Receive, model: ServedModel, action: Action
) -> ASGIApp:
    """Relay a request for a model of a repository, and its answer whole or as events.

    Raises:
        HeadwaterError: the request can't be relayed.
    """
    dispatcher = model.dispatcher
    assert isinstance(dispatcher, TritonDispatcher)
    dispatcher.check_model(model.name)
    accept(scope, model.name, action)
    body, headers = await reader.read(scope, receive)
    more = "".join(f"{name}: {value}\r\n" for name, value in dispatcher.forwarded(scope["headers"]))
    length = headers.get(b"inference-header-content-length")
    header_length = int(length) if length is not None and length.isdigit() and len(length) <= MAX_DIGITS else None
    if length is not None and header_length is None:  # Triton says what is wrong with it
        more += f"Inference-Header-Content-Length: {length.decode('latin-1')}\r\n"
    check_depth(body[:header_length])
    content_type = headers.get(b"content-type", b"application/json").decode("latin-1")
    path = _path(model.name, scope["path_params"].get("version"), action)
    request = RelayedRequest("POST", path, body, content_type, more, header_length)
    sequence = dispatcher.sequence_of(
        model.name, lambda: sequence_parameters(body, header_length, are_fields=action != "infer")
    )
    key: str = scope["state"].get("key") or ""
    with DisconnectWatch(scope, receive):
        if action != "generate_stream":
            return _reply(await dispatcher.ask(request, key, sequence))
        answers = dispatcher.events(request, key, sequence)
        try:
            first = await anext(answers, None)
        except BaseException:
            await answers.aclose()
            raise
        if isinstance(first, TritonAnswer):
            await answers.aclose()
            return _reply(first)
        return await open_stream(models, _events(first, answers), _last_events)


async def _events(
    first: bytes | None, answers: AsyncGenerator[bytes | TritonAnswer, None]
) -> AsyncGenerator[Event, None]:
    try:
        if first is not None:
            yield first
        async for event in answers:
            assert isinstance(event, bytes)
            yield event
    finally:
        await answers.aclose()


def _last_events(error: HeadwaterError | None) -> Sequence[Event]:
    return [] if error is None else [orjson.dumps({"error": error.message})]


def _reply(answer: TritonAnswer) -> Reply:
    return Reply(answer.status, [answer.body], answer.headers)


def _path(name: str, version: str | None, action: str) -> str:
    versions = "" if version is None else f"/versions/{quote(version, safe=_SAFE)}"
    return f"{_MODELS}{quote(name, safe=_SAFE)}{versions}{'/' if action else ''}{action}"


class RelayedMetadata:
    """Answers what can be read of models of repositories, as Triton answers it.

    Args:
        app: answers all other requests.
        models: all models of this worker.
    """

    def __init__(self, app: ASGIApp, models: Models) -> None:
        self._app = app
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an ASGI scope."""
        found = self._find(scope) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        if found is None:
            await self._app(scope, receive, send)
            return
        dispatcher, path = found
        try:
            reply = _reply(await dispatcher.ask(RelayedRequest("GET", path)))
        except HeadwaterError as error:
            reply = error_reply(error, scope)
        await reply(scope, receive, send)

    def _find(self, scope: Scope) -> tuple[TritonDispatcher, str] | None:
        path: str = scope["path"]
        if not path.startswith(_MODELS):
            return None
        name, *rest = path[len(_MODELS) :].split("/")
        version = rest[1] if len(rest) > 1 and rest[0] == "versions" else None
        action = "/".join(rest if version is None else rest[2:])
        dispatcher = self._models.repository(name)
        if dispatcher is None or action not in _READ:
            return None
        return dispatcher, _path(name, version, action)


async def repository_index(models: Models, *, is_ready: bool) -> tuple[list[dict[str, Any]], set[str]]:
    """The entries of Triton's index for the models of all repositories, only of models that are ready if ``is_ready``;
    and the names of the deployments of the repositories, without those that accept no requests now."""
    body = orjson.dumps({"ready": True} if is_ready else {})
    return await _gathered(models, RelayedRequest("POST", "/v2/repository/index", body), lambda found: found)


async def repository_statistics(models: Models) -> list[dict[str, Any]]:
    """Triton's statistics of the models of all repositories."""
    entries, _ = await _gathered(models, RelayedRequest("GET", "/v2/models/stats"), lambda found: found["model_stats"])
    return entries


async def _gathered(models: Models, request: RelayedRequest, read: Any) -> tuple[list[dict[str, Any]], set[str]]:
    entries: list[dict[str, Any]] = []
    answered: set[str] = set()
    for dispatcher in models.repositories():
        try:
            answer = await dispatcher.ask(request)
        except HeadwaterError:  # the index says of the deployment why
            continue
        if answer.status == 200:
            entries += read(orjson.loads(answer.body))
            answered.add(dispatcher.route.name)
    return entries, answered


async def change_repository(dispatcher: TritonDispatcher, name: str, action: str, body: bytes) -> Reply:
    """Relay a command of Triton's repository extension to all replicas.

    Args:
        dispatcher: the repository.
        name: a model's name.
        action: ``load`` or ``unload``.
        body: the request's body.

    Raises:
        HeadwaterError: see `TritonDispatcher.change_model`.
    """
    path = f"/v2/repository/models/{quote(name, safe=_SAFE)}/{action}"
    return _reply(await dispatcher.change_model(name, RelayedRequest("POST", path, body or b"{}")))
