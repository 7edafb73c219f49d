"""The OpenAPI operations of language models: OpenAI's two text APIs, the generate extension, and cancelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from app.gateway.openapi.bodies import of_models
from inference.signature import Signature

__all__ = ["cancel_operation", "completion_operations", "text_operations"]

_MESSAGES: Final = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
_PROMPT: Final = "def add(a, b):\n    "
_USAGE: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": {"type": "integer", "description": "Each prompt once, however many choices it has"},
        "completion_tokens": {"type": "integer", "description": "The token that stopped a text included"},
        "total_tokens": {"type": "integer"},
    },
}
_FINISH: Final[dict[str, Any]] = {"type": "string", "enum": ["stop", "length"]}


def completion_operations(models: list[str], schemas: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """OpenAI's operations, by path.

    Args:
        models: names of the language models; at least one.
        schemas: of the bodies, by the structs' names.
    """
    answer_message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    }
    return {
        "/v1/chat/completions": _openai_operation(
            "chat_completions",
            "Chat, as OpenAI's API has it",
            of_models(schemas["ChatRequest"], models),
            {"model": models[0], "messages": _MESSAGES, "max_completion_tokens": 64},
            {"message": answer_message},
        ),
        "/v1/completions": _openai_operation(
            "completions",
            "Continue texts, as OpenAI's API does",
            of_models(schemas["CompletionRequest"], models),
            {"model": models[0], "prompt": _PROMPT, "max_tokens": 64},
            {"text": {"type": "string"}},
        ),
    }


def text_operations(signature: Signature, schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The operations of the generate extension for one language model, by route.

    Args:
        signature: of the model.
        schema: of the body.
    """
    body = {"schema": schema, "example": {"text_input": _PROMPT, "parameters": {"max_tokens": 64}}}
    names = {
        "model_name": {"type": "string", "enum": [signature.name]},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "text_output": {"type": "string"},
    }
    facts = {
        "finish_reason": _FINISH,
        "prompt_tokens": {"type": "integer"},
        "completion_tokens": {"type": "integer"},
    }
    whole = {
        "type": "object",
        "required": ["model_name", "model_version", "text_output", "parameters"],
        "properties": {**names, "parameters": {"type": "object", "required": [*facts], "properties": facts}},
    }
    event = {
        "type": "object",
        "properties": {
            **names,
            **facts,
            "finish_reason": {"type": "string", "enum": ["stop", "length", "error"]},
            "final": {"type": "boolean"},
            "error": {"type": "string"},
            "status": {"type": "integer"},
        },
    }
    said = "The text is taken as it is: no chat template is applied. Parameters may stand beside it, too."
    shared = {
        "tags": ["inference"],
        "requestBody": {"required": True, "content": {"application/json": body}},
    }
    return {
        "generate": {
            **shared,
            "summary": f"Have {signature.name} continue a text",
            "description": f"{signature.description}\n\n{said}",
            "operationId": f"generate_{signature.name}",
            "responses": {
                "200": {"description": "The text", "content": {"application/json": {"schema": whole}}},
                "409": _cancelled("Error"),
            },
        },
        "generate_stream": {
            **shared,
            "summary": f"Have {signature.name} continue a text, and get it piece by piece",
            "description": f"{signature.description}\n\n{said}\n\nThe last event has `final`; an error after the start "
            "is an event with `error` and `status`, before it.",
            "operationId": f"generate_stream_{signature.name}",
            "responses": {
                "200": {
                    "description": "Server-sent events, each a line `data: {...}`",
                    "content": {"text/event-stream": {"schema": event}},
                },
                "409": _cancelled("Error"),
            },
        },
    }


def cancel_operation() -> dict[str, Any]:
    """``/v2/requests/{request_id}/cancel``."""
    return {
        "tags": ["inference"],
        "summary": "Cancel a stream, or a request to a language model",
        "description": "Whoever knows a request's id, its `X-Request-Id`, can end it; it is answered with status 409.",
        "operationId": "cancel_request",
        "parameters": [{"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}],
        "responses": {
            "200": {
                "description": "How many sequences and streams were cancelled",
                "content": {
                    "application/json": {
                        "schema": {
                            "type": "object",
                            "required": ["request_id", "cancelled"],
                            "properties": {
                                "request_id": {"type": "string"},
                                "cancelled": {"type": "integer", "minimum": 1},
                            },
                        }
                    }
                },
            }
        },
    }


def _openai_operation(
    name: str, summary: str, request: dict[str, Any], example: dict[str, Any], choice: dict[str, Any]
) -> dict[str, Any]:
    choices = {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["index", *choice, "finish_reason"],
            "properties": {
                "index": {"type": "integer"},
                **choice,
                "logprobs": {"type": ["object", "null"]},
                "finish_reason": _FINISH,
            },
        },
    }
    answer = {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string"},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": choices,
            "usage": _USAGE,
        },
    }
    return {
        "tags": ["openai"],
        "summary": summary,
        "description": "Null is as if a field weren't there. What the model can't do is refused by the field's name.",
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request, "example": example}}},
        "responses": {
            "200": {
                "description": "The answer; with `stream`, server-sent events, of which the last is `[DONE]`",
                "content": {
                    "application/json": {"schema": answer},
                    "text/event-stream": {"schema": {"type": "string"}},
                },
            },
            "409": _cancelled("OpenAIError"),
        },
    }


def _cancelled(kind: str) -> dict[str, Any]:
    return {
        "description": "The request was cancelled by its id",
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}},
    }
