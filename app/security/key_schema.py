"""What the API's schema says of keys."""

from __future__ import annotations

from typing import Any

from app.security.keys import OPEN, scopes_for

__all__ = ["with_keys"]

_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of this server"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same in a header of its own"},
}


def with_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Say of each operation which keys it takes; changes the schema, and returns it."""
    schema.setdefault("components", {})["securitySchemes"] = _SCHEMES
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            if not isinstance(operation, dict):
                continue
            scopes = scopes_for(method.upper(), path)
            operation["security"] = [] if scopes == OPEN else [{"bearer": []}, {"header": []}]
            if scopes != OPEN:
                operation.setdefault("responses", {}).setdefault(
                    "401", {"description": "No API key, or none that is good here"}
                )
                operation["responses"].setdefault(
                    "403", {"description": f"The API key has no scope of {', '.join(scopes)}"}
                )
    return schema
