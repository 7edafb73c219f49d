"""Checks OpenAI's ``messages`` before they reach a chat template."""

from __future__ import annotations

from typing import Any, Final

from headwater_server.codecs.faults import MAX_CONTAINERS, MAX_VALUES, at, check_size, shown
from headwater_server.errors import BadRequest
from headwater_server.lm.text.call_arguments import decoded_arguments

__all__ = ["ROLES", "checked_messages"]

ROLES: Final = ("developer", "system", "user", "assistant", "tool", "function")
"""The roles of OpenAI's API."""
_BETWEEN_PARTS: Final = "\n"
"""Separator between a message's text parts. OpenAI's API doesn't specify it; vLLM and llama.cpp use a newline."""


def checked_messages(messages: object, context_length: int) -> list[dict[str, Any]]:
    """Check the messages, and convert them: an array of text parts becomes a single text, with each part on a line.

    The arguments of tool calls become objects, as chat templates expect: see `decoded_arguments`.

    Args:
        messages: the decoded JSON of the request's field.
        context_length: the model's context length in tokens. A message takes at least one token.

    Raises:
        BadRequest: there is no message, or more than `context_length`; or a message is wrong, or has a field that no
            model supports. The error names the field, such as ``messages[0].content[1].type``.
    """
    if not isinstance(messages, list):
        raise _wrong("messages", "an array of messages", messages)
    if not messages:
        raise at("messages", None, "expected at least one message, got an empty array")
    if len(messages) > context_length:
        limit = f"this model's maximum context length is {context_length} tokens"
        raise at("messages", None, f"{limit}; expected at most as many messages, got {len(messages)}")
    checked = [_checked(message, f"messages[{n}]") for n, message in enumerate(messages)]
    _decode_arguments(checked)
    return checked


def _checked(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(path, "an object with 'role' and 'content'", message)
    if message.get("function_call") is not None:
        raise at(f"{path}.function_call", None, "this model does not support it; leave it out")
    if message.get("role") not in ROLES:
        raise _wrong(f"{path}.role", f"one of {', '.join(ROLES)}", message.get("role"))
    calls = _tool_calls(message, path)
    content = message.get("content")
    if content is None and (calls.get("tool_calls") or message["role"] == "assistant"):
        content = ""
    if isinstance(content, list):
        content = _BETWEEN_PARTS.join([_text(part, f"{path}.content[{n}]") for n, part in enumerate(content)])
    elif not isinstance(content, str):
        raise _wrong(f"{path}.content", "a string or an array of text parts", content)
    return {**message, "content": content, **calls}


def _tool_calls(message: dict[str, Any], path: str) -> dict[str, Any]:
    """Check the message's ``tool_call_id`` and ``tool_calls``, and return the calls as a field of the message: null for
    an empty array, no field if the message has no such field."""
    if message.get("tool_call_id") is not None and not isinstance(message["tool_call_id"], str):
        raise _wrong(f"{path}.tool_call_id", "a string", message["tool_call_id"])
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return {"tool_calls": None} if "tool_calls" in message else {}
    path = f"{path}.tool_calls"
    if not isinstance(calls, list):
        raise _wrong(path, "an array of calls", calls)
    if message["role"] != "assistant":
        raise at(path, None, "expected it in messages of the role 'assistant' only; leave it out")
    return {"tool_calls": [_tool_call(call, f"{path}[{n}]") for n, call in enumerate(calls)]}


def _tool_call(call: object, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise _wrong(path, "an object with 'id', 'type' and 'function'", call)
    if not isinstance(call.get("id"), str | None):
        raise _wrong(f"{path}.id", "a string", call["id"])
    if call.get("type") not in (None, "function"):
        raise _wrong(f"{path}.type", "'function'", call["type"])
    function = call.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{path}.function", "an object with 'name' and 'arguments'", function)
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{path}.function.name", "a string", function.get("name"))
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise _wrong(f"{path}.function.arguments", "a string", arguments)
    named = {"name": function["name"], "arguments": arguments or ""}
    return {"id": call.get("id") or "", "type": "function", "function": named}


def _decode_arguments(messages: list[dict[str, Any]]) -> None:
    """Decode the arguments of all calls into objects, in place. All arguments together have the same limits of keys,
    objects, arrays and values as a request body: they are JSON within strings, so the check of the body didn't count
    their values.

    Raises:
        BadRequest: all arguments together exceed a limit.
    """
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    functions = [function for function in functions if isinstance(function["arguments"], str)]
    try:
        check_size(",".join(function["arguments"] for function in functions).encode(errors="replace"))
    except BadRequest:
        limits = f"{MAX_CONTAINERS} keys, objects and arrays, and {MAX_VALUES} values"
        expected = f"expected at most {limits} in the arguments of all tool calls together, got more"
        raise at("messages", None, f"{expected}; leave out earlier calls") from None
    for function in functions:
        function["arguments"] = decoded_arguments(function["arguments"])


def _text(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise _wrong(path, 'a content part like {"type": "text", "text": "..."}', part)
    if part.get("type") == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    if part.get("type") != "text":
        raise _wrong(f"{path}.type", "'text', the only kind of content this model takes", part.get("type"))
    if not isinstance(text := part.get("text"), str):
        raise _wrong(f"{path}.text", "a string", text)
    return text


def _wrong(path: str, expected: str, value: object) -> BadRequest:
    return at(path, None, f"expected {expected}, got {shown(value)}")
