"""What ``/v1/chat/completions`` says, checked against the schema of OpenAI's client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from tests.app.lm.response_events import check_fields

__all__ = ["checked_chunk", "checked_completion", "completion_of"]

_EXTRA = {
    (name, field) for name in ("ChatCompletionMessage", "ChoiceDelta") for field in ("reasoning", "reasoning_content")
}
"""Fields that other servers have, too, but not the client's classes."""


def checked_completion(text: str) -> dict[str, Any]:
    """A whole answer, which is exactly an answer of the client's schema."""
    return _checked(ChatCompletion, text)


def checked_chunk(text: str) -> dict[str, Any]:
    """An event of a stream, which is exactly an event of the client's schema."""
    return _checked(ChatCompletionChunk, text)


def completion_of(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer of a complete stream of one choice with usage, as it would be whole."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    *steps, last = chunks
    for step in steps:
        (choice,) = step["choices"]
        delta = choice["delta"]
        for field in ("content", "reasoning_content"):
            message[field] += delta.get(field) or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call["id"], "function": {**call["function"]}})
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    assert last["choices"] == []
    finish = steps[-1]["choices"][0]["finish_reason"]
    return {"choices": [{"message": message, "finish_reason": finish}], "usage": last["usage"]}


def _checked(kind: type[BaseModel], text: str) -> dict[str, Any]:
    found = kind.model_validate_json(text, strict=True)
    check_fields(found, _EXTRA)
    return found.model_dump(exclude_unset=True)
