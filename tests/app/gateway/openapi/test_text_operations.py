"""The schemas of bodies: they say what the structs check."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater_server.gateway.openapi.text_operations import body_schemas, of_models

BODIES, COMPONENTS = body_schemas()


@pytest.mark.parametrize(
    ("body", "field", "schema"),
    [
        ("ChatRequest", "max_tokens", {"type": "integer", "minimum": 1, "deprecated": True}),
        ("ChatRequest", "n", {"type": "integer", "minimum": 1, "maximum": 128, "default": 1}),
        ("ChatRequest", "stream_options", {"$ref": "#/components/schemas/StreamOptions"}),
        ("CompletionRequest", "max_tokens", {"type": "integer", "minimum": 0, "default": 16}),
        ("CompletionRequest", "top_p", {"type": "number", "minimum": 0, "maximum": 1, "default": 1}),
        ("CompletionRequest", "logprobs", {"type": "integer", "minimum": 0, "maximum": 20}),
        ("ResponsesRequest", "top_logprobs", {"type": "integer", "minimum": 0, "maximum": 20}),
        ("ResponsesRequest", "truncation", {"enum": ["auto", "disabled"], "description": "Nothing is cut off"}),
        ("EmbeddingsRequest", "dimensions", {"type": "integer", "minimum": 1}),
        ("GenerateRequest", "id", {"type": "string", "maxLength": 1000}),
        ("GenerateRequest", "parameters", {"$ref": "#/components/schemas/GenerateParameters"}),
    ],
)
def test_bounds_and_defaults_are_those_that_hold(body: str, field: str, schema: dict[str, Any]) -> None:
    assert BODIES[body]["properties"][field] == schema


def test_bounds_within_arrays_and_objects_are_there_too() -> None:
    fields = COMPONENTS["GenerateParameters"]["properties"]
    text = {"type": "string", "minLength": 1, "maxLength": 1024}
    assert fields["stop"]["anyOf"] == [text, {"type": "array", "items": text, "maxItems": 16}]
    assert fields["logit_bias"]["additionalProperties"] == {"type": "number", "minimum": -100, "maximum": 100}


def test_fields_that_are_not_supported_are_left_out() -> None:
    assert "audio" not in BODIES["ChatRequest"]["properties"]
    assert "null" not in json.dumps([BODIES, COMPONENTS])
    assert not BODIES["ChatRequest"]["additionalProperties"]


def test_the_models_are_listed() -> None:
    fields = of_models(BODIES["ChatRequest"], ["a", "b"])["properties"]
    assert fields["model"] == {"type": "string", "enum": ["a", "b"]}
    assert fields.keys() == BODIES["ChatRequest"]["properties"].keys()
