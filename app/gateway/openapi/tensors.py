"""Schemas of what requests and answers are made of: elements, tensors in words, parameters.

The OpenAPI operations of the generate extension, for one model.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from app.codecs.parameters import RequestId
from inference.datatypes import DATATYPES
from inference.signature import Signature, TensorSpec

__all__ = ["ID", "OMISSIONS", "described", "element_schema", "generate_operations", "parameter_schemas"]


ID: Final = msgspec.json.schema(RequestId)

OMISSIONS: Final[dict[str, Any]] = {
    "type": "object",
    "description": "Only if heads were left out: `omitted_heads`, their names with commas between them, and of each "
    "`head.NAME.status` and `head.NAME.reason`",
    "properties": {"omitted_heads": {"type": "string"}},
    "additionalProperties": {"type": "string"},
}
"""The ``parameters`` of an answer."""

_INTEGER_BOUNDS = {
    name: (-(1 << (8 * size - 1)), (1 << (8 * size - 1)) - 1) if name.startswith("INT") else (0, (1 << 8 * size) - 1)
    for name, size in ((row.name, row.size_bytes) for row in DATATYPES.values())
    if "INT" in name
}


def described(spec: TensorSpec) -> str:
    """A tensor in words."""
    dims = ", ".join(["rows", *("any" if dim < 0 else str(dim) for dim in spec.shape)])
    return f"`{spec.name}` {spec.datatype} [{dims}]{' (optional)' if spec.optional else ''}"


def element_schema(datatype: str) -> dict[str, Any]:
    """One element."""
    if datatype == "BOOL":
        return {"type": "boolean"}
    if datatype == "BYTES":
        return {"type": "string"}
    if datatype in _INTEGER_BOUNDS:
        low, high = _INTEGER_BOUNDS[datatype]
        return {"type": "integer", "minimum": low, "maximum": high}
    return {"type": "number"}


def parameter_schemas(signature: Signature) -> dict[str, Any]:
    """The request parameters that every route of the model takes, by name."""
    schemas: dict[str, Any] = {
        "priority": {"type": "integer", "minimum": 0, "description": "1 is the most urgent; 0 is the default"},
        "timeout": {"type": "integer", "minimum": 0, "description": "The request's own deadline in microseconds"},
    }
    if signature.heads:
        names = [head.name for head in signature.heads]
        schemas["heads"] = {
            "description": f"The wanted heads, of {', '.join(names)}: a list, or names with commas between them; "
            "all by default",
            "anyOf": [
                {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "string", "enum": names}},
                {"type": "string", "minLength": 1},
            ],
            "example": names[:1],
        }
    for parameter in signature.parameters:
        kind = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}[parameter.type]
        entry: dict[str, Any] = {"type": kind, "default": parameter.default, "description": parameter.description}
        if parameter.minimum is not None:
            entry["minimum"] = parameter.minimum
        if parameter.maximum is not None:
            entry["maximum"] = parameter.maximum
        if parameter.choices is not None:
            entry["enum"] = list(parameter.choices)
        schemas[parameter.name] = entry
    return schemas


LARGEST_EXAMPLE = 100
"""Elements of an input, for which an example is made up."""


def generate_operations(signature: Signature) -> dict[str, dict[str, Any]]:
    """The operations by route: ``generate`` and ``generate_stream``; {} if the model's tensors have no JSON form."""
    needed = [spec for spec in signature.inputs if not spec.optional]
    in_json = [head.name for head in signature.heads if _has_json(signature, head.outputs)]
    outputs = [spec.name for spec in signature.outputs]
    if not all(DATATYPES[spec.datatype].json for spec in needed) or not (in_json or _has_json(signature, outputs)):
        return {}
    body: dict[str, Any] = {"schema": _request_schema(signature)}
    example = _example(signature)
    if example is not None:
        if signature.heads and len(in_json) < len(signature.heads):
            example["heads"] = in_json
        body["example"] = example
    request = {"required": True, "content": {"application/json": body}}
    named = f"Inputs: {', '.join(described(spec) for spec in signature.inputs)}, of which this takes one row: nested, "
    named += "flat, or bare if it is one element. Parameters may stand beside the inputs or in `parameters`."
    operations = {}
    if not signature.streams:
        operations["generate"] = {
            "tags": ["inference"],
            "summary": f"Ask {signature.name} about one row",
            "description": f"{signature.description}\n\n{named}",
            "operationId": f"generate_{signature.name}",
            "requestBody": request,
            "responses": {
                "200": {
                    "description": "The outputs: a value if it is one, otherwise a flat list",
                    "content": {"application/json": {"schema": _response_schema(signature)}},
                }
            },
        }
    pieces = "each head's outputs as it finishes" if signature.heads else "each result as it is ready"
    operations["generate_stream"] = {
        "tags": ["inference"],
        "summary": f"Ask {signature.name} about one row, and get {pieces}",
        "description": f"{signature.description}\n\n{named}\n\nThe last event has `final`; an error after the start "
        "is an event with `error` and `status`, before it.",
        "operationId": f"generate_stream_{signature.name}",
        "requestBody": request,
        "responses": {
            "200": {
                "description": "Server-sent events, each a line `data: {...}`",
                "content": {"text/event-stream": {"schema": _event_schema(signature)}},
            }
        },
    }
    return operations


