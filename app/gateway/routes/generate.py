"""``POST /v2/models/{model}/generate`` and ``/generate_stream``: Triton's generate extension."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar, cast

from starlette.types import ASGIApp, Receive, Scope

from app.codecs.tensors import Answer, HeadAnswer, InferRequest, Outputs
from app.errors import HeadwaterError
from app.gateway.http.bodies import LARGE_BYTES, BodyReader, decoded
from app.gateway.http.entry import Endpoint
from app.gateway.http.event_stream import EventStream
from app.gateway.http.exchange import DisconnectWatch
from app.gateway.http.replies import Reply
from app.gateway.models import Models, ServedModel
from app.gateway.routes.texts import TextAnswers
from app.lm.generate import GenerateAnswer, GenerateRequest
from app.security.key_check import owned_id
from app.telemetry.recorder import accept

__all__ = ["GenerateEndpoint", "GenerateStreamEndpoint"]

_JSON = (b"content-type", b"application/json")
_Result = TypeVar("_Result", Answer, HeadAnswer)


class GenerateEndpoint(Endpoint):
    """Answers one row whole."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        model = _model(self._models, scope)
        accept(scope, model.route.name, "generate")
        if model.route.is_language_model:
            return await _text_answer(self._models, self._reader, scope, receive, streams=False)
        model.dispatcher.check_whole()
        decoder, encoder = model.generate_codecs()
        body, _ = await self._reader.read(scope, receive)
        began_ns = time.perf_counter_ns()
        request = await decoded(decoder.decode, body)
        decoded_ns = time.perf_counter_ns()
        with DisconnectWatch(scope, receive):
            answer = await model.dispatcher.infer(request)
        answered_ns = time.perf_counter_ns()
        text = await _encoded(answer.outputs, encoder.whole, request, answer)
        serialise_ns = decoded_ns - began_ns + time.perf_counter_ns() - answered_ns
        model.meter.serialise.observe(serialise_ns)
        return Reply(200, [text], [_JSON])


class GenerateStreamEndpoint(Endpoint):
    """Answers one row piece by piece, as server-sent events."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        model = _model(self._models, scope)
        accept(scope, model.route.name, "generate_stream")
        if model.route.is_language_model:
            return await _text_answer(self._models, self._reader, scope, receive, streams=True)
        decoder, encoder = model.generate_codecs()
        body, _ = await self._reader.read(scope, receive)
        request = await decoded(decoder.decode, body)
        request.cancel_id = owned_id(scope["state"], scope["state"]["request_id"])
        statuses: dict[str, str] = {}

        def ending(error: HeadwaterError | None) -> list[bytes]:
            if error is None:
                return [encoder.end(request, statuses)]
            lost = HeadAnswer("", error=error).status
            for head in request.heads:
                statuses.setdefault(head, lost)
            return [encoder.failure(error), encoder.end(request, statuses)]

        async def events() -> AsyncGenerator[bytes, None]:
            pieces = cast("AsyncGenerator[HeadAnswer, None]", model.dispatcher.stream(request))
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    text = await _encoded(piece.outputs, encoder.piece, request, piece)
                    statuses[piece.head] = piece.status
                    yield text
                    del piece, text  # the next ones may be long in coming

        self._models.streams += 1
        stream = EventStream(events(), ending, self._on_closed)
        try:
            with DisconnectWatch(scope, receive):
                await stream.open()
        except BaseException:
            await stream.close()
            raise
        return stream

    def _on_closed(self) -> None:
        self._models.streams -= 1


def _model(models: Models, scope: Scope) -> ServedModel:
    path = scope["path_params"]
    return models.get(path["model"], path.get("version"))


async def _text_answer(models: Models, reader: BodyReader, scope: Scope, receive: Receive, *, streams: bool) -> ASGIApp:
    dispatcher = models.language_model(scope["path_params"]["model"])
    dispatcher.check_ready()
    raw, _ = await reader.read(scope, receive)
    request = await decoded(GenerateRequest.read, raw)
    form = GenerateAnswer(dispatcher.route.name, request.id or "")
    return await TextAnswers(models).answer(
        scope, receive, dispatcher, request, lambda plan, texts: form, streams=streams
    )


async def _encoded(
    outputs: Outputs, encode: Callable[[InferRequest, _Result], bytes], request: InferRequest, result: _Result
) -> bytes:
    if sum(len(tensor.data) for tensor in outputs.values()) < LARGE_BYTES:
        return encode(request, result)
    return await asyncio.to_thread(encode, request, result)
