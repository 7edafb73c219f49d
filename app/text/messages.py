"""The messages of a chat request as chat templates take them."""

from __future__ import annotations

from typing import Any, Final

from app.codecs.faults import shown
from app.errors import BadRequest

__all__ = ["plain"]

_BETWEEN_PARTS: Final = "\n"
"""What stands between a message's text parts: OpenAI doesn't say; vLLM and llama.cpp put a line's end."""


def plain(messages: object) -> list[dict[str, Any]]:
    """OpenAI's ``messages``, each content one text: an array of text parts becomes their texts, one a line.

    Args:
        messages: the request's field, as JSON has it.

    Raises:
        BadRequest: a wrong message; the error names the field: ``messages[0].content[1].type``.
    """
    if not isinstance(messages, list):
        raise _bad("messages", "an array of messages", messages)
    if not messages:
        raise BadRequest("messages: expected at least one message, got an empty array", field="messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _bad(path, "an object with 'role' and 'content'", message)
    if not isinstance(message.get("role"), str):
        raise _bad(f"{path}.role", "a string", message.get("role"))
    content = message.get("content")
    if isinstance(content, list):
        parts = [_part(part, f"{path}.content[{n}]") for n, part in enumerate(content)]
        return {**message, "content": _BETWEEN_PARTS.join(parts)}
    if content is not None and not isinstance(content, str):
        raise _bad(f"{path}.content", "a string or an array of text parts", content)
    return dict(message)


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise _bad(path, 'a content part like {"type": "text", "text": "..."}', part)
    if part.get("type") != "text":
        raise _bad(f"{path}.type", "'text', the only kind of content this model takes", part.get("type"))
    text = part.get("text")
    if not isinstance(text, str):
        raise _bad(f"{path}.text", "a string", text)
    return text


def _bad(path: str, expected: str, value: object) -> BadRequest:
    return BadRequest(f"{path}: expected {expected}, got {shown(value)}", field=path)
