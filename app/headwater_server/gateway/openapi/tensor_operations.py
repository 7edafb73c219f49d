"""The OpenAPI operations of a model with tensors: inference, and the generate extension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.infer_request import SEQUENCE_EXAMPLE, example_body, json_example
from headwater_server.codecs.parameters import MAX_SEQUENCE_ID, RequestId
from headwater_server.gateway.openapi.operations import (
    EVENTS,
    INTEGER,
    JSON,
    STRING,
    object_schema,
    operation,
    response,
)

__all__ = ["tensor_operations"]

_ID: Final = msgspec.json.schema(RequestId)
_BOOLEAN: Final = {"type": "boolean"}
_OMISSIONS: Final = {
    "type": "object",
    "description": "Only if heads were left out: `omitted_heads`, their names with commas between them, and of each "
    "`head.NAME.status` and `head.NAME.reason`",
    "properties": {"omitted_heads": STRING},
    "additionalProperties": STRING,
}
"""Schema of an answer's ``parameters``."""
_SEQUENCE_SCHEMAS: Final = {
    "sequence_id": {
        "description": "The sequence that the request belongs to; required",
        "anyOf": [
            {"type": "integer", "minimum": 1},
            {"type": "string", "minLength": 1, "maxLength": MAX_SEQUENCE_ID},
        ],
    },
    "sequence_start": {**_BOOLEAN, "description": "Whether the sequence begins, with the initial states"},
    "sequence_end": {**_BOOLEAN, "description": "Whether the sequence ends with this request"},
}
"""The parameters of requests to a model with states."""
_LARGEST_EXAMPLE: Final = 100
"""If an input has more elements, ``generate`` gets no generated example."""


def tensor_operations(signature: Signature) -> dict[str, dict[str, Any]]:
    """The operations that the model has, by route: ``infer``, ``generate`` and ``generate_stream``."""
    signature = signature.public
    infer = {} if signature.streams else {"infer": _infer_operation(signature)}
    return infer | _generate_operations(signature)


def _infer_operation(signature: Signature) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": _infer_schema(signature)}
    if (example := example_body(signature)) is not None:
        body["example"] = example
    outputs = {
        "name": _one_of(spec.name for spec in signature.outputs),
        "datatype": STRING,
        "shape": _array(INTEGER),
        "data": _array({}),
        "parameters": {"type": "object"},
    }
    answer = _answer_schema(signature, {"outputs": _array(object_schema(outputs, "data", "parameters"))}, "id")
    return operation(
        "inference",
        f"infer_{signature.name}",
        f"Infer with {signature.name}",
        body,
        response("The outputs", {JSON: answer, "application/octet-stream": {"type": "string", "format": "binary"}}),
        description=f"{signature.description}\n\nInputs: {_described(signature.inputs)}. "
        f"Outputs: {_described(signature.outputs)}. Up to {signature.max_batch_size} rows share a call of the model.",
    )


def _infer_schema(signature: Signature) -> dict[str, Any]:
    inputs = [_input_schema(spec) for spec in signature.inputs]
    needed = sum(not spec.optional for spec in signature.inputs)
    binary = object_schema({"binary_data": _BOOLEAN}, "binary_data", closed=True)
    output = {"name": _one_of(spec.name for spec in signature.outputs), "parameters": binary}
    parameters = {"binary_data_output": _BOOLEAN, **_parameter_schemas(signature)}
    fields = {
        "id": _ID,
        "model_name": _one_of([signature.name]),
        "inputs": {
            **_array(inputs[0] if len(inputs) == 1 else {"oneOf": inputs}),
            "minItems": needed,
            "maxItems": len(inputs),
        },
        "outputs": {**_array(object_schema(output, "parameters", closed=True)), "maxItems": len(signature.outputs)},
        "parameters": object_schema(parameters, *parameters, closed=not signature.takes_any_parameter),
    }
    return object_schema(fields, "id", "model_name", "outputs", "parameters", closed=True)


def _input_schema(spec: TensorSpec) -> dict[str, Any]:
    shape = _array({"type": "integer", "minimum": 0}, len(spec.shape) + 1)
    data = _array(_element_schema(spec.datatype))
    fields = {
        "name": _one_of([spec.name]),
        "datatype": _one_of([spec.datatype]),
        "shape": {**shape, "description": f"{_described([spec])}, batch axis first"},
        "data": {**data, "description": "Elements in C order; lists nested by the shape are taken too"},
    }
    return {"title": spec.name, **object_schema(fields, closed=True)}


def _generate_operations(signature: Signature) -> dict[str, dict[str, Any]]:
    """The operations by route. {} if a required input has no JSON form, or if an output of each head, or of a model
    without heads, has none."""
    in_json = [head.name for head in signature.heads if _has_json(signature, head.outputs)]
    has_json = bool(in_json) or _has_json(signature, [spec.name for spec in signature.outputs])
    if not has_json or not all(spec.optional or DATATYPES[spec.datatype].json for spec in signature.inputs):
        return {}
    body: dict[str, Any] = {"schema": _generate_schema(signature)}
    if (row := json_example(signature, _LARGEST_EXAMPLE)) is not None:
        body["example"] = {name: _bare(value) for name, value in row.items()}
        if len(in_json) < len(signature.heads):
            body["example"]["heads"] = in_json
        if signature.states:
            body["example"] |= SEQUENCE_EXAMPLE
    name = signature.name
    summary = f"Ask {name} about one row"
    description = f"{signature.description}\n\nInputs: {_described(signature.inputs)}, of which this takes one row: "
    description += "nested, flat, or bare if it is one element. Parameters may stand beside the inputs or in "
    description += "`parameters`."
    # Without a type: a number may be written NaN or Infinity, for which JSON schema has no type.
    outputs = {spec.name: {"description": _described([spec])} for spec in signature.outputs}
    optional = ("id", *(outputs if signature.heads else ()))
    answer = _answer_schema(signature, outputs, *optional)
    operations = {}
    if not signature.streams:
        operations["generate"] = operation(
            "inference",
            f"generate_{name}",
            summary,
            body,
            response("The outputs: a value if it is one, otherwise a flat list", {JSON: answer}),
            description=description,
        )
    pieces = "each head's outputs as it finishes" if signature.heads else "each result as it is ready"
    operations["generate_stream"] = operation(
        "inference",
        f"generate_stream_{name}",
        f"{summary}, and get {pieces}",
        body,
        response(
            "Server-sent events, each a line `data: {...}`", {EVENTS: _event_schema(signature, answer["properties"])}
        ),
        description=f"{description}\n\nThe last event has `final`; an error after the start is an event with `error` "
        "and `status`, before it.",
    )
    return operations


