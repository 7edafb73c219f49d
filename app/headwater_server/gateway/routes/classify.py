"""``POST /v1/classify``: scores of labels, from a model that declares a `headwater.Classification`.

The form is vLLM's. As in Jina's API, ``predictions`` has the labels of all scores, the best first.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Final, Literal

import msgspec
import orjson
from msgspec import Meta
from starlette.types import Receive, Scope

from headwater_server.codecs.faults import read_json
from headwater_server.errors import BadRequest
from headwater_server.gateway.http.bodies import BodyReader, decoded
from headwater_server.gateway.http.endpoint import Endpoint
from headwater_server.gateway.http.replies import JSON, Reply, cache_headers
from headwater_server.gateway.models import Models
from headwater_server.gateway.routes.mapped import chosen_model, compute, floats, text_calls, token_sum

__all__ = ["ClassifyEndpoint", "ClassifyRequest"]

_MAX_INPUTS: Final = 2048

_ITEM: Final = {
    "anyOf": [
        {"type": "string"},
        *(
            {
                "type": "object",
                "properties": {key: {"type": "string"}},
                "required": [key],
                "additionalProperties": False,
            }
            for key in ("text", "image")
        ),
    ]
}
_INPUT: Final = {"anyOf": [*_ITEM["anyOf"], {"type": "array", "minItems": 1, "maxItems": _MAX_INPUTS, "items": _ITEM}]}


class _ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str | None = None
    image: str | None = None


class ClassifyRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request to classify. An image is base64, or a data URL."""

    model: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema=_INPUT)]
    top_k: Annotated[int, Meta(ge=1, description="So many of the best labels; default: all")] | None = None
    user: Annotated[str, Meta(description="A label, without effect")] | None = None


class ClassifyEndpoint(Endpoint):
    """Answers with the scores of each input's labels."""

    def __init__(self, models: Models, reader: BodyReader) -> None:
        self._models = models
        self._reader = reader

    async def answer(self, scope: Scope, receive: Receive) -> Reply:
        """See `Endpoint.answer`."""
        raw, _ = await self._reader.read(scope, receive)
        body, items = await decoded(_read, raw, scope)
        model = chosen_model(self._models, scope, body.model, "classify", "classification")
        signature = model.dispatcher.check_ready()
        spec = signature.classification
        assert spec is not None
        rows = [_content(item, spec.media, place) for place, item in items]
        calls, wanted = text_calls(model, {spec.input: rows}), [spec.scores, spec.tokens]
        outputs, cache = await compute(scope, receive, model, calls, len(rows), wanted, "input")
        scores = floats(outputs[spec.scores], spec.scores, lambda row: items[row][0])
        labels = next(output.labels for output in signature.outputs if output.name == spec.scores)
        tokens = token_sum(outputs, spec.tokens)
        content = {
            "id": scope["state"]["request_id"],
            "object": "list",
            "created": int(time.time()),
            "model": body.model,
            "data": [_classified(index, labels, row, body.top_k) for index, row in enumerate(scores.tolist())],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return Reply(200, [orjson.dumps(content)], [JSON, *cache_headers(cache)])


def _read(raw: bytes) -> tuple[ClassifyRequest, list[tuple[str, str | _ContentPart]]]:
    """The body, and its inputs, each with the name of its place in the request, such as ``input[0]``.

    Raises:
        BadRequest: the body is wrong, or has no inputs or too many inputs.
    """
    body: ClassifyRequest = read_json(raw, ClassifyRequest)
    value: Any = read_json(body.input, str | _ContentPart | list[str | _ContentPart], "input", is_checked=True)
    if not isinstance(value, list):
        return body, [("input", value)]
    if not 0 < len(value) <= _MAX_INPUTS:
        raise BadRequest(f"input: expected 1 to {_MAX_INPUTS} inputs, got {len(value)}", field="input")
    return body, [(f"input[{index}]", item) for index, item in enumerate(value)]


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


def _classified(index: int, labels: tuple[str, ...], scores: list[float], top_k: int | None) -> dict[str, Any]:
    order = sorted(range(len(labels)), key=lambda place: -scores[place])
    best = order[0]
    return {
        "index": index,
        "object": "classification",
        "label": labels[best],
        "score": scores[best],
        "probs": scores,
        "num_classes": len(labels),
        "predictions": [{"label": labels[place], "score": scores[place]} for place in order[:top_k]],
    }
