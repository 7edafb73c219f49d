"""The input of a responses request, as the messages of the equivalent chat request.

Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from headwater_server.codecs.faults import at, shown
from headwater_server.lm.response_items import CARRIED
from headwater_server.lm.response_tools import CUSTOM_INPUT, flat_name

__all__ = ["ROLES", "TEXT_KINDS", "conversation"]

ROLES: Final = ("developer", "system", "user", "assistant")
TEXT_KINDS: Final = ("input_text", "output_text")
_MEDIA_KINDS: Final = {"input_image": "image_url", "input_audio": "input_audio", "input_file": "file"}
"""Kinds of content that are no text, each with the kind of a chat request's part."""
_NOT_FOR_TEMPLATES: Final = frozenset({"type", "id", "status", "phase", "call_id", "output", "tool_calls"})
"""Fields of an item that chat templates don't use, or that have another place in a chat message."""
_CALLS: Final = ("function_call", "custom_tool_call")
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")


def conversation(
    input: str | Sequence[Any], instructions: str | None, *, takes_media: bool = False
) -> tuple[list[Any], dict[str, str]]:
    """The messages of the equivalent chat request, and a map from field paths of the chat request to the paths in this
    request, for the messages.

    Args:
        input: the request's ``input``.
        instructions: its ``instructions``.
        takes_media: whether images, audio and files are converted; else they are refused.

    Raises:
        BadRequest: an item is wrong; its fields are checked only as far as the chat request can't check them.
    """
    messages: list[Any] = []
    names: dict[str, str] = {}
    reasoning: list[str] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        names["messages[0]"] = "instructions"
    if isinstance(input, str):
        names[f"messages[{len(messages)}]"] = "input"
        messages.append({"role": "user", "content": input})
        return messages, names
    ids = {item["id"] for item in input if isinstance(item, dict) and _is_referable(item)}
    for n, item in enumerate(input):
        path = f"input[{n}]"
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "reasoning":
            reasoning += _reasoning(item, path)
            continue
        if kind == "item_reference":
            _check_reference(item, path, ids)
            continue
        if kind in _CALLS:
            _add_call(item, path, messages, names)
        else:
            place = f"messages[{len(messages)}]"
            names[place] = path
            if kind in _RESULTS:
                names |= {f"{place}.tool_call_id": f"{path}.call_id", f"{place}.content": f"{path}.output"}
                messages.append(_chat_result(item, path, takes_media))
            else:
                messages.append(_chat_message(item, path, takes_media))
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("reasoning_content", "\n".join(reasoning))
        reasoning = []
    return messages, names


def _is_referable(item: dict[str, Any]) -> bool:
    return item.get("type") != "item_reference" and isinstance(item.get("id"), str)


def _check_reference(item: dict[str, Any], path: str, ids: set[str]) -> None:
    """Refuse a reference to an item that isn't in the input. A reference to an item of the input says nothing new."""
    if not isinstance(item.get("id"), str) or item["id"] not in ids:
        expected = "expected the id of an item in this input, since this server keeps no answers"
        raise at(f"{path}.id", None, f'{expected}, got {shown(item.get("id"))}; send the item itself ("store": false)')


def _reasoning(item: dict[str, Any], path: str) -> list[str]:
    """The texts of an item with the model's reasoning: its content, or else the text that this server put into
    ``encrypted_content``, or else its summary. Other encrypted content can't be read."""
    texts: dict[str, list[str]] = {}
    for field in ("content", "summary"):
        parts = item.get(field)
        if not isinstance(parts, list | None):
            raise at(f"{path}.{field}", None, f"expected an array of texts, got {shown(parts)}")
        for n, part in enumerate(parts or ()):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                raise at(f"{path}.{field}[{n}]", None, f"expected an object with a text, got {shown(part)}")
        texts[field] = [part["text"] for part in parts or ()]
    carried = item.get("encrypted_content")
    if not isinstance(carried, str | None):
        raise at(f"{path}.encrypted_content", None, f"expected a string, got {shown(carried)}")
    is_ours = carried is not None and carried.startswith(CARRIED)
    return texts["content"] or ([carried.removeprefix(CARRIED)] if carried and is_ours else texts["summary"])


