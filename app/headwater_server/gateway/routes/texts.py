"""OpenAI's text routes over a language model, with whole answers or server-sent events, and the route that cancels a
request by its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope

from headwater.engine import EngineLimits
from headwater_server.codecs.faults import at, shown
from headwater_server.errors import ContextTooLong, HeadwaterError, NotFound
from headwater_server.gateway.http.bodies import LARGE_BYTES, BodyReader, decoded
from headwater_server.gateway.http.endpoint import BodyEndpoint, Endpoint
from headwater_server.gateway.http.event_stream import EventStream
from headwater_server.gateway.http.exchange import DisconnectWatch
from headwater_server.gateway.http.replies import JSON, Reply, json_reply
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.ignored_fields import note_ignored
from headwater_server.gateway.routes.streams import open_failed_response, open_stream
from headwater_server.gateway.routes.vllm_requests import answer_openai, answer_responses, asked_model
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.known_fields import read_known
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.lm.messages_request import MessagesRequest
from headwater_server.lm.openai_answer import AnswerForm, Event
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text_generate import GenerateRequest
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.text_pool import TextPool
from headwater_server.lm.text_stream import TextGeneration, TextPiece, TextStream, Usage
from headwater_server.lm.tools import unknown_fields
from headwater_server.security.key_check import owned_id
from headwater_server.security.rate_limits import KeyLimits
from headwater_server.telemetry.catalogue import Route
from headwater_server.telemetry.recorder import accept

if TYPE_CHECKING:
    from headwater_server.lm.text.language import LanguageText
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["CancelEndpoint", "OpenAITextEndpoint", "answer_text", "client_of"]

_OpenAIRequest: TypeAlias = ChatRequest | CompletionRequest | ResponsesRequest
_Request: TypeAlias = _OpenAIRequest | GenerateRequest | MessagesRequest
_ROUTES: Final[dict[type[_OpenAIRequest], Route]] = {
    ChatRequest: "chat",
    CompletionRequest: "completions",
    ResponsesRequest: "responses",
}
LOGPROB_BYTES: Final = 64
"""Approximate size in bytes of a log probability with its token in a chat's answer."""
_PREFIX: Final = "/v2/requests/"
_SUFFIX: Final = "/cancel"


class CancelEndpoint(Endpoint):
    """Cancels the sequences of a request to a language model, or the stream of a model or pipeline."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        # From the raw path: in the decoded path `%2F` stands both for an escaped slash and for `%252F`.
        request_id = unquote(scope["raw_path"].decode("ascii")[len(_PREFIX) : -len(_SUFFIX)])
        cancelled = await self._models.cancel_request(owned_id(scope["state"], request_id))
        if not cancelled:
            raise NotFound(
                f"request {shown(request_id)}: no running stream or language-model request has this X-Request-Id; it "
                "may have ended",
                field="request_id",
            )
        scope["state"]["note"] = f"cancelled={cancelled}"
        return json_reply({"request_id": request_id, "cancelled": cancelled})


async def answer_text(
    models: Models,
    scope: Scope,
    receive: Receive,
    dispatcher: LmDispatcher,
    request: _Request,
    form: Callable[[TextPlan, TokenTexts], AnswerForm],
    *,
    pool: TextPool,
    size_bytes: int,
    streams: bool,
) -> ASGIApp:
    """Answer a request to a language model, or open its stream. If the client goes away, its sequences are cancelled.

    Args:
        models: counts the open streams.
        scope, receive: ASGI arguments of the request; its body has been read.
        dispatcher: the model's dispatcher.
        request: the decoded body.
        form: makes the answer's form in the request's API.
        pool: turns the request into tokens.
        size_bytes: the body's size, by which the pool limits a client's waiting requests.
        streams: whether the answer comes in pieces.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    dispatcher.check_ready()
    limits: KeyLimits | None = scope["state"].get("key_limits")
    if limits is not None:
        limits.check_tokens()
    with DisconnectWatch(scope, receive):
        while True:
            text = await dispatcher.text()
            specification = dispatcher.check_ready().language_model
            assert specification is not None
            planned = partial(_planned, request, text, specification.limits)
            plan, text_streams = await pool.run(planned, client_of(scope), size_bytes)
            if text is await dispatcher.text():  # else the model was reloaded meanwhile, perhaps with another tokenizer
                break
        if plan.ignored:
            note_ignored(scope, plan.ignored)
        form_of_this = form(plan, text.tokenizer.texts)
        # From here until the code that closes the generation, nothing may be awaited and nothing may fail.
        request_id = owned_id(scope["state"], scope["state"]["request_id"])
        cache_scope = scope["state"].get("key") or ""
        generation = dispatcher.open(request_id, plan.specs, timeout_s=plan.timeout_s, cache_scope=cache_scope)
        spend = None if limits is None else limits.spend_tokens
        job = TextGeneration(generation, text_streams, plan.prompt_tokens, spend, plan.n)
        if streams:
            return await _stream(models, scope, job, form_of_this)
        try:
            body = await _whole(form_of_this, await job.whole(), job.usage)
        finally:
            job.close()
        scope["state"]["note"] = _note(job)
        return Reply(200, [body], [JSON])


