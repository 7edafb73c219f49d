"""Requests for a language model that vLLM computes: checked, counted, and relayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope

from app.codecs.faults import read_json
from app.gateway.http.bodies import decoded
from app.gateway.http.exchange import DisconnectWatch
from app.gateway.http.replies import JSON, Reply
from app.gateway.models import Models
from app.gateway.routes.streams import open_stream
from app.security.key_check import owned_id
from app.security.limits import KeyLimits
from app.telemetry.catalogue import Route
from app.telemetry.recorder import accept
from app.vllm.answers import Answer, ChunkAnswer, ResponsesAnswer, TokenCount
from app.vllm.dispatcher import VllmDispatcher
from app.vllm.requests import VllmRequest, read_request

__all__ = ["answer_openai", "answer_relayed", "asked_model"]


class _Asked(msgspec.Struct):
    model: str | None = None


_asked = msgspec.json.Decoder(_Asked)


def asked_model(models: Models, raw: bytes) -> VllmDispatcher | None:
    """The dispatcher of the model that a body names, if vLLM computes it; whatever else the body is."""
    try:
        name = _asked.decode(raw).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return models.vllm(name) if name is not None else None


async def answer_openai(
    models: Models, scope: Scope, receive: Receive, dispatcher: VllmDispatcher, route: Route, raw: bytes
) -> ASGIApp:
    """Answer a request of one of OpenAI's text routes, or open its stream.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    accept(scope, dispatcher.route.name, route)
    dispatcher.check_ready()
    read: Callable[[bytes], dict[str, Any]] = _read_object
    request = read_request(route, await decoded(read, raw))

    def form(count: TokenCount) -> Answer:
        return ResponsesAnswer(count) if route == "responses" else ChunkAnswer(request, count)

    return await answer_relayed(models, scope, receive, dispatcher, request, form)


def _read_object(raw: bytes) -> dict[str, Any]:
    return read_json(raw, dict[str, Any])


async def answer_relayed(
    models: Models,
    scope: Scope,
    receive: Receive,
    dispatcher: VllmDispatcher,
    request: VllmRequest,
    form: Callable[[TokenCount], Answer],
) -> ASGIApp:
    """Relay a request, whole or as events. If the client goes away, vLLM stops computing it.

    Args:
        models: count the open streams.
        scope, receive: of the request; its body has been read.
        dispatcher: of the model.
        request: what is asked.
        form: makes the answer's form.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    state = scope["state"]
    limits: KeyLimits | None = state.get("key_limits")
    if limits is not None:
        limits.check_tokens()
    relay = dispatcher.open(request, owned_id(state, state["request_id"]), state.get("key") or "")
    on_first = relay.trace.first_token if relay.trace is not None else None
    answer = form(TokenCount(dispatcher.meter, None if limits is None else limits.spend_tokens, on_first))

    def note() -> str:
        usage = answer.count.usage
        return f"tokens={usage.prompt_tokens}+{usage.completion_tokens}"

    with DisconnectWatch(scope, receive):
        if not request.streams:
            body = await relay.whole(answer)
            state["note"] = note()
            return Reply(200, [body], [JSON])

        def on_closed() -> None:
            relay.close()
            if state.get("note", "streamed") == "streamed":
                state["note"] = note()

        return await open_stream(models, relay.events(answer), answer.end, on_closed)
