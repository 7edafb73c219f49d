"""The OpenAPI operations of language models: OpenAI's two text APIs, the generate extension, and cancelling."""

from __future__ import annotations

from typing import Any, Final

from app.lm.chat import MAX_CHOICES
from app.lm.completion import DEFAULT_TOKENS, MAX_PROMPTS
from app.lm.sampling_fields import MAX_LOGPROBS
from app.lm.text.stop_strings import MAX_STOP_CHARACTERS, MAX_STOPS
from inference.signature import Signature

__all__ = ["cancel_operation", "completion_operations", "text_operations"]

_MESSAGES: Final = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
_PROMPT: Final = "def add(a, b):\n    "
_STOP_STRING: Final[dict[str, Any]] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_SAMPLING: Final[dict[str, Any]] = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2, "default": 1, "description": "0: the likeliest"},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 1},
    "top_k": {"type": "integer", "minimum": 0, "default": 0, "description": "0: all tokens"},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2, "default": 0},
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 100, "default": 1},
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "description": "By token id",
    },
    "seed": {"type": "integer", "description": "The same seed gives the same answer; choice i has the seed plus i"},
    "stop": {
        "oneOf": [_STOP_STRING, {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOPS}],
        "description": "Strings that end the text, which ends before them",
    },
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "ignore_eos": {"type": "boolean", "default": False},
    "include_stop_str_in_output": {"type": "boolean", "default": False},
    "skip_special_tokens": {"type": "boolean", "default": True},
}
_OPENAI: Final[dict[str, Any]] = {
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_CHOICES, "default": 1},
    "stream": {"type": "boolean", "default": False},
    "stream_options": {
        "type": "object",
        "additionalProperties": False,
        "properties": {"include_usage": {"type": "boolean", "default": False}},
    },
    "user": {"type": "string", "description": "A label, without effect"},
    "timeout_s": {"type": "number", "exclusiveMinimum": 0, "description": "How long the request may take in all"},
}
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


def completion_operations(models: list[str]) -> dict[str, dict[str, Any]]:
    """OpenAI's operations, by path.

    Args:
        models: names of the language models; at least one.
    """
    model = {"type": "string", "enum": models}
    message = {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {
                "oneOf": [
                    {"type": "string"},
                    {"type": "null"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
                        },
                    },
                ]
            },
        },
    }
    chat = {
        "model": model,
        "messages": {"type": "array", "minItems": 1, "items": message},
        "max_completion_tokens": {"type": "integer", "minimum": 1, "description": "Default: what there is room for"},
        "max_tokens": {"type": "integer", "minimum": 1, "deprecated": True},
        **_SAMPLING,
        **_OPENAI,
        "logprobs": {"type": "boolean", "default": False},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
        "response_format": {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"type": "string", "enum": ["text"]}},
        },
        "chat_template_kwargs": {"type": "object", "description": "What the model's chat template takes besides"},
    }
    text = {"type": "string"}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    completion = {
        "model": model,
        "prompt": {
            "anyOf": [
                text,
                ids,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": text},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": ids},
            ]
        },
        "max_tokens": {"type": "integer", "minimum": 0, "default": DEFAULT_TOKENS},
        **_SAMPLING,
        **_OPENAI,
        "logprobs": {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS},
        "echo": {"type": "boolean", "default": False},
    }
    answer_message = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"type": "string"}, "content": {"type": "string"}},
    }
    return {
        "/v1/chat/completions": _openai_operation(
            "chat_completions",
            "Chat, as OpenAI's API has it",
            _object(chat, ["model", "messages"]),
            {"model": models[0], "messages": _MESSAGES, "max_completion_tokens": 64},
            {"message": answer_message},
        ),
        "/v1/completions": _openai_operation(
            "completions",
            "Continue texts, as OpenAI's API does",
            _object(completion, ["model", "prompt"]),
            {"model": models[0], "prompt": _PROMPT, "max_tokens": 64},
            {"text": {"type": "string"}},
        ),
    }


def text_operations(signature: Signature) -> dict[str, dict[str, Any]]:
    """The operations of the generate extension for one language model, by route."""
    parameters = {
        "max_tokens": {"type": "integer", "minimum": 0, "default": DEFAULT_TOKENS},
        **_SAMPLING,
        "timeout": {"type": "integer", "minimum": 0, "description": "The request's own deadline in microseconds"},
    }
    request = _object(
        {
            "text_input": {"type": "string"},
            "id": {"type": "string", "maxLength": 1000},
            "parameters": _object(parameters, []),
            **parameters,
        },
        ["text_input"],
    )
    body = {"schema": request, "example": {"text_input": _PROMPT, "parameters": {"max_tokens": 64}}}
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


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return {**schema, "required": required} if required else schema