def _has_json(signature: Signature, outputs: Sequence[str]) -> bool:
    return all(DATATYPES[spec.datatype].json for spec in signature.outputs if spec.name in outputs)


def _bare(row: Any) -> Any:
    """The row's element, if it has a single element; else the row."""
    value = row
    while isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    return row if isinstance(value, (list, tuple)) else value


def _generate_schema(signature: Signature) -> dict[str, Any]:
    parameters = _parameter_schemas(signature)
    inputs = {spec.name: _row_schema(spec) for spec in signature.inputs if DATATYPES[spec.datatype].json}
    is_closed = not signature.takes_any_parameter
    within = object_schema(parameters, *parameters, closed=is_closed)
    optional = [spec.name for spec in signature.inputs if spec.optional]
    fields = {**parameters, **inputs, "id": _ID, "parameters": within}
    return object_schema(fields, *parameters, *optional, "id", "parameters", closed=is_closed)


def _row_schema(spec: TensorSpec) -> dict[str, Any]:
    element = _element_schema(spec.datatype)
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
    return {"title": spec.name, "description": f"One row of {_described([spec])}", "anyOf": forms}


def _event_schema(signature: Signature, answer: dict[str, Any]) -> dict[str, Any]:
    """The schema of an event of a stream: before OpenAPI 3.2 a schema describes each event, not the stream."""
    fields = {
        **answer,
        "error": STRING,
        "status": {"description": "With an error that ends the stream: the HTTP status that the answer would have had"},
        "final": {**_BOOLEAN, "description": "In the last event only"},
    }
    if signature.heads:
        statuses = _one_of(["ok", "timeout", "unavailable", "failed"])
        fields["head"] = _one_of(head.name for head in signature.heads)
        fields["status"] = {"anyOf": [{**statuses, "description": "The head's"}, {**INTEGER, **fields["status"]}]}
        fields["time_ms"] = {"type": "number", "description": "Since the request came"}
        fields["heads"] = {"type": "object", "additionalProperties": statuses}
    data = {"type": "object", "properties": fields}
    return object_schema({"data": {**STRING, "contentMediaType": JSON, "contentSchema": data}})


def _answer_schema(signature: Signature, outputs: dict[str, Any], *optional: str) -> dict[str, Any]:
    about = {"id": STRING, "model_name": _one_of([signature.name]), "model_version": STRING}
    omissions = {"parameters": _OMISSIONS} if signature.heads else {}
    return object_schema({**about, **omissions, **outputs}, "parameters", *optional)


def _parameter_schemas(signature: Signature) -> dict[str, Any]:
    """The request parameters that every route of the model takes, by name."""
    schemas: dict[str, Any] = {
        "priority": {"type": "integer", "minimum": 0, "description": "1 is the most urgent; 0 is the default"},
        "timeout": {"type": "integer", "minimum": 0, "description": "Deadline of this request in microseconds"},
    }
    if signature.states:
        schemas |= _SEQUENCE_SCHEMAS
    if signature.heads:
        names = [head.name for head in signature.heads]
        schemas["heads"] = {
            "description": f"The wanted heads, of {', '.join(names)}: a list, or names with commas between them; "
            "all by default",
            "anyOf": [
                {**_array(_one_of(names)), "minItems": 1, "uniqueItems": True},
                {"type": "string", "minLength": 1},
            ],
            "example": names[:1],
        }
    for spec in signature.own_parameters:
        kind = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}[spec.type]
        bounds = {"minimum": spec.minimum, "maximum": spec.maximum, "enum": spec.choices}
        limits = {name: bound for name, bound in bounds.items() if bound is not None}
        schemas[spec.name] = {"type": kind, "default": spec.default, "description": spec.description, **limits}
    return schemas


def _element_schema(datatype: str) -> dict[str, Any]:
    dtype = DATATYPES[datatype].numpy
    if datatype != "BF16" and dtype.kind in "iu":
        info = np.iinfo(dtype)
        return {"type": "integer", "minimum": int(info.min), "maximum": int(info.max)}
    return {"type": {"BOOL": "boolean", "BYTES": "string"}.get(datatype, "number")}


def _described(specs: Sequence[TensorSpec]) -> str:
    """Tensors in words: name, datatype and shape."""
    words = []
    for spec in specs:
        dims = ", ".join(["rows", *("any" if dim < 0 else str(dim) for dim in spec.shape)])
        words.append(f"`{spec.name}` {spec.datatype} [{dims}]{' (optional)' if spec.optional else ''}")
    return ", ".join(words)


def _one_of(names: Iterable[str]) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


def _array(items: dict[str, Any], length: int = -1) -> dict[str, Any]:
    """An array's schema; a negative length means any length."""
    schema: dict[str, Any] = {"type": "array", "items": items}
    return schema if length < 0 else {**schema, "minItems": length, "maxItems": length}
