"""``POST /v1/chat/completions``: OpenAI's API over a language model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Receive, Scope

from app.bodies import BodyReader
from app.lm.chat_answer import ChatAnswer
from app.lm.chat_request import ChatRequest
from app.lm.text_plan import TextPlan
from app.models import Models
from app.routes.boundary import Endpoint
from app.routes.text_answers import TextAnswers

if TYPE_CHECKING:  # tokenizers take memory: they are loaded where there is a language model
    from app.text.token_texts import TokenTexts

__all__ = ["ChatCompletionsEndpoint"]


class ChatCompletionsEndpoint(Endpoint):
    """Answers conversations."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader
        self._answers = TextAnswers(models)

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        request = ChatRequest.read(raw)
        dispatcher = self._models.language_model(request.model)

        def form(plan: TextPlan, texts: TokenTexts) -> ChatAnswer:
            return ChatAnswer(
                request.model,
                len(plan.specs),
                texts,
                logprobs=bool(request.logprobs),
                includes_usage=request.includes_usage,
            )

        return await self._answers.answer(scope, receive, dispatcher, request, form, streams=bool(request.stream))
