"""``POST /v1/embeddings``: OpenAI's API over a model that declares an `inference.Embedding`, or that vLLM computes."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from starlette.types import Receive, Scope

from app.codecs.faults import read_json
from app.codecs.tensors import InferRequest, OutputWish, RawTensor
from app.dispatch.protocol import Dispatcher
from app.errors import BadRequest
from app.gateway.http.bodies import BodyReader, decoded
from app.gateway.http.entry import Endpoint
from app.gateway.http.exchange import DisconnectWatch
from app.gateway.http.replies import Reply
from app.gateway.models import Models
from app.gateway.routes.relay import answer_embeddings
from app.telemetry.recorder import accept
from app.vllm.dispatcher import VllmDispatcher
from inference.datatypes import pack_bytes
from inference.errors import DeclarationError
from inference.model import Embedding, Scalar
from inference.signature import Signature, TensorSpec

__all__ = ["EmbeddingsEndpoint", "EmbeddingsRequest"]

_JSON = (b"content-type", b"application/json")
_MAX_INPUTS: Final = 2048
"""OpenAI's limit."""
_MAX_VALUES: Final = 1 << 20
"""Token ids that travel together, those that fill up shorter rows included."""
_TOKEN_IDS: Final = TensorSpec("token_ids", "INT32", (-1,), optional=True)
_PAD: Final = -1
_TRUNCATE: Final = "truncate_prompt_tokens"
"""See `inference.Embedding`."""

_RELAYED: Final = ("model", "encoding_format", "dimensions", _TRUNCATE)
"""What vLLM gets of a body, besides its input."""

_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_TokenIds: TypeAlias = Annotated[list[_TokenId], Meta(min_length=1)]
_Inputs: TypeAlias = list[str] | list[list[int]]
_HINT: Final = "this model takes a string or an array of strings"

_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_SEVERAL: Final = {"type": "array", "minItems": 1, "maxItems": _MAX_INPUTS}
_INPUT: Final = {"anyOf": [
    {"type": "string"}, {**_SEVERAL, "items": {"type": "string"}}, _IDS, {**_SEVERAL, "items": _IDS},
]}  # fmt: skip


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body."""

    model: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_INPUT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate_prompt_tokens: (
        Annotated[
            int, Meta(ge=-1, description="Cut longer inputs to so many tokens, -1: to as many as the model reads")
        ]
        | None
    ) = None
    user: Annotated[str, Meta(description="A label, without effect")] | None = None


class EmbeddingsEndpoint(Endpoint):
    """Answers with one embedding per text, or per list of token ids."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        body, inputs = await decoded(_read, raw)
        model = self._models.choose(scope, body.model)
        accept(scope, model.route.name, "embeddings")
        self._models.check_embedding(model)
        signature = model.dispatcher.check_ready()
        assert signature.embedding is not None
        if isinstance(model.dispatcher, VllmDispatcher):
            assert signature.vllm is not None
            asked = {name: getattr(body, name) for name in _RELAYED if getattr(body, name) is not None}
            parts = _parts(inputs, _most(inputs, signature.vllm.max_requests))
            return await answer_embeddings(scope, receive, model.dispatcher, asked, parts)
        request = _Request(body, signature, signature.embedding)
        route = model.route
        ends_s = time.monotonic() + route.timeout_s
        vectors, tokens = [], 0
        with DisconnectWatch(scope, receive):
            for part in _parts(inputs, _most(inputs, route.max_queue_size)):
                left_us = int(1e6 * (ends_s - time.monotonic()))
                timeout_us = 0 if len(part) == len(inputs) else max(1, left_us)
                found, count = await _embedded(model.dispatcher, request.of(part, timeout_us), signature.embedding)
                vectors.append(found)
                tokens += count
        scope["state"]["note"] = f"rows={len(inputs)}"
        return Reply(200, [_answer(body, vectors, tokens)], [_JSON])


def _read(raw: bytes) -> tuple[EmbeddingsRequest, _Inputs]:
    """The body, and its texts or token ids."""
    body: EmbeddingsRequest = read_json(raw, EmbeddingsRequest)
    value: str | list[Any] = read_json(body.input, str | list[Any], "input", hint=_HINT)
    if isinstance(value, str):
        return body, [value]
    if not value:
        raise BadRequest("input: expected at least one string, got an empty list", field="input")
    if type(value[0]) is int:
        return body, [read_json(body.input, _TokenIds, "input")]
    if len(value) > _MAX_INPUTS:
        message = f"input: expected at most {_MAX_INPUTS} inputs, got {len(value)}; send them in several requests"
        raise BadRequest(message, field="input")
    if isinstance(value[0], list):
        return body, read_json(body.input, list[_TokenIds], "input")
    try:
        return body, read_json(body.input, list[str], "input")
    except BadRequest as error:
        raise BadRequest(f"{error.message}; {_HINT}", field="input") from None


