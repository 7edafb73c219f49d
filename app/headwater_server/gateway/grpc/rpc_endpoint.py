"""Answers inference requests that came over gRPC, behind the same entry as those over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, NamedTuple

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tritonclient.grpc import service_pb2 as pb

from headwater_server.codecs.infer_response import omission_parameters
from headwater_server.errors import BadRequest, HeadwaterError
from headwater_server.gateway.grpc.tensor_messages import (
    EMPTY_FINAL,
    FINAL,
    binary_body,
    generate_fields,
    infer_response,
    parameters_of,
    text_response,
)
from headwater_server.gateway.http.bodies import BodyReader
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.replies import Reply, cache_headers, internal_error, json_reply
from headwater_server.gateway.identify import identify
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.gateway.routes.generate import only_result, results_of
from headwater_server.gateway.routes.infer import decoded_request
from headwater_server.security.key_check import owned_id
from headwater_server.telemetry.recorder import accept, note_error
from headwater_server.triton.relayed_calls import RpcRefused
from headwater_server.triton.repository_dispatcher import TritonDispatcher
from headwater_server.triton.rpc_call import RpcCall, RpcRequest
from headwater_server.vllm.vllm_model import VllmDispatcher

__all__ = ["EXTENSION", "STATUS", "RpcEndpoint", "RpcMessage", "receiving", "stream_error"]

EXTENSION: Final = "headwater.grpc"
"""Where an ASGI scope has the `RpcMessage`."""
STATUS: Final = "grpc-status"
"""The header of an error's answer with the number of gRPC's status, where HTTP's status doesn't decide it."""
_HTTP_STATUSES: Final = {3: 400, 5: 404, 7: 403, 8: 429, 12: 501, 14: 503, 4: 504, 1: 499, 6: 409, 9: 409}
"""HTTP's status for logs and metrics by the number of gRPC's; others: 500."""
_EVENT: Final = b"data: "


class RpcMessage(NamedTuple):
    """A ``ModelInferRequest``."""

    message: Any
    raw: bytes
    """The message as it came."""
    streams: bool
    """Whether it came in a ``ModelStreamInfer``: its responses are ``ModelStreamInferResponse`` messages."""


class RpcEndpoint(Endpoint):
    """Answers a `RpcMessage`. The answer's body is a serialized ``ModelInferResponse``; in a stream it comes in pieces,
    each a serialized ``ModelStreamInferResponse``.

    Args:
        models: all models of this worker.
        reader: has the budget of bodies.
        generate: answer requests of Triton's generate extension: whole (False), and as a stream of events (True).
    """

    def __init__(
        self,
        models: Models,
        reader: BodyReader,
        generate: Mapping[bool, Callable[[Scope, Receive], Awaitable[ASGIApp]]],
    ) -> None:
        self._models = models
        self._reader = reader
        self._generate = generate

    async def answer(self, scope: Scope, receive: Receive) -> ASGIApp:
        """See `Endpoint.answer`."""
        call: RpcMessage = scope["extensions"][EXTENSION]
        path = scope["path_params"]
        model = self._models.choose(scope, path["model"], path.get("version"))
        self._reader.lease(scope).take(len(call.raw), len(call.raw))
        dispatcher = model.dispatcher
        if isinstance(dispatcher, TritonDispatcher):
            return await self._relayed(scope, model.name, dispatcher, call)
        if isinstance(dispatcher, VllmDispatcher) or model.route.takes_text:
            return await self._text(scope, model, call)
        accept(scope, model.route.name, "generate_stream" if call.streams else "infer")
        signature = dispatcher.check_ready()
        is_stream = call.streams and (signature.streams or bool(signature.heads))
        decoder, _ = model.tensor_codecs() if is_stream or signature.streams else model.codecs()
        body, header_length = binary_body(call.message)
        request = await decoded_request(decoder, body, header_length, scope)
        identify(scope, model, request)
        scope["state"]["note"] = f"rows={request.rows}"
        if is_stream:
            request.cancel_id = owned_id(scope["state"], scope["state"]["request_id"])
            return _Pieces(self._models, self._results(model, call, request))
        answer = await (only_result(model, request) if signature.streams else dispatcher.infer(request))
        about: dict[str, bool | str] = {FINAL: True} if call.streams else {}
        about |= omission_parameters(answer.omitted) if answer.omitted else {}
        response = infer_response(
            model.name, model.version, signature, request, answer.outputs, about, is_partial=bool(answer.omitted)
        )
        return Reply(200, [_serialized(response, call)], cache_headers(answer.cache))

    async def _relayed(self, scope: Scope, model: str, dispatcher: TritonDispatcher, call: RpcMessage) -> ASGIApp:
        dispatcher.check_model(model)
        accept(scope, model, "generate_stream" if call.streams else "infer")
        metadata = [(name.lower(), value) for name, value in dispatcher.forwarded(scope["headers"])]
        key: str = scope["state"].get("key") or ""
        request = RpcRequest(call.message, call.raw)
        sequence = dispatcher.sequence_of(model, lambda: parameters_of(call.message))
        rpc = dispatcher.rpc(metadata, key, sequence)
        if call.streams:
            return _Pieces(self._models, _relayed_answers(rpc, request))
        try:
            async with rpc as opened:
                return Reply(200, [await opened.answer(request)], [])
        except RpcRefused as refused:
            status = _HTTP_STATUSES.get(refused.code, 500)
            return json_reply({"error": refused.message}, status, [(STATUS.encode(), b"%d" % refused.code)])

    async def _results(self, model: ServedModel, call: RpcMessage, request: Any) -> AsyncGenerator[bytes, None]:
        """The responses of a model that streams, or of the heads of a pipeline."""
        signature = model.dispatcher.check_ready()
        is_open: dict[str, bool | str] = {FINAL: False}
        async with results_of(model, request) as pieces:
            async for piece in pieces:
                if piece.error is not None:
                    about_head = f"head `{piece.head}`: " if piece.head else ""
                    yield stream_error(f"{about_head}{piece.error.message}", request.id)
                    continue
                about = {**is_open, "head": piece.head} if piece.head else is_open
                response = infer_response(
                    model.name, model.version, signature, request, piece.outputs, about, is_partial=bool(piece.head)
                )
                yield _serialized(response, call)
        if EMPTY_FINAL in call.message.parameters:
            last = pb.ModelInferResponse(model_name=model.name, model_version=model.version, id=request.id)
            last.parameters[FINAL].bool_param = True
            yield _serialized(last, call)

    async def _text(self, scope: Scope, model: ServedModel, call: RpcMessage) -> ASGIApp:
        """Have a language model answer as it answers Triton's generate extension."""
        fields, asks_stream = generate_fields(call.message)
        if asks_stream and not call.streams:
            raise BadRequest("stream: expected false, got true; send the request by ModelStreamInfer", field="stream")
        body = orjson.dumps(fields)
        kept = [pair for pair in scope["headers"] if not pair[0].startswith(b"content-")]
        scope["headers"] = [*kept, (b"content-type", b"application/json")]
        answer = await self._generate[asks_stream](scope, receiving(body))
        return _TextAnswer(answer, model, call)


