"""The OpenAPI schema: FastAPI's own, with API keys, and for each model paths with its tensors and an example."""

from __future__ import annotations

import copy
from typing import Any

from app.gateway.models import Models
from app.gateway.openapi.operations import STRING, error_response, object_schema
from app.gateway.openapi.tensors import tensor_operations
from app.gateway.openapi.texts import (
    body_schemas,
    cancel_operation,
    completion_operations,
    embeddings_operation,
    text_operations,
)
from app.security.keys import OPEN, scopes_for

__all__ = ["openapi_schema", "with_keys"]

_ERRORS = {
    400: "The request's content is wrong; the message names the field",
    404: "Unknown model or route",
    405: "Method not allowed",
    408: "The body did not arrive in time",
    413: "The body is over the limit",
    415: "Content type or encoding not supported",
    422: "The same request took two of the model's replicas down",
    429: "The model's queue is full",
    431: "The headers are over the limit",
    500: "The model's callable failed",
    503: "The model is loading, draining or crashed",
    504: "The request's deadline passed",
}
_OPENAI_ERROR = {
    "message": STRING,
    "type": STRING,
    "param": {"type": ["string", "null"]},
    "code": {"type": ["integer", "null"]},
}


def openapi_schema(generated: dict[str, Any], models: Models) -> dict[str, Any]:
    """Add the models' paths, and the documented errors of every path, to what FastAPI generated."""
    schema = copy.deepcopy(generated)
    schema["info"]["description"] = "PyTorch models over HTTP: the Open Inference Protocol and OpenAI's API."
    paths = schema["paths"]
    bodies, components = body_schemas()
    embedders = []
    language_models = []
    for model in models:
        signature = model.route.signature
        if signature is None:
            continue
        if signature.embedding is not None:
            embedders.append(signature.name)
        if signature.language_model is not None:
            language_models.append(signature.name)
            operations = text_operations(signature, bodies["GenerateRequest"])
        else:
            operations = tensor_operations(signature)
        for route, operation in operations.items():
            paths[f"/v2/models/{signature.name}/{route}"] = {"post": operation}
    if embedders:
        paths["/v1/embeddings"] = {"post": embeddings_operation(embedders, bodies["EmbeddingsRequest"])}
    if language_models:
        for path, operation in completion_operations(language_models, bodies).items():
            paths[path] = {"post": operation}
        paths["/v2/requests/{request_id}/cancel"] = {"post": cancel_operation()}
    for path, by_method in paths.items():
        kind = "OpenAIError" if path.startswith("/v1/") else "Error"
        for operation in by_method.values():
            operation["responses"].pop("422", None)
            for status, description in _ERRORS.items():
                operation["responses"].setdefault(str(status), error_response(description, kind))
    schema.setdefault("components", {})["schemas"] = {
        **components,
        "Error": object_schema({"error": STRING}),
        "OpenAIError": object_schema({"error": object_schema(_OPENAI_ERROR, "param", "code")}),
    }
    return schema


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
                responses = operation.setdefault("responses", {})
                responses.setdefault("401", {"description": "No API key, or none that is good here"})
                responses.setdefault("403", {"description": f"The API key has no scope of {', '.join(scopes)}"})
    return schema
