"""``POST /v1/embeddings``: OpenAI's API over a model that declares a `headwater.Embedding`, or that vLLM computes."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import numpy as np
import orjson
from msgspec import Meta
from starlette.types import Receive, Scope

from headwater.datatypes import pack_bytes
from headwater.errors import DeclarationError
from headwater.model import Embedding, Scalar
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.faults import read_json
from headwater_server.codecs.tensors import RawTensor
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.replies import JSON, Reply, cache_headers
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.mapped import Inputs, chosen_model, compute, floats, rows_at_once, token_sum
from headwater_server.gateway.routes.vllm_requests import answer_embeddings
from headwater_server.vllm.vllm_model import VllmDispatcher

__all__ = ["EmbeddingsEndpoint", "EmbeddingsRequest", "read"]

_MAX_INPUTS: Final = 2048
"""OpenAI's limit."""
_MAX_VALUES: Final = 1 << 20
"""Limit of the token ids in a call, including padding of shorter rows."""
_TOKEN_IDS: Final = TensorSpec("token_ids", "INT32", (-1,), optional=True)
_PAD: Final = -1
_TRUNCATE: Final = "truncate_prompt_tokens"
"""See `headwater.Embedding`."""

_NO_PROMPTS: Final = "has no prompts to choose"

_RELAYED: Final = ("model", "encoding_format", "dimensions", _TRUNCATE)
"""Fields of a body that vLLM gets, besides the input."""

_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_TokenIds: TypeAlias = Annotated[list[_TokenId], Meta(min_length=1)]
_Inputs: TypeAlias = list[str] | list[list[int]]
_NOT_SPACE: Final = re.compile(rb"\S")
_Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
_SYNONYMS: Final = {
    **dict.fromkeys(("query", "search_query"), ("query",)),
    **dict.fromkeys(("document", "passage", "search_document"), ("document", "passage")),
}
"""Names of the prompts that an ``input_type`` of Cohere, Voyage or NVIDIA may stand for."""
_HINT: Final = "this model takes a string or an array of strings"

_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_SEVERAL: Final = {"type": "array", "minItems": 1, "maxItems": _MAX_INPUTS}
_INPUT: Final = {"anyOf": [
    {"type": "string"}, {**_SEVERAL, "items": {"type": "string"}}, _IDS, {**_SEVERAL, "items": _IDS},
]}  # fmt: skip


class EmbeddingsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for embeddings."""

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
    prompt_name: Annotated[str, Meta(description="The model's prompt that stands before each text")] | None = None
    input_type: (
        Annotated[
            str, Meta(description="The same in Cohere's and Voyage's words: `search_query` is the prompt `query`, too")
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
        body, inputs = await decoded(read, raw, scope)
        model = chosen_model(self._models, scope, body.model, "embeddings", "embedding")
        signature = model.dispatcher.check_ready()
        spec = signature.embedding
        assert spec is not None
        if isinstance(model.dispatcher, VllmDispatcher):
            assert signature.vllm is not None
            for field in ("prompt_name", "input_type"):
                if getattr(body, field) is not None:
                    raise BadRequest(f"{field}: model `{body.model}` {_NO_PROMPTS}; leave it out", field=field)
            fields = {name: getattr(body, name) for name in _RELAYED if getattr(body, name) is not None}
            parts = _parts(inputs, rows_at_once(len(inputs), signature.vllm.max_requests))
            return await answer_embeddings(scope, receive, model.dispatcher, fields, parts)
        parameters = _row_parameters(body, signature, spec)
        parts = _parts(inputs, rows_at_once(len(inputs), model.route.max_queue_size))
        calls, wanted = (_call(part, signature, spec) for part in parts), [spec.output, spec.tokens]
        outputs, cache = await compute(scope, receive, model, calls, len(inputs), wanted, "input", parameters)
        rows: list[_Vector] = []
        for tensor in outputs[spec.output]:
            place = [f"input[{index}]" for index in range(len(rows), len(rows) + tensor.shape[0])].__getitem__
            # Rows that share a call are as long as the longest embedding that any of their requests asked for.
            rows.extend(floats([tensor], spec.output, place, length=body.dimensions))
        content = _answer(body, rows, token_sum(outputs, spec.tokens))
        return Reply(200, [content], [JSON, *cache_headers(cache)])


def read(raw: bytes) -> tuple[EmbeddingsRequest, _Inputs]:
    """The body, and its texts or lists of token ids. A single text or list is a list with it.

    Raises:
        BadRequest: the body is wrong, or has no inputs or too many inputs.
    """
    body: EmbeddingsRequest = read_json(raw, EmbeddingsRequest)
    text = memoryview(body.input)
    if text[0] != ord("["):
        return body, [read_json(body.input, str | list[str], "input", hint=_HINT, is_checked=True)]
    first = _NOT_SPACE.search(text, 1)
    assert first is not None  # the text is valid JSON
    if first[0] == b"]":
        raise BadRequest("input: expected at least one string, got an empty list", field="input")
    if first[0] in b"-0123456789":
        return body, [read_json(body.input, _TokenIds, "input", is_checked=True)]
    inputs: _Inputs
    if first[0] == b"[":
        inputs = read_json(body.input, list[_TokenIds], "input", is_checked=True)
    else:
        inputs = read_json(body.input, list[str], "input", hint=_HINT, is_checked=True)
    if len(inputs) > _MAX_INPUTS:
        message = f"input: expected at most {_MAX_INPUTS} inputs, got {len(inputs)}; send them in several requests"
        raise BadRequest(message, field="input")
    return body, inputs


def _parts(inputs: _Inputs, max_inputs: int) -> Iterator[_Inputs]:
    """Split the inputs into parts of at most ``max_inputs`` inputs and `_MAX_VALUES` token ids."""
    start = width = 0
    for n, entry in enumerate(inputs):
        width = max(width, 0 if isinstance(entry, str) else len(entry))
        if n > start and (n - start == max_inputs or (n - start + 1) * width > _MAX_VALUES):
            yield inputs[start:n]
            start, width = n, 0 if isinstance(entry, str) else len(entry)
    yield inputs[start:]


def _row_parameters(body: EmbeddingsRequest, signature: Signature, spec: Embedding) -> dict[str, Scalar]:
    """The model's parameters that the request's options set.

    Raises:
        BadRequest: the request has an option that the model does not support.
    """
    by_name = {item.name: item for item in signature.parameters}
    cut = body.truncate_prompt_tokens
    if cut is None and _TRUNCATE in by_name and by_name[_TRUNCATE].per == "row":
        cut = -1 if spec.truncate else 0  # 0: an input that is too long is refused
    # The prompt that an `input_type` stands for is the prompt with the same name, or with a synonym.
    prompts = by_name[spec.prompt].choices or () if spec.prompt in by_name else ()
    names = () if body.input_type is None else (body.input_type, *_SYNONYMS.get(body.input_type, ()))
    prompt = next((name for name in names if name in prompts), body.input_type)
    chosen: dict[str, Scalar] = {}
    for field, name, value, otherwise in (
        ("dimensions", spec.dimensions, body.dimensions, "serves embeddings of a fixed length"),
        (_TRUNCATE, _TRUNCATE, cut, "cuts no inputs"),
        ("input_type", spec.prompt, prompt, _NO_PROMPTS),
        ("prompt_name", spec.prompt, body.prompt_name, _NO_PROMPTS),
    ):
        if value is None:
            continue
        if name not in by_name:
            raise BadRequest(f"{field}: model `{signature.name}` {otherwise}; leave it out", field=field)
        try:
            chosen[name] = by_name[name].check(value)
        except DeclarationError as error:
            raise BadRequest(f"{field}: {error}", field=field) from error
    return chosen


def _call(part: _Inputs, signature: Signature, spec: Embedding) -> Inputs:
    """The inputs of the call for some of the texts or lists of token ids.

    Raises:
        BadRequest: the inputs are token ids, which the model doesn't take.
    """
    texts = [entry.encode() if isinstance(entry, str) else b"" for entry in part]
    inputs: Inputs = {spec.input: RawTensor("BYTES", (len(part), 1), pack_bytes(texts))}
    rows = [entry for entry in part if not isinstance(entry, str)]
    if rows:
        if _TOKEN_IDS not in signature.inputs:
            raise BadRequest(f"input: {_HINT}; token ids are not supported", field="input")
        inputs[_TOKEN_IDS.name] = _padded(rows)
    return inputs


def _padded(rows: Sequence[list[int]]) -> RawTensor:
    """Token ids as a single tensor, with padding."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), _PAD, "<i4")
    for n, row in enumerate(rows):
        ids[n, : len(row)] = row
    return RawTensor("INT32", ids.shape, ids.tobytes())


def _answer(body: EmbeddingsRequest, rows: list[_Vector], tokens: int) -> bytes:
    as_base64 = body.encoding_format == "base64"
    embeddings = [base64.b64encode(row.tobytes()).decode() for row in rows] if as_base64 else rows
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
