"""Requests for a model that vLLM computes: they are checked, counted, and relayed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope

from headwater_server.codecs.faults import read_json
from headwater_server.errors import BadRequest, ContextTooLong, DeadlineExceeded
from headwater_server.gateway.http.bodies import decoded
from headwater_server.gateway.http.body_budget import take_for_objects
from headwater_server.gateway.http.exchange import DisconnectWatch
from headwater_server.gateway.http.replies import JSON, Reply
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.ignored_fields import note_ignored
from headwater_server.gateway.routes.streams import open_failed_response, open_stream
from headwater_server.lm.responses import ResponsesForm, ResponsesRequest
from headwater_server.security.key_check import owned_id
from headwater_server.security.rate_limits import KeyLimits
from headwater_server.telemetry.catalogue import Route
from headwater_server.telemetry.recorder import accept
from headwater_server.vllm.answers import (
    ChunkAnswer,
    EmbeddingsAnswer,
    RelayedAnswer,
    TokenCount,
    Tokenized,
    TokenizedAnswer,
)
from headwater_server.vllm.chat_parts import PartsRelay
from headwater_server.vllm.relay import Relay
from headwater_server.vllm.relayed_responses import client_error, from_responses
from headwater_server.vllm.requests import VllmRequest, read_request
from headwater_server.vllm.vllm_model import VllmDispatcher

__all__ = ["answer_embeddings", "answer_openai", "answer_relayed", "answer_responses", "asked_model", "tokenized"]


class _Asked(msgspec.Struct):
    model: str | None = None


_asked = msgspec.json.Decoder(_Asked)


def asked_model(models: Models, raw: bytes) -> VllmDispatcher | None:
    """The dispatcher of the model that a body names, if vLLM computes it; None if not, or if the body can't be read.
    Nothing else of the body is checked."""
    try:
        name = _asked.decode(raw).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return models.vllm(name) if name is not None else None


async def answer_openai(
    models: Models,
    scope: Scope,
    receive: Receive,
    dispatcher: VllmDispatcher,
    route: Route,
    raw: bytes,
    *,
    refuses_unknown: bool,
) -> ASGIApp:
    """Answer a request of chat or completions, or open its stream. ``refuses_unknown``: see `read_request`.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    accept(scope, dispatcher.route.name, route)
    dispatcher.check_generates()

    def read(raw: bytes) -> VllmRequest:
        body: dict[str, Any] = read_json(raw, dict[str, Any])
        return read_request(route, body, refuses_unknown=refuses_unknown, fetches=dispatcher.fetches_media)

    request = await decoded(read, raw, scope)
    if request.ignored:
        note_ignored(scope, request.ignored)

    return await answer_relayed(models, scope, receive, dispatcher, request, lambda count: ChunkAnswer(request, count))


async def answer_responses(
    models: Models,
    scope: Scope,
    receive: Receive,
    dispatcher: VllmDispatcher,
    read: Callable[[bytes], tuple[ResponsesRequest, tuple[str, ...]]],
    raw: bytes,
) -> ASGIApp:
    """Answer a request of ``/v1/responses``, or open its stream. ``read`` decodes it, and returns the paths of its
    unknown fields, too.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    accept(scope, dispatcher.route.name, "responses")
    dispatcher.check_generates()

    def converted(raw: bytes) -> tuple[ResponsesRequest, tuple[str, ...], VllmRequest, ResponsesForm]:
        request, ignored = read(raw)
        return request, ignored, *from_responses(request, fetches=dispatcher.fetches_media)

    request, ignored, relayed, form = await decoded(converted, raw, scope)
    if ignored or relayed.ignored:
        note_ignored(scope, (*ignored, *relayed.ignored))
    answer = request.relayed_answer
    try:
        return await answer_relayed(
            models, scope, receive, dispatcher, relayed, lambda count: PartsRelay(answer(), count)
        )
    except BadRequest as error:
        refusal = client_error(error, form)
        if not isinstance(refusal, ContextTooLong) or not request.fails_in_stream(refusal):
            raise refusal from None
        return await open_failed_response(models, answer(), refusal)


async def answer_relayed(
    models: Models,
    scope: Scope,
    receive: Receive,
    dispatcher: VllmDispatcher,
    request: VllmRequest,
    form: Callable[[TokenCount], RelayedAnswer],
) -> ASGIApp:
    """Fetch what a request names by URLs, and relay the request, and its answer whole or as events. If the client goes
    away, the fetch ends, and vLLM stops computing the request.

    Args:
        models: counts the open streams.
        scope, receive: ASGI arguments of the request; its body has been read.
        dispatcher: the model's dispatcher.
        request: the request to vLLM.
        form: makes the form of the answer.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    state = scope["state"]
    spend = _spending(state)
    began_s = asyncio.get_running_loop().time()
    with DisconnectWatch(scope, receive):
        await dispatcher.fetch_media(request, partial(take_for_objects, scope))
        relay = _opened(state, dispatcher, request, began_s)
        on_first = relay.trace.first_token if relay.trace is not None else None
        answer = form(TokenCount(dispatcher.meter, spend, on_first))
        if not request.streams:
            body = await relay.whole(answer)
            state["note"] = _note(answer.count)
            return Reply(200, [body], [JSON])

        def on_closed() -> None:
            relay.close()
            if state.get("note", "streamed") == "streamed":
                state["note"] = _note(answer.count)

        return await open_stream(models, relay.events(answer), answer.end, on_closed)


