"""``POST /v1/classify`` and ``/classify``: scores of labels, from a model that declares a `headwater.Classification`;
and `classify`, with which other routes classify.

The form is vLLM's. As in Jina's API, ``predictions`` has the labels of all scores, the best first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from headwater.signature import Signature
from headwater_server.codecs.faults import read_json
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.replies import Reply
from headwater_server.gateway.routes import mapped
from headwater_server.gateway.routes.mapped import MAX_ROWS, Call, OnlyModel, Result
from headwater_server.gateway.routes.rerank import best_first

__all__ = ["ClassifyRequest", "Items", "classify", "labels_of", "predictions", "read_items", "respond"]

_KEYED: Final = [
    {"type": "object", "properties": {key: {"type": "string"}}, "required": [key], "additionalProperties": False}
    for key in ("text", "image")
]
_ITEM: Final = {"anyOf": [{"type": "string"}, *_KEYED]}
_INPUT: Final = {"anyOf": [*_ITEM["anyOf"], {"type": "array", "minItems": 1, "maxItems": MAX_ROWS, "items": _ITEM}]}


class _ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    image: str | None = None


Items: TypeAlias = Sequence[tuple[str, str | _ContentPart]]
"""Texts and images, each after the name of its place in the request, such as ``input[0]``."""


class ClassifyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to classify. An image is base64, or a data URL."""

    model: OnlyModel | None = None
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_INPUT)]
    top_k: Annotated[int, Meta(ge=1, description="So many of the best labels; default: all")] | None = None
    user: Annotated[str, Meta(description="A label, without effect")] | None = None


async def respond(call: Call) -> Reply:
    """Answer with the scores of each input's labels."""
    body, items = await call.decode(_read)
    model, scores, tokens, cache = await classify(call, body.model, items)
    labels = labels_of(model.dispatcher.check_ready())
    data = [
        {
            **predictions(labels, row, 1)[0],
            "probs": row,
            "num_classes": len(labels),
            "predictions": predictions(labels, row, body.top_k),
        }
        for row in scores
    ]
    return mapped.reply(mapped.listed(call, model, "classification", data, tokens), cache)


def _read(raw: bytes) -> tuple[ClassifyRequest, Items]:
    body: ClassifyRequest = read_json(raw, ClassifyRequest)
    return body, read_items(body.input)


def read_items(raw: msgspec.Raw) -> Items:
    """The texts and images of the field ``input``.

    Raises:
        BadRequest: the field is wrong, or has no inputs or too many inputs.
    """
    value: Any = read_json(raw, str | _ContentPart | list[str | _ContentPart], "input", is_checked=True)
    if not isinstance(value, list):
        return [("input", value)]
    mapped.check_count("input", len(value), "inputs")
    return [(f"input[{index}]", item) for index, item in enumerate(value)]


async def classify(call: Call, name: str | None, items: Items) -> Result:
    """Score the labels of texts or images; ``name`` is the model that the body names.

    Raises:
        HeadwaterError: the request can't be answered.
    """
    model = mapped.chosen_model(call, name, "classify", "classification")
    spec = model.dispatcher.check_ready().classification
    assert spec is not None
    field = items[0][0].partition("[")[0]
    rows = [_content(item, spec.media, place) for place, item in items]
    calls, wanted = mapped.text_calls(model, {spec.input: rows}), [spec.scores, spec.tokens]
    outputs, cache = await mapped.compute(call, model, calls, len(rows), wanted, field)
    scores = mapped.floats(outputs[spec.scores], spec.scores, lambda row: items[row][0]).tolist()
    return Result(model, scores, mapped.token_sum(outputs, spec.tokens), cache)


def labels_of(signature: Signature) -> tuple[str, ...]:
    """The labels of a model that classifies, in the order of its scores."""
    spec = signature.classification
    assert spec is not None
    return next(output.labels for output in signature.outputs if output.name == spec.scores)


def predictions(labels: Sequence[str], scores: Sequence[float], top_k: int | None = None) -> list[dict[str, Any]]:
    """The ``top_k`` labels with the highest scores, or all, the best first."""
    return [{"label": labels[place], "score": scores[place]} for place in best_first(scores, top_k)]


def _content(item: str | _ContentPart, media: Literal["text", "image"], place: str) -> bytes:
    """The text or image of an input, encoded.

    Raises:
        BadRequest: the input has another medium than the model reads, or both.
    """
    if isinstance(item, str):
        return item.encode()
    other_media: Literal["text", "image"] = "text" if media == "image" else "image"
    value = getattr(item, media)
    if value is None or getattr(item, other_media) is not None:
        raise BadRequest(f"{place}: expected {media} alone: this model reads {media}s", field="input")
    return bytes(value.encode())
