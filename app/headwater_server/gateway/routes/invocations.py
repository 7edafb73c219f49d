"""``POST /invocations`` of SageMaker, and ``POST /``, to which huggingface_hub's client sends: the body decides which
route answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from starlette.types import ASGIApp, Receive, Scope

from headwater_server.codecs.faults import read_json
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.http.endpoint import BodyEndpoint
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.mapped import Call

__all__ = ["InvocationsEndpoint"]

_ROUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "/v1/chat/completions": ("messages",),
    "/v1/completions": ("prompt",),
    "/rerank": ("query",),
    "/score": ("text_1", "queries", "data_1"),
    "/v2/embed": ("texts",),
}
"""The routes that a field alone decides on, each with its fields; ``query`` comes before ``texts``."""
_BY_MODEL: Final[Mapping[str, Mapping[str, str]]] = {
    "input": {"embedding": "/v1/embeddings", "classification": "/v1/classify"},
    "inputs": {"embedding": "/embed", "classification": "/predict", "reranking": "/predict"},
}
"""Fields that several routes have: by mapping of the model, the route."""


class InvocationsEndpoint(BodyEndpoint):
    """Passes a body on to the one of ``endpoints``, by path, whose fields the body has."""

    def __init__(self, models: Models, reader: BodyReader, endpoints: Mapping[str, BodyEndpoint]) -> None:
        super().__init__(reader)
        self._models = models
        self._endpoints = endpoints

    async def answer_body(self, scope: Scope, receive: Receive, raw: bytes) -> ASGIApp:
        """See `BodyEndpoint.answer_body`."""
        path = await self._path(Call(self._models, scope, receive, raw))
        return await self._endpoints[path].answer_body(scope, receive, raw)

    async def _path(self, call: Call) -> str:
        """The path of the route that a body is for. Raises `HeadwaterError` if it isn't clear."""
        body: dict[str, msgspec.Raw] = await call.read(dict[str, msgspec.Raw])
        for path, fields in _ROUTES.items():
            if not body.keys().isdisjoint(fields):
                return path
        field = next((field for field in _BY_MODEL if field in body), None)
        if field is None:
            names = ", ".join([*sum(_ROUTES.values(), ()), *_BY_MODEL])
            raise BadRequest(f"body: expected one of the fields {names}, got none of them")
        if field == "inputs" and bytes(body[field]).startswith(b"{"):
            return "/similarity"
        paths = _BY_MODEL[field]
        name = read_json(body["model"], str | None, "model", is_checked=True) if "model" in body else None
        return paths[self._models.mapping_of(call.name(name, *paths), list(paths))]
