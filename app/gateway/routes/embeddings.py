"""``POST /v1/embeddings``: OpenAI's API over a model that declares an `inference.Embedding`."""

from __future__ import annotations

import base64
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from starlette.types import Receive, Scope

from app.codecs.faults import read_json
from app.codecs.tensors import InferRequest, OutputWish, RawTensor
from app.errors import BadRequest
from app.gateway.http.bodies import BodyReader, decoded
from app.gateway.http.entry import Endpoint
from app.gateway.http.exchange import DisconnectWatch
from app.gateway.http.replies import Reply
from app.gateway.models import Models
from app.telemetry.recorder import accept
from inference.datatypes import pack_bytes
from inference.errors import DeclarationError
from inference.model import Embedding, Scalar
from inference.signature import Signature

__all__ = ["EmbeddingsEndpoint", "EmbeddingsRequest"]

_JSON = (b"content-type", b"application/json")
_INPUT: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body."""

    model: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_INPUT)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: Annotated[str, Meta(description="A label, without effect")] | None = None


class EmbeddingsEndpoint(Endpoint):
    """Answers with one embedding per text."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        body, texts = await decoded(_read, raw)
        accept(scope, self._models.get(body.model).route.name, "embeddings")
        model = self._models.embedding(body.model)
        signature = model.dispatcher.check_ready()
        assert signature.embedding is not None
        request = _request(signature, signature.embedding, texts, body.dimensions)
        try:
            with DisconnectWatch(scope, receive):
                outputs, omitted = await model.dispatcher.infer(request)
        except BadRequest as error:
            error.field = "input"  # this API's name of the field
            raise
        for head in omitted:  # there is no embedding without it
            if head.error is not None:
                raise head.error
        vectors = outputs[signature.embedding.output]
        tokens = 0
        if signature.embedding.tokens is not None:
            tokens = int(np.frombuffer(outputs[signature.embedding.tokens].data, "<i4").sum())
        scope["state"]["note"] = f"rows={len(texts)}"
        return Reply(200, [_answer(body, vectors, tokens)], [_JSON])


def _read(raw: bytes) -> tuple[EmbeddingsRequest, list[str]]:
    """The body, and its texts."""
    body: EmbeddingsRequest = read_json(raw, EmbeddingsRequest)
    try:
        value: str | list[str] = read_json(body.input, str | list[str], "input")
    except BadRequest as error:
        hint = "this model takes a string or an array of strings; token ids are not supported"
        raise BadRequest(f"{error.message}; {hint}", field="input") from None
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise BadRequest("input: expected at least one string, got an empty list", field="input")
    return body, texts


def _request(signature: Signature, spec: Embedding, texts: list[str], dimensions: int | None) -> InferRequest:
    row_parameters: dict[str, Scalar] = {
        parameter.name: parameter.default for parameter in signature.parameters if parameter.per == "row"
    }
    if dimensions is not None:
        chosen = next((item for item in signature.parameters if item.name == spec.dimensions), None)
        if chosen is None:
            message = f"dimensions: model `{signature.name}` has embeddings of one length only; leave it out"
            raise BadRequest(message, field="dimensions")
        try:
            row_parameters[chosen.name] = chosen.check(dimensions)
        except DeclarationError as error:
            raise BadRequest(f"dimensions: {error}", field="dimensions") from error
    wanted = [spec.output] if spec.tokens is None else [spec.output, spec.tokens]
    return InferRequest(
        id="",
        inputs={spec.input: RawTensor("BYTES", (len(texts), 1), pack_bytes(text.encode() for text in texts))},
        rows=len(texts),
        outputs=[OutputWish(name, binary=True) for name in wanted],
        batch_parameters={item.name: item.default for item in signature.parameters if item.per == "batch"},
        row_parameters=row_parameters,
        heads=tuple(head.name for head in signature.heads if not set(wanted).isdisjoint(head.outputs)),
    )


def _answer(body: EmbeddingsRequest, vectors: RawTensor, tokens: int) -> bytes:
    # Rows that share a call are as long as the longest that any of them asked for.
    array = np.frombuffer(vectors.data, "<f4").reshape(vectors.shape)[:, : body.dimensions]
    embeddings: list[object] = list(array)
    if body.encoding_format == "base64":
        embeddings = [base64.b64encode(row.tobytes()).decode() for row in array]
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