def receiving(body: bytes) -> Receive:
    """ASGI's ``receive`` of a request whose body has arrived, and whose client leaves by a cancellation."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        message: Message | None = next(messages, None)
        return message or await asyncio.get_running_loop().create_future()

    return receive


def _serialized(response: Any, call: RpcMessage) -> bytes:
    message = pb.ModelStreamInferResponse(infer_response=response) if call.streams else response
    serialized: bytes = message.SerializeToString()
    return serialized


def stream_error(text: str, id: str) -> bytes:
    """A serialized ``ModelStreamInferResponse`` with an error.

    Args:
        text: the message.
        id: the id of the request.
    """
    message = pb.ModelStreamInferResponse(error_message=text, infer_response=pb.ModelInferResponse(id=id))
    serialized: bytes = message.SerializeToString()
    return serialized


async def _relayed_answers(
    rpc: AbstractAsyncContextManager[RpcCall], request: RpcRequest
) -> AsyncGenerator[bytes, None]:
    try:
        async with rpc as opened, contextlib.aclosing(opened.answers(request)) as answers:
            async for answer in answers:
                yield answer
    except RpcRefused as refused:
        yield stream_error(refused.message, request.message.id)


class _Pieces:
    """An answer in pieces; an error becomes the last of them.

    Args:
        models: counts the answer while it is under way.
        pieces: the serialized responses.
    """

    def __init__(self, models: Models, pieces: AsyncGenerator[bytes, None]) -> None:
        self._models = models
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        state: dict[str, Any] = scope["state"]
        self._models.streams += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            error: HeadwaterError | None = None
            try:
                async for piece in self._pieces:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except HeadwaterError as raised:
                error = raised
            except Exception as raised:
                error = internal_error(state, raised)
            if error is not None:
                note_error(state, error)
                state["error"] = error.with_traceback(None)
                body = stream_error(error.message, scope["extensions"][EXTENSION].message.id)
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._models.streams -= 1
            await self._pieces.aclose()


class _TextAnswer:
    """A language model's answer in the form of Triton's generate extension, as messages.

    Args:
        answer: the answer over HTTP.
        model: the model.
        call: the request.
    """

    def __init__(self, answer: ASGIApp, model: ServedModel, call: RpcMessage) -> None:
        self._answer = answer
        self._model = model
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        status = 0
        is_stream = False
        rest = b""

        async def translate(message: Message) -> None:
            nonlocal status, is_stream, rest
            if message["type"] == "http.response.start":
                status = message["status"]
                is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                await send({**message, "headers": []})
                return
            has_more = message.get("more_body", False)
            if status != 200:
                await send(message)
                return
            rest += message.get("body", b"")
            if is_stream:
                *events, rest = rest.split(b"\n\n")
                for event in events:
                    if (at := event.find(_EVENT)) >= 0:  # a comment may precede it
                        body = self._response(orjson.loads(event[at + len(_EVENT) :]), is_last=False)
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                if not has_more:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            elif not has_more:
                await send({**message, "body": self._response(orjson.loads(rest), is_last=True)})

        await self._answer(scope, receive, translate)

    def _response(self, fields: dict[str, Any], *, is_last: bool) -> bytes:
        """The serialized response for the JSON of an answer or event."""
        id = self._call.message.id
        if "error" in fields:
            return stream_error(str(fields["error"]), id)
        about = {**fields.get("parameters", {}), **{name: fields[name] for name in _FACTS if name in fields}}
        parameters = {name: value for name, value in about.items() if isinstance(value, (bool, int, float, str))}
        if self._call.streams:
            parameters[FINAL] = is_last or bool(fields.get("final", False))
        version = fields.get("model_version", self._model.version)  # the one that was chosen for the text
        response = text_response(self._model.name, version, id, fields.get("text_output", ""), parameters)
        return _serialized(response, self._call)


_FACTS: Final = ("finish_reason", "prompt_tokens", "completion_tokens")
"""Fields of an event that become parameters."""
