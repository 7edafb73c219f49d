"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens`` of Anthropic's API, over a language model of either
engine."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import ClassVar, Final, Generic, TypeVar

from starlette.types import ASGIApp, Receive, Scope

from headwater_server.codecs.faults import at
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.endpoint import BodyEndpoint
from headwater_server.gateway.http.replies import Reply, json_reply
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.ignored_fields import note_ignored
from headwater_server.gateway.routes.texts import answer_text, client_of
from headwater_server.gateway.routes.vllm_requests import answer_relayed, asked_model, tokenized
from headwater_server.lm.known_fields import read_known
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.lm.messages_request import ChatForm, CountTokensRequest, MessagesRequest
from headwater_server.lm.renamed_fields import own_path, renamed
from headwater_server.lm.text.system_probe import SYSTEM_PROBE, keeps_system_messages
from headwater_server.lm.text_pool import TextPool
from headwater_server.lm.tokenize_body import MAX_TOKENS
from headwater_server.telemetry.catalogue import Route
from headwater_server.telemetry.recorder import accept
from headwater_server.vllm.chat_parts import PartsRelay
from headwater_server.vllm.requests import VllmRequest, read_request, tokenize_request
from headwater_server.vllm.vllm_model import VllmDispatcher

__all__ = ["CountTokensEndpoint", "MessagesEndpoint"]

TOKEN_BYTES: Final = 16
"""Most bytes of a body, without its images, for each token that may be counted by vLLM."""
_Body = TypeVar("_Body", bound=CountTokensRequest)


class _ConversationEndpoint(BodyEndpoint, Generic[_Body]):
    """An endpoint whose body is a conversation.

    Args:
        models: all models of this worker.
        reader: reads bodies.
        pool: turns requests into tokens.
        refuses_unknown: whether a field that the API doesn't have is refused; else it is left out, and named.
    """

    route: ClassVar[Route]
    kind: type[_Body]

    def __init__(self, models: Models, reader: BodyReader, pool: TextPool, *, refuses_unknown: bool = False) -> None:
        super().__init__(reader)
        self._models = models
        self._pool = pool
        self._refuses_unknown = refuses_unknown

    async def answer_body(self, scope: Scope, receive: Receive, raw: bytes) -> ASGIApp:
        """See `BodyEndpoint.answer_body`."""
        relaying = asked_model(self._models, raw)
        if relaying is not None:
            accept(scope, relaying.route.name, self.route)
            relaying.check_generates()
        request, ignored = await decoded(self._read, raw, scope)
        if ignored:
            note_ignored(scope, ignored)
        if relaying is not None:
            return await self._relayed(scope, receive, relaying, request, raw)
        model = self._models.choose(scope, request.model)
        accept(scope, model.route.name, self.route)
        return await self._answered(scope, receive, self._models.language_model(model), request, len(raw))

    def _read(self, raw: bytes) -> tuple[_Body, tuple[str, ...]]:
        return (self.kind.read(raw), ()) if self._refuses_unknown else read_known(raw, self.kind)

    async def _relayed(
        self, scope: Scope, receive: Receive, dispatcher: VllmDispatcher, request: _Body, raw: bytes
    ) -> ASGIApp:
        """Convert a request into vLLM's chat request, and answer it."""
        folds = request.has_later_system and not await self._keeps_system(scope, receive, dispatcher, request.model)

        def converted() -> tuple[VllmRequest, ChatForm]:
            form = request.chat_form(is_relayed=True, folds_system=folds)
            try:
                return read_request("chat", form.fields, fetches=dispatcher.fetches_media), form
            except BadRequest as error:
                raise renamed(error, form.names) from None

        relayed, form = await self._pool.run(converted, client_of(scope), len(raw))
        if ignored := (*form.ignored, *(own_path(name, form.names) for name in relayed.ignored)):
            note_ignored(scope, ignored)
        try:
            return await self._answer_relayed(scope, receive, dispatcher, request, relayed, form, len(raw))
        except BadRequest as error:
            raise renamed(error, form.names) from None

    async def _keeps_system(self, scope: Scope, receive: Receive, dispatcher: VllmDispatcher, model: str) -> bool:
        """Whether the chat template of a model of vLLM keeps system messages after the first."""
        asked = tokenize_request({"model": model, "messages": SYSTEM_PROBE, "return_token_strs": True})
        try:
            text = "".join((await tokenized(scope, receive, dispatcher, asked)).token_strs or ())
        except BadRequest:
            return False
        return keeps_system_messages(text)

    @abstractmethod
    async def _answered(
        self, scope: Scope, receive: Receive, dispatcher: LmDispatcher, request: _Body, size_bytes: int
    ) -> ASGIApp:
        """Answer a request to a model of the own engine."""

    @abstractmethod
    async def _answer_relayed(
        self,
        scope: Scope,
        receive: Receive,
        dispatcher: VllmDispatcher,
        request: _Body,
        relayed: VllmRequest,
        form: ChatForm,
        size_bytes: int,
    ) -> ASGIApp:
        """Answer a request to a model of vLLM.

        Args:
            scope, receive: ASGI arguments of the request.
            dispatcher: the model's dispatcher.
            request: the client's request.
            relayed: the request as vLLM's chat request.
            form: what `relayed` was made of.
            size_bytes: the body's size.
        """


