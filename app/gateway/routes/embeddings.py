"""``POST /v1/embeddings``: OpenAI's API over a model that declares an `inference.Embedding`."""

from __future__ import annotations

import base64
import re
from typing import Final, Literal

import msgspec
import numpy as np
import orjson
from starlette.types import Receive, Scope

from app.codecs.faults import PARSE_ERRORS, at, key_text, kind_of, shown, split_path
from app.codecs.tensors import InferRequest, OutputWish, RawTensor
from app.errors import BadRequest
from app.gateway.http.bodies import BodyReader
from app.gateway.http.entry import Endpoint
from app.gateway.http.exchange import DisconnectWatch
from app.gateway.http.replies import Reply
from app.gateway.models import Models
from app.telemetry.recorder import accept
from inference.datatypes import pack_bytes
from inference.errors import DeclarationError
from inference.model import Scalar
from inference.signature import EmbeddingSpec, Signature

__all__ = ["EmbeddingsEndpoint"]

_JSON = (b"content-type", b"application/json")
_FIELD: Final = re.compile(r"Object (contains unknown|missing required) field `(.*)`\Z", re.DOTALL)
_KINDS: Final = re.compile(r"Expected `([^`]*)`, got `([^`]*)`\Z")


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    input: msgspec.Raw
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    """A label of the client's own end user; it changes nothing here."""


class EmbeddingsEndpoint(Endpoint):
    """Embeds texts."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        body = _decode(raw)
        accept(scope, self._models.get(body.model).route.name, "embeddings")
        model = self._models.embedding(body.model)
        signature = model.dispatcher.check_ready()
        assert signature.embedding is not None
        texts = _texts(body.input)
        request = _request(signature, signature.embedding, texts, body.dimensions)
        try:
            with DisconnectWatch(scope, receive):
                outputs, omitted = await model.dispatcher.infer(request)
        except BadRequest as error:
            error.field = "input"  # as this API calls it
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


def _decode(raw: bytes) -> _Body:
    try:
        return msgspec.json.decode(raw, type=_Body)
    except msgspec.ValidationError as error:
        message, path = split_path(error)
        path = path.lstrip(".")
        if named := _FIELD.match(message):
            came = f"got {shown(named[2])}" if named[1] == "contains unknown" else "got an object without it"
            field = key_text(named[2])
            raise at(field, None, f"expected the fields {', '.join(_Body.__struct_fields__)}, {came}") from None
        if kinds := _KINDS.match(message):
            raise at(path or "body", None, f"expected {kind_of(kinds[1])}, got {kind_of(kinds[2])}") from None
        raise at(path or "body", None, f"{message[:1].lower()}{message[1:]}") from None
    except UnicodeDecodeError as error:
        raise _not_utf8("body", error) from None
    except PARSE_ERRORS as error:
        raise BadRequest(f"body: expected a JSON object: {error}", field="body") from None


def _texts(raw: msgspec.Raw) -> list[str]:
    try:
        value = msgspec.json.decode(raw, type=str | list[str])
    except UnicodeDecodeError as error:
        raise _not_utf8("input", error) from None
    except PARSE_ERRORS as error:
        raise BadRequest(
            "input: expected a string or a list of strings (lists of token ids are not supported by this model): "
            f"{error}",
            field="input",
        ) from None
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise BadRequest("input: expected at least one string, got an empty list", field="input")
    return texts


def _not_utf8(field: str, error: UnicodeDecodeError) -> BadRequest:
    return at(field, None, f"expected JSON in UTF-8, got byte 0x{error.object[error.start]:02x} in a string")


def _request(signature: Signature, spec: EmbeddingSpec, texts: list[str], dimensions: int | None) -> InferRequest:
    row_parameters: dict[str, Scalar] = {
        parameter.name: parameter.default for parameter in signature.parameters if parameter.per == "row"
    }
    if dimensions is not None:
        chosen = next((item for item in signature.parameters if item.name == spec.dimensions), None)
        if chosen is None:
            raise BadRequest(
                f"dimensions: model `{signature.name}` has embeddings of one length only; leave it out",
                field="dimensions",
            )
        if dimensions < 1:
            raise BadRequest(f"dimensions: expected at least 1, got {shown(dimensions)}", field="dimensions")
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


def _answer(body: _Body, vectors: RawTensor, tokens: int) -> bytes:
    rows, length = vectors.shape
    # Rows that share a call are as long as the longest that any of them asked for.
    array = np.frombuffer(vectors.data, "<f4").reshape(rows, length)[:, : body.dimensions]
    embeddings: list[object]
    if body.encoding_format == "base64":
        embeddings = [base64.b64encode(array[row].tobytes()).decode() for row in range(rows)]
    else:
        embeddings = [array[row] for row in range(rows)]
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
