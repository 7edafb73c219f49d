"""``POST /v2/models/{model}/infer``: JSON, and the binary tensor extension both ways."""

from __future__ import annotations

import asyncio
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import BadRequest, HeadwaterError
from app.gateway.http.bodies import LARGE_BYTES, BodyReader
from app.gateway.http.entry import Endpoint, EndpointRoute, RequestRecords, internal_error
from app.gateway.http.exchange import DisconnectWatch
from app.gateway.http.replies import Reply, error_reply
from app.gateway.models import Models
from app.security.key_check import KeyCheck
from app.security.limits import KeyLimits
from app.telemetry.recorder import accept

__all__ = ["InferEndpoint", "InferShortcut"]

_JSON = (b"content-type", b"application/json")
_OCTETS = (b"content-type", b"application/octet-stream")


_PREFIX = "/v2/models/"
_SUFFIX = "/infer"


class InferShortcut:
    """Leads the one route that is called thousands of times a second past the framework.

    Its layers took a third of a worker's time, and do nothing for an endpoint that handles its own errors. What isn't
    exactly that route and method goes on to them, and so does what a web page of another origin asks.

    Args:
        app: the framework's.
        endpoint: the route's.
        records: of requests.
        keys: checks them; None: all may ask.
        cors: whether pages of other origins may ask.
    """

    def __init__(
        self, app: ASGIApp, endpoint: InferEndpoint, records: RequestRecords, keys: KeyCheck | None, *, cors: bool
    ) -> None:
        self._app = app
        self._endpoint = endpoint
        self._records = records
        self._keys = keys
        self._cors = cors
        self._route = EndpointRoute(f"{_PREFIX}{{model}}{_SUFFIX}", endpoint, methods=["POST"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection's scope."""
        if scope["type"] == "http" and scope["method"] == "POST":
            path = scope["path"]
            if path.startswith(_PREFIX) and path.endswith(_SUFFIX):
                name = path[len(_PREFIX) : -len(_SUFFIX)]
                if name and "/" not in name and not (self._cors and _has_origin(scope)):
                    scope["path_params"] = {"model": name}
                    scope["route"] = self._route  # as the router does
                    await self._infer(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = self._records.begin(scope)
        limits: KeyLimits | None = None
        status = 499
        is_answered = False
        try:
            reply: ASGIApp | None
            try:
                record.check()
                if self._keys is not None:
                    limits = self._keys.admit(scope)
            except HeadwaterError as error:
                scope["state"]["error"] = error
                reply = error_reply(error, scope["path"])
            else:
                reply = await self._endpoint.reply(scope, receive)
            if reply is not None:
                assert isinstance(reply, Reply)
                is_answered = True
                await reply.send(scope, send, record.headers())
                status = reply.status
        except Exception as error:
            scope["state"]["status"] = 500
            if not is_answered:
                failure = error_reply(internal_error(scope["state"], error), scope["path"])
                await failure.send(scope, send, record.headers())
            raise
        finally:
            if limits is not None:
                limits.leave()
            self._records.end(record, scope, status)


class InferEndpoint(Endpoint):
    """Infers."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        path = scope["path_params"]
        model = self._models.get(path["model"], path.get("version"))
        accept(scope, model.route.name, "infer")
        decoder, encoder = model.codecs()
        body, headers = await self._reader.read(scope, receive)
        header_length = _header_length(headers)
        began_ns = time.perf_counter_ns()
        if len(body) < LARGE_BYTES or (header_length is not None and decoder.is_light(header_length)):
            request = decoder.decode(body, header_length)
        else:
            request = await asyncio.to_thread(decoder.decode, body, header_length)
        decoded_ns = time.perf_counter_ns()
        with DisconnectWatch(scope, receive):
            outputs, omitted = await model.dispatcher.infer(request)
        answered_ns = time.perf_counter_ns()
        # Binary tensors cost the same however long they are.
        texts = [outputs[wish.name].data for wish in request.outputs if not wish.binary and wish.name in outputs]
        if sum(map(len, texts)) < LARGE_BYTES:
            pieces, json_length = encoder.encode(request, outputs, None, omitted)
        else:
            pieces, json_length = await asyncio.to_thread(encoder.encode, request, outputs, None, omitted)
        serialise_ns = decoded_ns - began_ns + time.perf_counter_ns() - answered_ns
        model.meter.serialise.observe(serialise_ns)
        scope["state"]["note"] = f"rows={request.rows}"
        if json_length is None:
            return Reply(200, pieces, [_JSON])
        return Reply(200, pieces, [_OCTETS, (b"inference-header-content-length", b"%d" % json_length)])


def _has_origin(scope: Scope) -> bool:
    return any(name == b"origin" for name, _ in scope["headers"])


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
