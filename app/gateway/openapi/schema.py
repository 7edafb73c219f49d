"""The OpenAPI schema: FastAPI's own, with API keys, and for each model paths with its tensors and an example."""

from __future__ import annotations

import copy
from typing import Any

from app.codecs.infer_request import example_body
from app.gateway.models import Models
from app.gateway.openapi.bodies import body_schemas, of_models
from app.gateway.openapi.tensors import ID, OMISSIONS, described, element_schema, generate_operations, parameter_schemas
from app.gateway.openapi.texts import cancel_operation, completion_operations, text_operations
from app.security.keys import OPEN, scopes_for
from inference.signature import Signature, TensorSpec

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
            for route, operation in text_operations(signature, bodies["GenerateRequest"]).items():
                paths[f"/v2/models/{signature.name}/{route}"] = {"post": operation}
            continue
        if not signature.streams:
            paths[f"/v2/models/{signature.name}/infer"] = {"post": _infer_operation(signature)}
        for route, operation in generate_operations(signature).items():
            paths[f"/v2/models/{signature.name}/{route}"] = {"post": operation}
    if embedders:
        paths["/v1/embeddings"] = {"post": _embeddings_operation(embedders, bodies["EmbeddingsRequest"])}
    if language_models:
        for path, operation in completion_operations(language_models, bodies).items():
            paths[path] = {"post": operation}
        paths["/v2/requests/{request_id}/cancel"] = {"post": cancel_operation()}
    for path, operations in paths.items():
        for operation in operations.values():
            _document_errors(path, operation)
    schema.setdefault("components", {})["schemas"] = components | _error_schemas()
    return schema


def _infer_operation(signature: Signature) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": _request_schema(signature)}
    example = example_body(signature)
    if example is not None:
        body["example"] = example
    tensors = ", ".join(described(spec) for spec in signature.inputs)
    outputs = ", ".join(described(spec) for spec in signature.outputs)
    return {
        "tags": ["inference"],
        "summary": f"Infer with {signature.name}",
        "description": f"{signature.description}\n\nInputs: {tensors}. Outputs: {outputs}. "
        f"Up to {signature.max_batch_size} rows share a call of the model.",
        "operationId": f"infer_{signature.name}",
        "requestBody": {"required": True, "content": {"application/json": body}},
        "responses": {
            "200": {
                "description": "The outputs",
                "content": {
                    "application/json": {"schema": _response_schema(signature)},
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                },
            }
        },
    }


def _request_schema(signature: Signature) -> dict[str, Any]:
    inputs = [_input_schema(spec) for spec in signature.inputs]
    needed = sum(not spec.optional for spec in signature.inputs)
    parameters = {"binary_data_output": {"type": "boolean"}, **parameter_schemas(signature)}
    return {
        "type": "object",
        "required": ["inputs"],
        "additionalProperties": False,
        "properties": {
            "id": ID,
            "inputs": {
                "type": "array",
                "minItems": needed,
                "maxItems": len(inputs),
                "items": inputs[0] if len(inputs) == 1 else {"oneOf": inputs},
            },
            "outputs": {
                "type": "array",
                "maxItems": len(signature.outputs),
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "additionalProperties": False,
                    "properties": {
                        "name": {"type": "string", "enum": [spec.name for spec in signature.outputs]},
                        "parameters": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"binary_data": {"type": "boolean"}},
                        },
                    },
                },
            },
            "parameters": {"type": "object", "additionalProperties": False, "properties": parameters},
        },
    }


def _input_schema(spec: TensorSpec) -> dict[str, Any]:
    rank = len(spec.shape) + 1
    return {
        "type": "object",
        "title": spec.name,
        "required": ["name", "datatype", "shape", "data"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "enum": [spec.name]},
            "datatype": {"type": "string", "enum": [spec.datatype]},
            "shape": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0},
                "minItems": rank,
                "maxItems": rank,
                "description": f"{described(spec)}, batch axis first",
            },
            "data": {
                "type": "array",
                "items": element_schema(spec.datatype),
                "description": "Elements in C order; lists nested by the shape are taken too",
            },
        },
    }


def _response_schema(signature: Signature) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "id": {"type": "string"},
            "model_name": {"type": "string", "enum": [signature.name]},
            "model_version": {"type": "string"},
            **({"parameters": OMISSIONS} if signature.heads else {}),
            "outputs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["name", "datatype", "shape"],
                    "properties": {
                        "name": {"type": "string", "enum": [spec.name for spec in signature.outputs]},
                        "datatype": {"type": "string"},
                        "shape": {"type": "array", "items": {"type": "integer"}},
                        "data": {"type": "array", "items": {}},
                        "parameters": {"type": "object"},
                    },
                },
            },
        },
    }


def _embeddings_operation(models: list[str], schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "tags": ["openai"],
        "summary": "Embeddings, as OpenAI's API has them",
        "operationId": "embeddings",
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": of_models(schema, models),
                    "example": {"model": models[0], "input": ["The harbour lay still.", "Boats slept in the port."]},
                }
            },
        },
        "responses": {
            "200": {
                "description": "One embedding a text, in order",
                "content": {"application/json": {"schema": {"type": "object"}}},
            }
        },
    }


def _document_errors(path: str, operation: dict[str, Any]) -> None:
    kind = "OpenAIError" if path.startswith("/v1/") else "Error"
    operation["responses"].pop("422", None)
    for status, description in _ERRORS.items():
        operation["responses"].setdefault(
            str(status),
            {
                "description": description,
                "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}},
            },
        )


def _error_schemas() -> dict[str, Any]:
    return {
        "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
        "OpenAIError": {
            "type": "object",
            "required": ["error"],
            "properties": {
                "error": {
                    "type": "object",
                    "required": ["message", "type"],
                    "properties": {
                        "message": {"type": "string"},
                        "type": {"type": "string"},
                        "param": {"type": ["string", "null"]},
                        "code": {"type": ["integer", "null"]},
                    },
                }
            },
        },
    }


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