class MessagesEndpoint(_ConversationEndpoint[MessagesRequest]):
    """Answers conversations. See `_ConversationEndpoint` for the arguments."""

    route = "messages"
    kind = MessagesRequest

    async def _answered(
        self, scope: Scope, receive: Receive, dispatcher: LmDispatcher, request: MessagesRequest, size_bytes: int
    ) -> ASGIApp:
        return await answer_text(
            self._models, scope, receive, dispatcher, request, request.answer_form, pool=self._pool,
            size_bytes=size_bytes, streams=bool(request.stream),
        )  # fmt: skip

    async def _answer_relayed(
        self,
        scope: Scope,
        receive: Receive,
        dispatcher: VllmDispatcher,
        request: MessagesRequest,
        relayed: VllmRequest,
        form: ChatForm,
        size_bytes: int,
    ) -> ASGIApp:
        signature = dispatcher.check_ready().vllm
        if signature is not None and request.max_tokens + size_bytes > signature.context_length:
            # vLLM refuses an answer that doesn't fit. A prompt has at most as many tokens as bytes.
            asked = tokenize_request(relayed.body, relayed.media)
            fitting = signature.context_length - (await tokenized(scope, receive, dispatcher, asked)).count
            if 0 < fitting < request.max_tokens:
                relayed = relayed._replace(body={**relayed.body, "max_completion_tokens": fitting})
        return await answer_relayed(
            self._models, scope, receive, dispatcher, relayed, lambda count: PartsRelay(request.answer(), count)
        )


class CountTokensEndpoint(_ConversationEndpoint[CountTokensRequest]):
    """Counts the tokens of prompts. See `_ConversationEndpoint` for the arguments."""

    route = "count_tokens"
    kind = CountTokensRequest

    async def _answered(
        self, scope: Scope, receive: Receive, dispatcher: LmDispatcher, request: CountTokensRequest, size_bytes: int
    ) -> ASGIApp:
        specification = dispatcher.check_ready().language_model
        assert specification is not None
        count = partial(request.counted, await dispatcher.text(), specification.limits)
        return _counted(scope, await self._pool.run(count, client_of(scope), size_bytes))

    async def _answer_relayed(
        self,
        scope: Scope,
        receive: Receive,
        dispatcher: VllmDispatcher,
        request: CountTokensRequest,
        relayed: VllmRequest,
        form: ChatForm,
        size_bytes: int,
    ) -> ASGIApp:
        signature = dispatcher.check_ready().vllm
        most = TOKEN_BYTES * max(MAX_TOKENS, 0 if signature is None else signature.context_length)
        if size_bytes - form.image_characters > most:
            raise at("messages", None, f"expected at most {most} bytes to count, without images, got {size_bytes}")
        counted = await tokenized(scope, receive, dispatcher, tokenize_request(relayed.body, relayed.media))
        return _counted(scope, counted.count)


def _counted(scope: Scope, tokens: int) -> Reply:
    scope["state"]["note"] = f"tokens={tokens}+0"
    return json_reply({"input_tokens": tokens})
