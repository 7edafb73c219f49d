"""Schemas of the bodies that are the same for every model: they are made of the structs that read the bodies."""

from __future__ import annotations

from typing import Any

import msgspec

from app.gateway.routes.embeddings import EmbeddingsRequest
from app.lm.chat import ChatRequest
from app.lm.completion import CompletionRequest
from app.lm.generate import GenerateRequest
from inference.engine import Sampling

__all__ = ["body_schemas", "of_models"]


def body_schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies' schemas by the structs' names, and the components that they refer to."""
    kinds = (ChatRequest, CompletionRequest, EmbeddingsRequest, GenerateRequest)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for schema in schemas.values():
        fields = {name: _without_null(field) for name, field in schema["properties"].items()}
        schema["properties"] = {name: field for name, field in fields.items() if field != {"type": "null"}}
        for name, default in msgspec.structs.asdict(Sampling()).items():
            if name in fields and default is not None:
                fields[name].setdefault("default", default)
    return {kind.__name__: schemas.pop(kind.__name__) for kind in kinds}, schemas


def of_models(schema: dict[str, Any], models: list[str]) -> dict[str, Any]:
    """The schema, with the models that the body may name."""
    return {**schema, "properties": {**schema["properties"], "model": {"type": "string", "enum": models}}}


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """A field's schema, less null: that is as if the field weren't there."""
    kinds = [one for one in field.get("anyOf", ()) if one != {"type": "null"}]
    rest = {key: value for key, value in field.items() if key != "anyOf" and (key, value) != ("default", None)}
    return {**(kinds[0] if len(kinds) == 1 else {"anyOf": kinds} if kinds else {}), **rest}
