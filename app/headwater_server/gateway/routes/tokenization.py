"""vLLM's routes for a language model's tokenizer: text to tokens and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from starlette.types import Receive, Scope

from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.endpoint import BodyEndpoint
from headwater_server.gateway.http.replies import Reply
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.texts import client_of
from headwater_server.lm.text_pool import TextPool
from headwater_server.lm.tokenize_body import DetokenizeRequest, TokenizeRequest
from headwater_server.telemetry.catalogue import Route
from headwater_server.telemetry.recorder import accept

__all__ = ["TokenizationEndpoint"]

_JSON: Final = (b"content-type", b"application/json")


class TokenizationEndpoint(BodyEndpoint):
    """Turns text into tokens, or tokens into text.

    Args:
        models: all models of this worker.
        reader: reads bodies.
        kind: the body's type, which decides the direction.
        pool: runs the tokenizer.
    """

    def __init__(
        self, models: Models, reader: BodyReader, kind: type[TokenizeRequest] | type[DetokenizeRequest], pool: TextPool
    ) -> None:
        super().__init__(reader)
        self._pool = pool
        self._models = models
        self._kind = kind
        self._route: Route = "tokenize" if kind is TokenizeRequest else "detokenize"

    async def answer_body(self, scope: Scope, receive: Receive, raw: bytes) -> Reply:
        """See `BodyEndpoint.answer_body`."""
        read: Callable[[bytes], TokenizeRequest | DetokenizeRequest] = self._kind.read
        request = await decoded(read, raw, scope)
        name = self._only() if request.model is None else request.model
        model = self._models.choose(scope, name)
        accept(scope, model.route.name, self._route)
        dispatcher = self._models.language_model(model)
        specification = dispatcher.check_ready().language_model
        assert specification is not None
        text = await dispatcher.text()
        answer = partial(request.answer, text, specification.limits)
        return Reply(200, [await self._pool.run(answer, client_of(scope), len(raw))], [_JSON])

    def _only(self) -> str:
        names = [model.route.name for model in self._models if model.route.kind.offers_tokenizer]
        if len(names) != 1:
            listing = ", ".join(f"`{name}`" for name in names) or "none"
            message = f"model: expected the name of a language model, got none; this server has {listing}"
            raise BadRequest(message, field="model")
        return names[0]
