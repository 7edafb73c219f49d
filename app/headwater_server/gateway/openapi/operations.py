"""The parts of OpenAPI operations: request bodies, responses and the schemas of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["EVENTS", "INTEGER", "JSON", "STRING", "error_response", "object_schema", "operation", "response"]

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
STRING: Final[dict[str, Any]] = {"type": "string"}
INTEGER: Final[dict[str, Any]] = {"type": "integer"}


def object_schema(properties: Mapping[str, Any], *optional: str, closed: bool = False) -> dict[str, Any]:
    """The schema of an object.

    Args:
        properties: schemas by name; all are required except the names in ``optional``.
        optional: names of optional properties.
        closed: whether other properties are refused.
    """
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [name for name in properties if name not in optional]:
        schema["required"] = required
    return {**schema, "additionalProperties": False} if closed else schema


def response(description: str, schemas: Mapping[str, Any]) -> dict[str, Any]:
    """A response, with its schemas by media type."""
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in schemas.items()}}


def error_response(description: str, kind: str = "Error") -> dict[str, Any]:
    """The response to a request that fails; ``kind`` names its schema among the components."""
    return response(description, {JSON: {"$ref": f"#/components/schemas/{kind}"}})


def operation(
    tag: str, name: str, summary: str, body: dict[str, Any], *responses: dict[str, Any], description: str = ""
) -> dict[str, Any]:
    """An operation with a JSON body.

    Args:
        tag: the group under which it is listed.
        name: the operation's id.
        summary: a single line.
        body: the media type object: ``schema`` and ``example``.
        responses: the response of status 200, and the response of status 409 if a request can be cancelled.
        description: a longer text; empty: no description.
    """
    return {
        "tags": [tag],
        "summary": summary,
        **({"description": description} if description else {}),
        "operationId": name,
        "requestBody": {"required": True, "content": {JSON: body}},
        "responses": dict(zip(("200", "409"), responses, strict=False)),
    }
