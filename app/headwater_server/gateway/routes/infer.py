"""``POST /v2/models/{model}/infer``: JSON, and the binary tensor extension in both directions."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Receive, Scope

from headwater_server.codecs.infer_request import RequestDecoder
from headwater_server.codecs.json_data import tensor_bytes
from headwater_server.codecs.tensors import InferRequest
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import LARGE_BYTES, BodyReader
from headwater_server.gateway.http.body_budget import take_for_objects
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.exchange import DisconnectWatch
from headwater_server.gateway.http.replies import Reply, cache_headers
from headwater_server.gateway.identify import identify
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.triton_requests import answer_relayed
from headwater_server.telemetry.recorder import accept

__all__ = ["InferEndpoint", "decoded_request"]

_JSON = (b"content-type", b"application/json")
_OCTETS = (b"content-type", b"application/octet-stream")


class InferEndpoint(Endpoint):
    """Answers with the model's outputs."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        path = scope["path_params"]
        model = self._models.choose(scope, path["model"], path.get("version"))
        if model.route.kind.relays_models:
            return await answer_relayed(self._models, self._reader, scope, receive, model, "infer")
        accept(scope, model.route.name, "infer")
        decoder, encoder = model.codecs()
        body, headers = await self._reader.read(scope, receive)
        header_length = _header_length(headers)
        began_ns = time.perf_counter_ns()
        request = _decoded_at_once(decoder, body, header_length, scope) or await _decoded_in_thread(
            decoder, body, header_length, scope
        )
        identify(scope, model, request)
        decoded_ns = time.perf_counter_ns()
        with DisconnectWatch(scope, receive):
            answer = await model.dispatcher.infer(request)
        outputs = answer.outputs
        answered_ns = time.perf_counter_ns()
        text_bytes = 0  # binary tensors cost the same at any length
        for name, binary in request.outputs:
            if not binary and name in outputs:
                text_bytes += len(outputs[name].data)
        if text_bytes < LARGE_BYTES:
            pieces, json_length = encoder.encode(request, outputs, answer.omitted)
        else:
            pieces, json_length = await asyncio.to_thread(encoder.encode, request, outputs, answer.omitted)
        serialise_ns = decoded_ns - began_ns + time.perf_counter_ns() - answered_ns
        model.meter.serialise.observe(serialise_ns)
        scope["state"]["note"] = f"rows={request.rows}"
        if json_length is None:
            return Reply(200, pieces, [_JSON, *cache_headers(answer.cache)])
        length = (b"inference-header-content-length", b"%d" % json_length)
        return Reply(200, pieces, [_OCTETS, length, *cache_headers(answer.cache)])


async def decoded_request(
    decoder: RequestDecoder, body: bytes, header_length: int | None, scope: Scope
) -> InferRequest:
    """Decode a request, in a thread if that takes long. The decoded objects are charged to the request.

    Args:
        decoder: the model's.
        body, header_length: see `RequestDecoder.decode`.
        scope: the request's ASGI scope.

    Raises:
        HeadwaterError: the request is wrong, or the bodies of all requests together are over the budget.
    """
    return _decoded_at_once(decoder, body, header_length, scope) or await _decoded_in_thread(
        decoder, body, header_length, scope
    )


def _decoded_at_once(
    decoder: RequestDecoder, body: bytes, header_length: int | None, scope: Scope
) -> InferRequest | None:
    """Decode a request; None: that would take too long here."""
    if len(body) < LARGE_BYTES or (header_length is not None and decoder.is_light(header_length)):
        return _decoded(decoder, body, header_length, scope)
    return None


async def _decoded_in_thread(
    decoder: RequestDecoder, body: bytes, header_length: int | None, scope: Scope
) -> InferRequest:
    return await asyncio.to_thread(_decoded, decoder, body, header_length, scope)


def _decoded(decoder: RequestDecoder, body: bytes, header_length: int | None, scope: Scope) -> InferRequest:
    take_for_objects(scope, tensor_bytes(body, header_length))
    return decoder.decode(body, header_length)


def _header_length(headers: dict[bytes, bytes]) -> int | None:
    value = headers.get(b"inference-header-content-length")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        raise BadRequest(
            "header Inference-Header-Content-Length: expected the JSON part's length in bytes, "
            f"got {value[:40].decode('latin-1')!r}"
        )
    return int(value)
