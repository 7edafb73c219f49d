"""``POST /v1/embeddings``: OpenAI's API over a model that declares a `headwater.Embedding`, or that vLLM computes; and
`embed`, with which other routes embed."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import orjson
from msgspec import Meta

from headwater.datatypes import pack_bytes
from headwater.model import Embedding, Scalar
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.faults import read_json
from headwater_server.codecs.tensors import RawTensor
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.replies import Reply
from headwater_server.gateway.models import ServedModel
from headwater_server.gateway.routes import mapped
from headwater_server.gateway.routes.mapped import MAX_ROWS, Call, Inputs, OnlyModel, Result
from headwater_server.gateway.routes.vllm_requests import answer_embeddings
from headwater_server.vllm.vllm_model import VllmDispatcher

__all__ = ["INPUTS_SCHEMA", "TRUNCATE", "EmbeddingsRequest", "Setting", "embed", "read", "read_inputs", "respond"]

_MAX_VALUES: Final = 1 << 20
"""Limit of the token ids in a call, including padding of shorter rows."""
_TOKEN_IDS: Final = TensorSpec("token_ids", "INT32", (-1,), optional=True)
_PAD: Final = -1
TRUNCATE: Final = "truncate_prompt_tokens"
"""See `headwater.Embedding`."""

_NO_PROMPTS: Final = "has no prompts to choose"

_TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_TokenIds: TypeAlias = Annotated[list[_TokenId], Meta(min_length=1)]
_Inputs: TypeAlias = list[str] | list[list[int]]
"""Texts, or the token ids of each text."""
_NOT_SPACE: Final = re.compile(rb"\S")
_Vector: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]
_SYNONYMS: Final = {
    **dict.fromkeys(("query", "search_query"), ("query",)),
    **dict.fromkeys(("document", "passage", "search_document"), ("document", "passage")),
}
"""Names of the prompts that an ``input_type`` of Cohere, Voyage or NVIDIA may stand for."""
_HINT: Final = "this model takes a string or an array of strings"

_IDS: Final = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_SEVERAL: Final = {"type": "array", "maxItems": MAX_ROWS}
INPUTS_SCHEMA: Final = {"anyOf": [
    {"type": "string"}, {**_SEVERAL, "items": {"type": "string"}}, _IDS, {**_SEVERAL, "items": _IDS},
]}  # fmt: skip


class EmbeddingsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request for embeddings."""

    model: OnlyModel | None = None
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=INPUTS_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, description="-1: as many as the model reads")] | None = None
    truncate: Annotated[bool, Meta(description="true: the same as -1; false: longer inputs are refused")] | None = None
    prompt_name: Annotated[str, Meta(description="The model's prompt that stands before each text")] | None = None
    input_type: Annotated[str, Meta(description="The same, in Cohere's and Voyage's words, too")] | None = None
    user: Annotated[str, Meta(description="A label, without effect")] | None = None


class Setting(NamedTuple):
    """A field of a request for embeddings, besides the inputs."""

    field: str
    about: Literal["dimensions", "cut", "prompt"]
    """``cut``: the tokens to which a longer input is cut, -1: as many as the model reads; 0: it is refused."""
    value: Scalar | None
    """None: the request doesn't set it; then the model's `headwater.Embedding` says whether longer inputs are cut."""
    needs_model: bool = True
    """Whether a model that has no such parameter refuses the field; else the field has no effect there."""


async def respond(call: Call) -> Reply:
    """Answer with one embedding per text, or per list of token ids."""
    body, inputs = await call.decode(read)
    model = mapped.chosen_model(call, body.model, "embeddings", "embedding")
    cut = Setting(TRUNCATE, "cut", body.truncate_prompt_tokens)
    if body.truncate is not None:
        cut = Setting("truncate", "cut", -1 if body.truncate else 0, needs_model=False)
    settings = [
        Setting("dimensions", "dimensions", body.dimensions),
        cut,
        Setting("input_type", "prompt", body.input_type),
        Setting("prompt_name", "prompt", body.prompt_name),
    ]
    if isinstance(model.dispatcher, VllmDispatcher):
        form = {} if body.encoding_format is None else {"encoding_format": body.encoding_format}
        return await _relayed(call, model, inputs, "input", settings, form)
    _, rows, tokens, cache = await embed(call, model, inputs, "input", *settings)
    as_base64 = body.encoding_format == "base64"
    embeddings = [base64.b64encode(row.tobytes()).decode() for row in rows] if as_base64 else rows
    content = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": embedding}
            for index, embedding in enumerate(embeddings)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return mapped.reply(content, cache)


def read(raw: bytes) -> tuple[EmbeddingsRequest, _Inputs]:
    """The body, and its texts or lists of token ids. Raises `BadRequest`."""
    body: EmbeddingsRequest = read_json(raw, EmbeddingsRequest)
    if body.truncate is not None and body.truncate_prompt_tokens is not None:
        raise BadRequest(f"truncate: expected it or {TRUNCATE}, got both; leave one out", field="truncate")
    return body, read_inputs(body.input, "input")


def read_inputs(raw: msgspec.Raw, field: str) -> _Inputs:
    """The texts or lists of token ids of a field; a single text or list is a list with it. Raises `BadRequest`."""
    text = memoryview(raw)
    if text[0] != ord("["):
        return [read_json(raw, str | list[str], field, hint=_HINT, is_checked=True)]
    first = _NOT_SPACE.search(text, 1)
    assert first is not None  # the text is valid JSON
    if first[0] in b"-0123456789":
        return [read_json(raw, _TokenIds, field, is_checked=True)]
    inputs: _Inputs
    if first[0] == b"[":
        inputs = read_json(raw, list[_TokenIds], field, is_checked=True)
    else:
        inputs = read_json(raw, list[str], field, hint=_HINT, is_checked=True)
    if len(inputs) > MAX_ROWS:
        message = f"{field}: expected at most {MAX_ROWS} inputs, got {len(inputs)}; send them in several requests"
        raise BadRequest(message, field=field)
    return inputs