def _most(inputs: _Inputs, queue_size: int) -> int:
    """The inputs in one call: all, unless the queue couldn't hold them; else half a queue, one call after the other."""
    return len(inputs) if len(inputs) <= queue_size else max(1, queue_size // 2)


def _parts(inputs: _Inputs, most: int) -> Iterator[_Inputs]:
    """The inputs in parts of so many at most, whose token ids are bounded, too."""
    start = width = 0
    for n, one in enumerate(inputs):
        width = max(width, 0 if isinstance(one, str) else len(one))
        if n > start and (n - start == most or (n - start + 1) * width > _MAX_VALUES):
            yield inputs[start:n]
            start, width = n, 0 if isinstance(one, str) else len(one)
    yield inputs[start:]


class _Request:
    """Makes the requests to the model.

    Args:
        body: the client's request.
        signature: the model's.
        spec: how the model serves embeddings.

    Raises:
        BadRequest: the request asks for what the model can't do.
    """

    def __init__(self, body: EmbeddingsRequest, signature: Signature, spec: Embedding) -> None:
        self._signature = signature
        self._spec = spec
        self._row_parameters: dict[str, Scalar] = {
            parameter.name: parameter.default for parameter in signature.parameters if parameter.per == "row"
        }
        self._set("dimensions", spec.dimensions, body.dimensions, "has embeddings of one length only")
        cut = body.truncate_prompt_tokens
        if cut is None and _TRUNCATE in self._row_parameters:
            cut = 0  # an input that is too long is refused
        self._set(_TRUNCATE, _TRUNCATE, cut, "cuts no inputs")

    def _set(self, field: str, name: str | None, value: int | None, otherwise: str) -> None:
        if value is None:
            return
        chosen = next((item for item in self._signature.parameters if item.name == name), None)
        if chosen is None:
            message = f"{field}: model `{self._signature.name}` {otherwise}; leave it out"
            raise BadRequest(message, field=field)
        try:
            self._row_parameters[chosen.name] = chosen.check(value)
        except DeclarationError as error:
            raise BadRequest(f"{field}: {error}", field=field) from error

    def of(self, part: _Inputs, timeout_us: int) -> InferRequest:
        """The request for some of the inputs."""
        signature, spec = self._signature, self._spec
        texts = [one.encode() if isinstance(one, str) else b"" for one in part]
        inputs = {spec.input: RawTensor("BYTES", (len(part), 1), pack_bytes(texts))}
        rows = [one for one in part if not isinstance(one, str)]
        if rows:
            if _TOKEN_IDS not in signature.inputs:
                raise BadRequest(f"input: {_HINT}; token ids are not supported", field="input")
            inputs[_TOKEN_IDS.name] = _padded(rows)
        wanted = [spec.output] if spec.tokens is None else [spec.output, spec.tokens]
        return InferRequest(
            id="",
            inputs=inputs,
            rows=len(part),
            outputs=[OutputWish(name, binary=True) for name in wanted],
            batch_parameters={item.name: item.default for item in signature.parameters if item.per == "batch"},
            row_parameters=self._row_parameters,
            heads=tuple(head.name for head in signature.heads if not set(wanted).isdisjoint(head.outputs)),
            timeout_us=timeout_us,
        )


def _padded(rows: Sequence[list[int]]) -> RawTensor:
    """Token ids as one tensor."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), _PAD, "<i4")
    for n, row in enumerate(rows):
        ids[n, : len(row)] = row
    return RawTensor("INT32", ids.shape, ids.tobytes())


async def _embedded(dispatcher: Dispatcher, request: InferRequest, spec: Embedding) -> tuple[RawTensor, int]:
    """The vectors of a request, and its number of tokens."""
    try:
        outputs, omitted = await dispatcher.infer(request)
    except BadRequest as error:
        error.field = "input"  # this API's name of the field
        raise
    for head in omitted:  # there is no embedding without it
        if head.error is not None:
            raise head.error
    tokens = 0 if spec.tokens is None else int(np.frombuffer(outputs[spec.tokens].data, "<i4").sum())
    return outputs[spec.output], tokens


def _answer(body: EmbeddingsRequest, parts: Sequence[RawTensor], tokens: int) -> bytes:
    embeddings: list[object] = []
    for vectors in parts:
        # Rows that share a call are as long as the longest that any of them asked for.
        array = np.frombuffer(vectors.data, "<f4").reshape(vectors.shape)[:, : body.dimensions]
        as_base64 = body.encoding_format == "base64"
        embeddings += [base64.b64encode(row.tobytes()).decode() for row in array] if as_base64 else list(array)
    return orjson.dumps(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": embedding}
                for index, embedding in enumerate(embeddings)
            ],
            "model": body.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )
