"""Checks OpenAI's ``messages`` before they reach a chat template."""

from __future__ import annotations

from typing import Any, Final

from app.codecs.faults import at, shown
from app.errors import BadRequest

__all__ = ["ROLES", "checked_messages"]

ROLES: Final = ("developer", "system", "user", "assistant", "tool", "function")
"""OpenAI's."""
_BETWEEN_PARTS: Final = "\n"
"""Joins a message's text parts: OpenAI doesn't say how; vLLM and llama.cpp put a newline."""


def checked_messages(messages: object, context_length: int) -> list[dict[str, Any]]:
    """The messages, each content one text: an array of text parts becomes their texts, one a line.

    Args:
        messages: the request's field, as JSON has it.
        context_length: the model's, in tokens; a message takes at least one.

    Raises:
        BadRequest: a message is wrong, or has a field that no model supports; the error names the field, such as
            ``messages[0].content[1].type``.
    """
    if not isinstance(messages, list):
        raise _wrong("messages", "an array of messages", messages)
    if not messages:
        raise at("messages", None, "expected at least one message, got an empty array")
    if len(messages) > context_length:
        what = f"this model's maximum context length is {context_length} tokens"
        raise at("messages", None, f"{what}; expected at most as many messages, got {len(messages)}")
    return [_checked(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _checked(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(path, "an object with 'role' and 'content'", message)
    for field in ("tool_calls", "function_call", "tool_call_id"):
        if message.get(field) is not None:
            raise at(f"{path}.{field}", None, "this model does not support it; leave it out")
    if message.get("role") not in ROLES:
        raise _wrong(f"{path}.role", f"one of {', '.join(ROLES)}", message.get("role"))
    content = message.get("content")
    if isinstance(content, list):
        content = _BETWEEN_PARTS.join([_text(part, f"{path}.content[{n}]") for n, part in enumerate(content)])
    elif not isinstance(content, str):
        raise _wrong(f"{path}.content", "a string or an array of text parts", content)
    return {**message, "content": content}


def _text(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(path, 'a content part like {"type": "text", "text": "..."}', part)
    if part.get("type") != "text":
        raise _wrong(f"{path}.type", "'text', the only kind of content this model takes", part.get("type"))
    if not isinstance(text := part.get("text"), str):
        raise _wrong(f"{path}.text", "a string", text)
    return text


def _wrong(path: str, expected: str, value: object) -> BadRequest:
    return at(path, None, f"expected {expected}, got {shown(value)}")
