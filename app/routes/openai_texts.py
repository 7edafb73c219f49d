"""``POST /v1/chat/completions`` and ``/v1/completions``: OpenAI's APIs over a language model."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope

from app.bodies import BodyReader, decoded
from app.lm.chat_request import ChatRequest
from app.lm.completion_request import CompletionRequest
from app.metrics.accounting import accept
from app.metrics.catalogue import Route
from app.models import Models
from app.routes.boundary import Endpoint
from app.routes.text_answers import TextAnswers

__all__ = ["OpenAITextEndpoint"]


class OpenAITextEndpoint(Endpoint):
    """Answers conversations, or continues texts.

    Args:
        models: to be asked.
        reader: of bodies.
        kind: what a body says, and thereby which of the two.
    """

    def __init__(self, models: Models, reader: BodyReader, kind: type[ChatRequest] | type[CompletionRequest]) -> None:
        self._models = models
        self._reader = reader
        self._kind = kind
        self._route: Route = "chat" if kind is ChatRequest else "completions"
        self._answers = TextAnswers(models)

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        read: Callable[[bytes], ChatRequest | CompletionRequest] = self._kind.read
        request = await decoded(read, raw)
        accept(scope, self._models.get(request.model).route.name, self._route)
        dispatcher = self._models.language_model(request.model)
        return await self._answers.answer(
            scope, receive, dispatcher, request, request.answer_form, streams=bool(request.stream)
        )