def _add_call(item: dict[str, Any], path: str, messages: list[Any], names: dict[str, str]) -> None:
    """Add a function call to the last message if it is the assistant's, or else to a new assistant message."""
    if not messages or messages[-1]["role"] != "assistant":
        names[f"messages[{len(messages)}]"] = path
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    place = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
    names |= {place: path, f"{place}.id": f"{path}.call_id", f"{place}.function": path}
    name, arguments = flat_name(item.get("name"), item.get("namespace")), item.get("arguments")
    if item.get("type") == "custom_tool_call":
        if not isinstance(item.get("input"), str):
            raise at(f"{path}.input", None, f"expected a string, got {shown(item.get('input'))}")
        arguments = orjson.dumps({CUSTOM_INPUT: item.get("input")}).decode()
    function = {"name": name, "arguments": arguments}
    calls.append({"id": item.get("call_id"), "type": "function", "function": function})


def _chat_result(item: dict[str, Any], path: str, takes_media: bool) -> dict[str, Any]:
    """Convert an item with a function's result into a chat message. The chat request checks its content."""
    if not isinstance(item.get("call_id"), str):
        raise at(f"{path}.call_id", None, f"expected a string, got {shown(item.get('call_id'))}")
    return {
        **_rest(item),
        "role": "tool",
        "tool_call_id": item["call_id"],
        "content": _content(item, "output", path, takes_media),
    }


def _chat_message(item: object, path: str, takes_media: bool) -> dict[str, Any]:
    """Convert an item of the input into a chat message. The chat request checks the fields that both forms share."""
    if not isinstance(item, dict):
        raise at(path, None, f"expected a message with 'role' and 'content', got {shown(item)}")
    if item.get("type") not in (None, "message"):
        expected = "expected 'message', 'reasoning', 'function_call' or 'function_call_output'"
        raise at(f"{path}.type", None, f"{expected}, the kinds of items this model takes, got {shown(item['type'])}")
    if item.get("role") not in ROLES:
        raise at(f"{path}.role", None, f"expected one of {', '.join(ROLES)}, got {shown(item.get('role'))}")
    if item.get("tool_calls") is not None:
        raise at(f"{path}.tool_calls", None, "expected each call as an item of the type 'function_call'; leave it out")
    return {**_rest(item), "content": _content(item, "content", path, takes_media)}


def _rest(item: dict[str, Any]) -> dict[str, Any]:
    """The fields of an item that are passed to the chat template unchanged."""
    return {name: value for name, value in item.items() if name not in _NOT_FOR_TEMPLATES}


def _content(item: dict[str, Any], field: str, path: str, takes_media: bool) -> object:
    content = item.get(field)
    if isinstance(content, list):
        return [_chat_part(part, f"{path}.{field}[{n}]", takes_media) for n, part in enumerate(content)]
    return content


def _chat_part(part: object, path: str, takes_media: bool) -> dict[str, Any]:
    if not isinstance(part, dict):
        expected = 'a content part like {"type": "input_text", "text": "..."}'
        raise at(path, None, f"expected {expected}, got {shown(part)}")
    kind = part.get("type")
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    if takes_media and isinstance(kind, str) and kind in _MEDIA_KINDS:
        return _media(part, kind, path)
    if kind not in TEXT_KINDS:
        expected = "'input_text' or 'output_text', the only kinds of content this model takes"
        raise at(f"{path}.type", None, f"expected {expected}, got {shown(kind)}")
    return {"type": "text", "text": part.get("text")}


def _media(part: dict[str, Any], kind: str, path: str) -> dict[str, Any]:
    """An image, audio or file in the form of a chat request. Raises `BadRequest` if its content is kept elsewhere."""
    if part.get("file_id") is not None:
        fix = "this server keeps no files; send the content itself"
        raise at(f"{path}.file_id", None, f"{fix}, got {shown(part['file_id'])}")
    rest = {field: value for field, value in part.items() if field not in ("type", "file_id") and value is not None}
    if kind == "input_image":
        rest["url"] = rest.pop("image_url", None)
    chat_kind = _MEDIA_KINDS[kind]
    return {"type": chat_kind, chat_kind: rest.get("input_audio", rest)}
