"""The OpenAPI schema: FastAPI's schema, with API keys, and with paths for each model with its tensors and an
example."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from headwater_server.gateway.http.replies import ANTHROPIC_PATH, OPENAI_PATHS
from headwater_server.gateway.models import Models, ServedModel
from headwater_server.gateway.openapi.operations import (
    EVENTS,
    JSON,
    STRING,
    error_response,
    object_schema,
    operation,
    response,
)
from headwater_server.gateway.openapi.tensor_operations import tensor_operations
from headwater_server.gateway.openapi.text_operations import body_schemas, mapped_paths, shared_paths, text_operations
from headwater_server.security.keys import OPEN, scopes_for

__all__ = ["openapi_schema"]

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
    "code": {"type": ["string", "null"]},
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of this server"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "API key in a separate header"},
}


def _version_paths(versions: list[ServedModel]) -> dict[str, Any]:
    """The paths that choose a version, each with the tensors of that version."""
    paths: dict[str, Any] = {}
    for model in versions:
        if (signature := model.route.signature) is not None:
            named = msgspec.structs.replace(signature, name=model.name)
            for route, described in tensor_operations(named).items():
                titles = {
                    "operationId": f"{described['operationId']}_version_{model.version}",
                    "summary": f"{described['summary']}, version {model.version}",
                }
                paths[f"/v2/models/{model.name}/versions/{model.version}/{route}"] = {"post": {**described, **titles}}
    return paths


def _paths_by_name() -> dict[str, Any]:
    """The protocol's paths with any model name. Only these paths describe a model that is unknown, or newer than this
    schema.

    A model's specific paths take precedence (OpenAPI, "Paths Object").
    """
    paths: dict[str, Any] = {}
    for route, summary in (
        ("infer", "Infer with a model"),
        ("generate", "Ask a model about one row, or have it continue a text"),
        ("generate_stream", "The same, and get it piece by piece"),
    ):
        answer = {EVENTS: STRING} if route == "generate_stream" else {JSON: {"type": "object"}}
        for names in (("model",), ("model", "version")):
            described = operation(
                "inference",
                "_".join((route, *names[1:])),
                f"{summary}, by the names in the path",
                {"schema": {"type": "object"}},
                response("As the model's own path has it", answer),
                error_response("The request was cancelled by its id"),
            )
            described["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": STRING} for name in names
            ]
            where = "".join(f"/{name}s/{{{name}}}" for name in names)
            paths[f"/v2{where}/{route}"] = {"post": described}
    return paths


def openapi_schema(generated: dict[str, Any], models: Models, *, has_keys: bool) -> dict[str, Any]:
    """A copy of the schema that FastAPI generated, with the models' paths added, and to each path its errors and, with
    ``has_keys``, its API keys."""
    schema = copy.deepcopy(generated)
    schema["info"]["description"] = "PyTorch models over HTTP: the Open Inference Protocol and OpenAI's API."
    paths = schema["paths"]
    paths |= _paths_by_name()
    bodies, components = body_schemas()
    embedders = []
    language_models: list[str] = []
    vllm_models: list[str] = []
    for model in models:
        signature = model.route.signature
        if signature is None:
            continue
        if model.route.gives_embeddings:
            embedders += [signature.name, *model.route.adapters]
        else:
            vllm_models += model.route.adapters
        if model.route.takes_text and model.route.gives_embeddings:
            operations = {}
        elif model.route.takes_text:
            (language_models if signature.vllm is None else vllm_models).append(signature.name)
            operations = text_operations(signature, bodies["GenerateRequest"])
        else:
            operations = tensor_operations(signature)
        for route, described in operations.items():
            paths[f"/v2/models/{signature.name}/{route}"] = {"post": described}
        if model.route.traffic is not None and not model.route.takes_text:
            paths |= _version_paths(models.versions_of(model))
    signatures = [model.route.signature for model in models if model.route.signature is not None]
    rerankers, classifiers, transcribers = (
        [signature.name for signature in signatures if getattr(signature, mapping) is not None]
        for mapping in ("reranking", "classification", "transcription")
    )
    shared = shared_paths(language_models, vllm_models, bodies)
    for path, described in {**shared, **mapped_paths(embedders, rerankers, classifiers, transcribers, bodies)}.items():
        paths[path] = {"post": described}
    for path, by_method in paths.items():
        kind = "OpenAIError" if path.startswith(OPENAI_PATHS) else "Error"
        kind = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else kind
        for method, described in by_method.items():
            responses = described["responses"]
            responses.pop("422", None)
            for status, description in _ERRORS.items():
                responses[str(status)] = {**error_response(description, kind), **responses.get(str(status), {})}
            if has_keys:
                scopes = scopes_for(method.upper(), path)
                described["security"] = [] if scopes == OPEN else [{"bearer": []}, {"header": []}]
                if scopes != OPEN:
                    responses["401"] = {"description": "No API key, or an invalid key"}
                    responses.setdefault("403", {"description": f"The API key has no scope of {', '.join(scopes)}"})
    schema["components"] = {
        "schemas": {
            **components,
            "Error": object_schema({"error": STRING}),
            "AnthropicError": object_schema(
                {"type": STRING, "error": object_schema({"type": STRING, "message": STRING}), "request_id": STRING}
            ),
            "OpenAIError": object_schema({"error": object_schema(_OPENAI_ERROR, "param", "code")}),
        },
        **({"securitySchemes": _SCHEMES} if has_keys else {}),
    }
    return schema
