"""``POST /v2/models/{model}/generate`` and ``/generate_stream``: Triton's generate extension."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar, cast

from starlette.types import ASGIApp, Receive, Scope

from headwater_server.codecs.generate_body import GenerateEncoder
from headwater_server.codecs.json_data import tensor_bytes
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, Outputs
from headwater_server.errors import BadRequest, HeadwaterError
from headwater_server.gateway.http.bodies import LARGE_BYTES, BodyReader, decoded
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.event_stream import EventStream
from headwater_server.gateway.http.exchange import DisconnectWatch
from headwater_server.gateway.http.replies import JSON, Reply, cache_headers
from headwater_server.gateway.identify import identify
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.gateway.routes.streams import open_stream
from headwater_server.gateway.routes.texts import answer_text
from headwater_server.gateway.routes.triton_requests import Action
from headwater_server.gateway.routes.triton_requests import answer_relayed as answer_triton
from headwater_server.gateway.routes.vllm_requests import answer_relayed
from headwater_server.lm.text_generate import GenerateAnswer, GenerateRequest
from headwater_server.lm.text_pool import TextPool
from headwater_server.security.key_check import owned_id
from headwater_server.telemetry.recorder import accept
from headwater_server.vllm.answers import GenerateRelay
from headwater_server.vllm.requests import from_generate
from headwater_server.vllm.vllm_model import VllmDispatcher

if TYPE_CHECKING:
    from headwater_server.lm.text.token_texts import TokenTexts
    from headwater_server.lm.text_plan import TextPlan

__all__ = ["GenerateEndpoint", "only_result", "results_of"]

_Result = TypeVar("_Result", Answer, HeadAnswer)


class GenerateEndpoint(Endpoint):
    """Answers a request for a single row, or to continue a text if the model is a language model.

    Args:
        models: all models of this worker.
        reader: reads bodies.
        pool: turns texts into tokens.
        streams: whether the answer comes piece by piece, as server-sent events.
    """

    def __init__(self, models: Models, reader: BodyReader, pool: TextPool, *, streams: bool) -> None:
        self._models = models
        self._pool = pool
        self._reader = reader
        self._streams = streams

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        path = scope["path_params"]
        model = self._models.choose(scope, path["model"], path.get("version"))
        if model.route.kind.relays_models:
            action: Action = "generate_stream" if self._streams else "generate"
            return await answer_triton(self._models, self._reader, scope, receive, model, action)
        accept(scope, model.route.name, "generate_stream" if self._streams else "generate")
        if isinstance(model.dispatcher, VllmDispatcher):
            return await self._relay(scope, receive, model.dispatcher, model.name)
        if model.route.takes_text:
            dispatcher = self._models.language_model(model)
            dispatcher.check_ready()
            raw, _ = await self._reader.read(scope, receive)
            generate_request = await decoded(GenerateRequest.read, raw, scope)
            form = generate_request.answer_form(model.name, model.version, streams=self._streams)

            def formed(plan: TextPlan, texts: TokenTexts) -> GenerateAnswer:
                form.texts = texts if plan.specs[0].sampling.logprobs is not None else None
                return form

            return await answer_text(
                self._models, scope, receive, dispatcher, generate_request, formed, pool=self._pool,
                size_bytes=len(raw), streams=self._streams,
            )  # fmt: skip
        signature = model.dispatcher.check_ready()
        if not self._streams and signature.heads:
            model.dispatcher.check_whole()
        decoder, encoder = model.generate_codecs()
        body, _ = await self._reader.read(scope, receive)
        began_ns = time.perf_counter_ns()
        request = await decoded(decoder.decode, body, scope, tensor_bytes)
        identify(scope, model, request)
        decoded_ns = time.perf_counter_ns()
        if self._streams or signature.streams:
            request.cancel_id = owned_id(scope["state"], scope["state"]["request_id"])
        with DisconnectWatch(scope, receive):
            if self._streams:
                return await _stream(self._models, model, encoder, request)
            answer = await (only_result(model, request) if signature.streams else model.dispatcher.infer(request))
        answered_ns = time.perf_counter_ns()
        text = await _encoded(answer.outputs, encoder.whole, request, answer)
        serialise_ns = decoded_ns - began_ns + time.perf_counter_ns() - answered_ns
        model.meter.serialise.observe(serialise_ns)
        return Reply(200, [text], [JSON, *cache_headers(answer.cache)])

    async def _relay(self, scope: Scope, receive: Receive, dispatcher: VllmDispatcher, name: str) -> ASGIApp:
        dispatcher.check_generates()
        raw, _ = await self._reader.read(scope, receive)
        generate_request = await decoded(GenerateRequest.read, raw, scope)
        form = generate_request.answer_form(name, streams=self._streams)
        request = from_generate(name, generate_request, streams=self._streams)
        return await answer_relayed(
            self._models, scope, receive, dispatcher, request, lambda count: GenerateRelay(form, count)
        )


def results_of(
    model: ServedModel, request: InferRequest
) -> AbstractAsyncContextManager[AsyncGenerator[HeadAnswer, None]]:
    """The results of a model that streams, or of the heads of a pipeline; closed at the end of the context."""
    return contextlib.aclosing(cast("AsyncGenerator[HeadAnswer, None]", model.dispatcher.stream(request)))


async def only_result(model: ServedModel, request: InferRequest) -> Answer:
    """The answer of a model that streams, if it is a single result. The model is stopped at the second result.

    Raises:
        BadRequest: the model gave no result, or more than a single result.
    """
    answers: list[HeadAnswer] = []
    async with results_of(model, request) as pieces:
        async for piece in pieces:
            answers.append(piece)
            if len(answers) > 1:
                break
    if len(answers) == 1:
        return Answer(answers[0].outputs)
    name = model.route.name
    raise BadRequest(
        f"model `{name}`: expected exactly one result, got {'several' if answers else 'none'}: it streams its results; "
        f"POST to /v2/models/{name}/generate_stream"
    )


def _stream(
    models: Models, model: ServedModel, encoder: GenerateEncoder, request: InferRequest
) -> Awaitable[EventStream]:
    statuses: dict[str, str] = {}

    def ending(error: HeadwaterError | None) -> list[bytes]:
        if error is None:
            return [encoder.end(request, statuses)]
        lost = HeadAnswer("", error=error).status
        for head in request.heads:
            statuses.setdefault(head, lost)
        return [encoder.failure(error), encoder.end(request, statuses)]

    async def events() -> AsyncGenerator[bytes, None]:
        async with results_of(model, request) as pieces:
            async for piece in pieces:
                text = await _encoded(piece.outputs, encoder.piece, request, piece)
                statuses[piece.head] = piece.status
                yield text
                del piece, text  # the next piece may take long

    return open_stream(models, events(), ending)


async def _encoded(
    outputs: Outputs, encode: Callable[[InferRequest, _Result], bytes], request: InferRequest, result: _Result
) -> bytes:
    if sum(len(tensor.data) for tensor in outputs.values()) < LARGE_BYTES:
        return encode(request, result)
    return await asyncio.to_thread(encode, request, result)