def _has_json(signature: Signature, outputs: Any) -> bool:
    return all(DATATYPES[spec.datatype].json for spec in signature.outputs if spec.name in outputs)


def _example(signature: Signature) -> dict[str, Any] | None:
    """One row; None if it is too large to look at."""
    if signature.example is None and any(math.prod(spec.shape) > LARGEST_EXAMPLE for spec in signature.inputs):
        return None
    row = signature.example_row()
    example = {}
    for spec in signature.inputs:
        if spec.name in row:
            if not DATATYPES[spec.datatype].json:
                return None
            value = row[spec.name]
            while isinstance(value, (list, tuple)) and len(value) == 1:
                value = value[0]
            # Bare only if nothing but one element is left.
            example[spec.name] = row[spec.name] if isinstance(value, (list, tuple)) else value
    return example


def _request_schema(signature: Signature) -> dict[str, Any]:
    parameters = parameter_schemas(signature)
    inputs = {spec.name: _row_schema(spec) for spec in signature.inputs if DATATYPES[spec.datatype].json}
    return {
        "type": "object",
        "required": [spec.name for spec in signature.inputs if not spec.optional],
        "additionalProperties": False,
        "properties": {
            **parameters,
            **inputs,
            "id": ID,
            "parameters": {"type": "object", "additionalProperties": False, "properties": parameters},
        },
    }


def _row_schema(spec: TensorSpec) -> dict[str, Any]:
    element = element_schema(spec.datatype)
    forms: list[dict[str, Any]] = []
    if all(dim in (1, -1) for dim in spec.shape):
        forms.append(element)
    if sum(dim < 0 for dim in spec.shape) <= 1:
        forms.append(_array(element, math.prod(spec.shape) if all(dim >= 0 for dim in spec.shape) else -1))
    if len(spec.shape) > 1:
        nested = element
        for dim in reversed(spec.shape):
            nested = _array(nested, dim)
        forms.append(nested)
    return {"title": spec.name, "description": f"One row of {described(spec)}", "anyOf": forms}


def _array(items: dict[str, Any], length: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": items}
    return schema if length < 0 else {**schema, "minItems": length, "maxItems": length}


def _event_schema(signature: Signature) -> dict[str, Any]:
    """One event; before OpenAPI 3.2 ``schema`` stands for each of a stream's."""
    fields = {
        **_response_schema(signature)["properties"],
        "error": {"type": "string"},
        "status": {"description": "Beside an error that ends the stream: what would have been the answer's status"},
        "final": {"type": "boolean", "description": "In the last event only"},
    }
    if signature.heads:
        statuses = {"type": "string", "enum": ["ok", "timeout", "unavailable", "failed"]}
        fields["head"] = {"type": "string", "enum": [head.name for head in signature.heads]}
        fields["status"] = {
            "anyOf": [{**statuses, "description": "The head's"}, {"type": "integer", **fields["status"]}]
        }
        fields["time_ms"] = {"type": "number", "description": "Since the request came"}
        fields["heads"] = {"type": "object", "additionalProperties": statuses}
    data = {"type": "object", "properties": fields}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"type": "string", "contentMediaType": "application/json", "contentSchema": data}},
    }


def _response_schema(signature: Signature) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for spec in signature.outputs:
        # A number may be written NaN or Infinity, which no schema knows.
        outputs[spec.name] = {"description": described(spec)}
    return {
        "type": "object",
        "required": ["model_name", "model_version", *([] if signature.heads else outputs)],
        "properties": {
            "id": {"type": "string"},
            "model_name": {"type": "string", "enum": [signature.name]},
            "model_version": {"type": "string"},
            **({"parameters": OMISSIONS} if signature.heads else {}),
            **outputs,
        },
    }