async def embed(call: Call, model: ServedModel, inputs: _Inputs, field: str, *settings: Setting) -> Result:
    """Compute the embeddings of texts or token ids, perhaps of none; ``field`` is the request's field that has them. Of
    several prompts among the settings the last applies.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    if isinstance(model.dispatcher, VllmDispatcher):
        relayed = await _relayed(call, model, inputs, field, settings, {"encoding_format": "base64"})
        answer = orjson.loads(relayed.content()[0])
        vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in answer["data"]]
        return Result(model, vectors, answer["usage"]["prompt_tokens"], "")
    signature = model.dispatcher.check_ready()
    spec = signature.embedding
    assert spec is not None
    parameters = _parameters(model, settings)
    parts = _parts(inputs, mapped.rows_at_once(len(inputs), model.route.max_queue_size))
    calls, wanted = (_call(part, signature, spec, field) for part in parts), [spec.output, spec.tokens]
    outputs, cache = await mapped.compute(call, model, calls, len(inputs), wanted, field, parameters)
    length: Any = next((setting.value for setting in settings if setting.about == "dimensions"), None)
    rows: list[_Vector] = []
    for tensor in outputs[spec.output]:
        place = [f"{field}[{index}]" for index in range(len(rows), len(rows) + tensor.shape[0])].__getitem__
        # Rows that share a call are as long as the longest embedding that any of their requests asked for.
        rows.extend(mapped.floats([tensor], spec.output, place, length=length))
    return Result(model, rows, mapped.token_sum(outputs, spec.tokens), cache)


async def _relayed(
    call: Call, model: ServedModel, inputs: _Inputs, field: str, settings: Sequence[Setting], form: dict[str, Any]
) -> Reply:
    """The answer of ``/v1/embeddings`` for a model that vLLM computes; ``form`` has more fields of vLLM's request."""
    dispatcher = model.dispatcher
    assert isinstance(dispatcher, VllmDispatcher)
    signature = dispatcher.check_ready()
    assert signature.vllm is not None
    parameters = _parameters(model, settings)
    body = {"model": model.name, **{name: value for name, value in parameters.items() if value}, **form}
    parts = _parts(inputs, mapped.rows_at_once(len(inputs), signature.vllm.max_requests))
    return await answer_embeddings(call.scope, call.receive, dispatcher, body, parts, field)


def _parameters(model: ServedModel, settings: Sequence[Setting]) -> dict[str, Scalar]:
    """The model's parameters that the settings set; of a model that vLLM computes, the fields of vLLM's request.

    Raises:
        BadRequest: the request has an option that the model does not support.
    """
    signature = model.dispatcher.check_ready()
    spec = signature.embedding
    assert spec is not None
    choices = {item.name: item.choices or () for item in signature.parameters if item.per == "row"}
    is_relayed = signature.vllm is not None
    names = {
        "dimensions": ("dimensions" if is_relayed else spec.dimensions, "serves embeddings of a fixed length"),
        "cut": (TRUNCATE, "cuts no inputs"),
        "prompt": (spec.prompt, _NO_PROMPTS),
    }
    chosen: dict[str, Scalar] = {}
    for field, about, value, needs_model in settings:
        name, lack = names[about]
        relays = is_relayed and about != "prompt"
        if about == "cut" and value is None:
            value, needs_model = -1 if spec.truncate else 0, False
        if value is None or not (needs_model or relays or name in choices):
            continue
        if field == "input_type":  # the prompt with the same name, or with a synonym
            synonyms = (value, *_SYNONYMS.get(str(value), ()))
            value = next((word for word in synonyms if word in choices.get(str(name), ())), value)
        chosen[str(name)] = value if relays else mapped.parameter_value(model, name, field, value, lack)
    return chosen


def _parts(inputs: _Inputs, max_inputs: int) -> Iterator[_Inputs]:
    """Split the inputs into parts of at most ``max_inputs`` inputs and `_MAX_VALUES` token ids."""
    start = width = 0
    for n, entry in enumerate(inputs):
        width = max(width, 0 if isinstance(entry, str) else len(entry))
        if n > start and (n - start == max_inputs or (n - start + 1) * width > _MAX_VALUES):
            yield inputs[start:n]
            start, width = n, 0 if isinstance(entry, str) else len(entry)
    if inputs:
        yield inputs[start:]


def _call(part: _Inputs, signature: Signature, spec: Embedding, field: str) -> Inputs:
    """The inputs of the call for some of the texts or lists of token ids.

    Raises:
        BadRequest: the inputs are token ids, which the model doesn't take.
    """
    texts = [entry.encode() if isinstance(entry, str) else b"" for entry in part]
    inputs: Inputs = {spec.input: RawTensor("BYTES", (len(part), 1), pack_bytes(texts))}
    rows = [entry for entry in part if not isinstance(entry, str)]
    if rows:
        if _TOKEN_IDS not in signature.inputs:
            raise BadRequest(f"{field}: {_HINT}; token ids are not supported", field=field)
        inputs[_TOKEN_IDS.name] = _padded(rows)
    return inputs


def _padded(rows: Sequence[list[int]]) -> RawTensor:
    """Token ids as a single tensor, with padding."""
    width = max(map(len, rows))
    ids = np.full((len(rows), width), _PAD, "<i4")
    for n, row in enumerate(rows):
        ids[n, : len(row)] = row
    return RawTensor("INT32", ids.shape, ids.tobytes())
