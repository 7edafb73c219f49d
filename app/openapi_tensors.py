"""Schemas of what requests and answers are made of: elements, tensors in words, parameters."""

from __future__ import annotations

from typing import Any, Final

from inference.datatypes import DATATYPES
from inference.signature import Signature, TensorSpec

__all__ = ["OMISSIONS", "described", "element_schema", "parameter_schemas"]

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