def client_of(scope: Scope) -> str:
    """The sender of a request: the name of its key, or else the client's address; empty: neither is known."""
    key: str = scope["state"].get("key", "")
    client = scope.get("client")
    return key or (client[0] if client else "")


def _planned(request: _Request, text: LanguageText, limits: EngineLimits) -> tuple[TextPlan, list[TextStream]]:
    plan = request.plan(text, limits)
    return plan, plan.streams(text.tokenizer.texts)


async def _whole(form: AnswerForm, texts: Sequence[TextPiece], usage: Usage) -> bytes:
    """The whole answer, encoded in a thread if it is large, which only log probabilities cause."""
    logprobs = sum(len(text.logprobs) * (1 + len(text.logprobs[-1].top)) for text in texts if text.logprobs)
    if logprobs * LOGPROB_BYTES < LARGE_BYTES:
        return form.whole(texts, usage)
    return await asyncio.to_thread(form.whole, texts, usage)


def _stream(models: Models, scope: Scope, job: TextGeneration, form: AnswerForm) -> Awaitable[EventStream]:
    async def events() -> AsyncGenerator[Event, None]:
        begun = False
        token_counts: dict[int, int] = {}
        """Tokens of each sequence in the pieces sent so far."""
        while pieces := await job.news():
            if not begun:  # only with the first piece, so that an early failure is answered with its status
                begun = True
                if form.counts_usage:
                    form.count(job.usage._replace(completion_tokens=0))
                for event in form.begin():
                    yield event
            for place, piece in pieces:
                if form.counts_usage:
                    token_counts[place] = job.completion_tokens(place)
                    form.count(job.usage._replace(completion_tokens=sum(token_counts.values())))
                for event in form.piece(place, piece):
                    yield event

    def ending(error: HeadwaterError | None) -> Sequence[Event]:
        return form.end(job.usage, error)

    def on_closed() -> None:
        state = scope["state"]
        job.close()
        if state.get("note", "streamed") == "streamed":
            state["note"] = _note(job)

    return open_stream(models, events(), ending, on_closed)


def _note(job: TextGeneration) -> str:
    """The request's note in the access log."""
    usage = job.usage
    return f"tokens={usage.prompt_tokens}+{usage.completion_tokens}"


class OpenAITextEndpoint(BodyEndpoint):
    """Answers conversations, or continues texts.

    Args:
        models: all models of this worker.
        reader: reads bodies.
        kind: the body's type, which decides the API.
        pool: turns requests into tokens.
        refuses_unknown: whether a field that the API doesn't have is refused; else it is left out, and named.
    """

    def __init__(
        self,
        models: Models,
        reader: BodyReader,
        kind: type[_OpenAIRequest],
        pool: TextPool,
        *,
        refuses_unknown: bool = False,
    ) -> None:
        super().__init__(reader)
        self._refuses_unknown = refuses_unknown
        self._models = models
        self._pool = pool
        self._kind = kind

    async def answer_body(self, scope: Scope, receive: Receive, raw: bytes) -> ASGIApp:
        """See `BodyEndpoint.answer_body`."""
        route = _ROUTES[self._kind]
        relaying = asked_model(self._models, raw)
        if relaying is not None and self._kind is ResponsesRequest:
            return await answer_responses(self._models, scope, receive, relaying, self._read_responses, raw)
        if relaying is not None:
            return await answer_openai(
                self._models, scope, receive, relaying, route, raw, refuses_unknown=self._refuses_unknown
            )
        request, ignored = await decoded(self._read, raw, scope)
        if ignored:
            note_ignored(scope, ignored)
        model = self._models.choose(scope, request.model)
        accept(scope, model.route.name, route)
        dispatcher = self._models.language_model(model)
        try:
            return await answer_text(
                self._models, scope, receive, dispatcher, request, request.answer_form, pool=self._pool,
                size_bytes=len(raw), streams=bool(request.stream),
            )  # fmt: skip
        except ContextTooLong as error:
            if not isinstance(request, ResponsesRequest) or not request.fails_in_stream(error):
                raise
            return await open_failed_response(self._models, request.relayed_answer(), error)

    def _read_responses(self, raw: bytes) -> tuple[ResponsesRequest, tuple[str, ...]]:
        if self._refuses_unknown:
            return ResponsesRequest.read(raw), ()
        return read_known(raw, ResponsesRequest)

    def _read(self, raw: bytes) -> tuple[_OpenAIRequest, tuple[str, ...]]:
        if not self._refuses_unknown:
            return read_known(raw, self._kind)
        request = self._kind.read(raw)
        for path in unknown_fields(getattr(request, "tools", None)):
            raise at(path, None, "unknown field; leave it out")
        return request, ()