async def answer_embeddings(
    scope: Scope, receive: Receive, dispatcher: VllmDispatcher, body: dict[str, Any], parts: Iterable[Any], field: str
) -> Reply:
    """Relay a request for embeddings, within the deployment's ``timeout_s``.

    Args:
        scope, receive: ASGI arguments of the request; its body has been read.
        dispatcher: the model's dispatcher.
        body: the request without the inputs.
        parts: the inputs; each part is a request to vLLM, in sequence.
        field: the request's field that has them.

    Raises:
        HeadwaterError: the request can't be answered. A `BadRequest` names ``field``, or a field of ``body`` that
            vLLM's message mentions.
    """
    state = scope["state"]
    answer = EmbeddingsAnswer(body["model"], TokenCount(dispatcher.meter, _spending(state)))
    ends_s = time.monotonic() + dispatcher.route.timeout_s
    with DisconnectWatch(scope, receive):
        for part in parts:
            left_s = max(0.0, ends_s - time.monotonic())
            request = VllmRequest("embeddings", {**body, "input": part}, streams=False, timeout_s=left_s)
            try:
                await _opened(state, dispatcher, request).whole(answer)
            except BadRequest as error:  # vLLM mostly names no field, and calls the input by another name
                error.field = next((name for name in body.keys() - {"model"} if name in error.message), field)
                raise
            except DeadlineExceeded as error:  # the message has only the time that was left for this part
                raise error.again(f"the deadline of {dispatcher.route.timeout_s:g} s passed") from None
    state["note"] = _note(answer.count)
    return Reply(200, [answer.body()], [JSON])


async def tokenized(scope: Scope, receive: Receive, dispatcher: VllmDispatcher, request: VllmRequest) -> Tokenized:
    """Fetch what a request names by URLs, and have vLLM tokenize its messages, within the deployment's ``timeout_s``.
    No sequence is opened.

    Args:
        scope, receive: ASGI arguments of the request; its body has been read.
        dispatcher: the model's dispatcher.
        request: made by `headwater_server.vllm.requests.tokenize_request`.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    answer = TokenizedAnswer(TokenCount(dispatcher.meter))
    with DisconnectWatch(scope, receive):
        await dispatcher.fetch_media(request, partial(take_for_objects, scope))
        await _opened(scope["state"], dispatcher, request._replace(timeout_s=dispatcher.route.timeout_s)).whole(answer)
    return answer.tokenized


def _spending(state: dict[str, Any]) -> Callable[[int], None] | None:
    """The function that counts tokens for the key's limit; None: there is no key, or the key has no limits.

    Raises:
        RateLimited: the limit of tokens is reached.
    """
    limits: KeyLimits | None = state.get("key_limits")
    if limits is None:
        return None
    limits.check_tokens()
    return limits.spend_tokens


def _opened(
    state: dict[str, Any], dispatcher: VllmDispatcher, request: VllmRequest, began_s: float | None = None
) -> Relay:
    return dispatcher.open(request, owned_id(state, state["request_id"]), state.get("key") or "", began_s)


def _note(count: TokenCount) -> str:
    """The request's note in the access log."""
    return f"tokens={count.usage.prompt_tokens}+{count.usage.completion_tokens}"
