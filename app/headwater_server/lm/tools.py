"""Checks OpenAI's ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec

from headwater_server.codecs.faults import at, key_text, shown
from headwater_server.errors import BadRequest
from headwater_server.lm.known_fields import MAX_IGNORED, check_ignorable

__all__ = [
    "CHOICE_SCHEMA",
    "MAX_TOOLS",
    "NO_PARAMETERS",
    "TOOLS_SCHEMA",
    "ToolChoice",
    "checked_choice",
    "checked_tools",
    "unknown_fields",
]

MAX_TOOLS: Final = 1024
"""Maximum number of tools. OpenAI's API has 128, but agents with many MCP servers send more."""
MAX_BYTES: Final = 1 << 20
"""Maximum size of all tools as JSON, which become part of the prompt."""
MAX_DEPTH: Final = 64
"""Maximum nesting depth of objects and arrays in ``tools``, with the array of tools as the first level."""

NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
"""Default for a function that declares no parameters: an object without properties, as in OpenAI's API."""

_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_FIELDS: Final = ("name", "description", "parameters", "strict")
_TOOL_FIELDS: Final = ("type", "function")
_MISPLACED: Final = {
    **dict.fromkeys(("input_schema", "inputSchema"), "expected the schema as `parameters`, as in OpenAI's API"),
    "function": "expected its fields (name, description, parameters, strict) in its place",
}
"""Fields of other protocols that can't be left out, because the function would lose its name or parameters."""

_FUNCTION: Final = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"type": "string"},
        "parameters": {"type": "object", "description": "JSON schema of an object; without it: no arguments"},
        "strict": {"type": "boolean", "description": "Whether calls that need not be made keep to the schema, too"},
    },
}
TOOLS_SCHEMA: Final[dict[str, Any]] = {
    "type": "array",
    "maxItems": MAX_TOOLS,
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION},
    },
}
CHOICE_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"type": "string", "enum": ["function"]},
                "function": {
                    "type": "object", "required": ["name"], "properties": {"name": {"type": "string"}},
                },
            },
        },
    ],
}  # fmt: skip
"""Used in the OpenAPI schema only, like `TOOLS_SCHEMA`."""


class ToolChoice(NamedTuple):
    """The functions that an answer may, or must, call."""

    names: frozenset[str]
    """Names of the callable functions. Empty if the answer must be text."""
    is_required: bool = False
    """Whether the answer must have a call."""
    is_single: bool = False
    """Whether the answer must not have more than one call."""


def checked_tools(tools: object) -> list[dict[str, Any]]:
    """Check the tools, and convert them into the form that chat templates expect: each with ``parameters``, and without
    ``strict`` and unknown fields. Returns an empty list for None.

    Raises:
        BadRequest: a tool is wrong, or the tools are too many, too large or nested too deeply; the error names the
            field.
    """
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise _wrong("tools", "an array of tools", tools)
    if len(tools) > MAX_TOOLS:
        raise at("tools", None, f"expected at most {MAX_TOOLS}, got {len(tools)}")
    if not _is_shallow(tools):
        raise at("tools", None, f"expected at most {MAX_DEPTH} objects and arrays within each other, got more")
    size = len(msgspec.json.encode(tools))
    if size > MAX_BYTES:
        raise at("tools", None, f"expected at most {MAX_BYTES} bytes as JSON, got {size}; shorten the descriptions")
    checked: dict[str, dict[str, Any]] = {}
    for n, tool in enumerate(tools):
        function = _function(tool, f"tools[{n}]")
        name = function["name"]
        if name in checked:
            raise at(f"tools[{n}].function.name", None, f"expected each function once, got {shown(name)} again")
        checked[name] = {"type": "function", "function": function}
    return list(checked.values())


def checked_choice(choice: object, tools: list[dict[str, Any]]) -> ToolChoice:
    """The tools that the answer may, or must, call.

    Args:
        choice: the request's ``tool_choice``; None means "auto".
        tools: the result of `checked_tools`.

    Raises:
        BadRequest: the choice is not valid, or names a tool that is not in `tools`.
    """
    names = frozenset(tool["function"]["name"] for tool in tools)
    if choice is None or choice == "auto":
        return ToolChoice(names)
    if choice == "none":
        return ToolChoice(frozenset())
    if choice == "required":
        if not tools:
            raise at("tool_choice", None, "expected it with tools to choose from; set tools, or leave it out")
        return ToolChoice(names, is_required=True)
    if not isinstance(choice, dict):
        raise _wrong("tool_choice", "'none', 'auto', 'required' or an object that names a function", choice)
    if choice.get("type") != "function":
        raise _wrong("tool_choice.type", "'function'", choice.get("type"))
    function = choice.get("function")
    if not isinstance(function, dict):
        raise _wrong("tool_choice.function", "an object with the function's name", function)
    name = function.get("name")
    if not isinstance(name, str) or name not in names:
        listed = ", ".join(sorted(names))[:200] or "none"
        raise _wrong("tool_choice.function.name", f"one of the functions in tools ({listed})", name)
    return ToolChoice(frozenset({name}), is_required=True, is_single=True)


def _function(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise _wrong(path, "an object of the type 'function'", tool)
    if tool.get("type") != "function":
        raise _wrong(f"{path}.type", "'function', the only type of tool this model takes", tool.get("type"))
    _check_fields(tool, _TOOL_FIELDS, path)
    path = f"{path}.function"
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(path, "an object with the function's 'name'", function)
    _check_fields(function, _FIELDS, path)
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise _wrong(f"{path}.name", "1 to 128 letters, digits, _ and -", name)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise _wrong(f"{path}.description", "a string", description)
    if not isinstance(function.get("strict"), bool | None):
        raise _wrong(f"{path}.strict", "true or false", function["strict"])
    parameters = function.get("parameters")
    if parameters is None:
        parameters = NO_PARAMETERS
    elif not isinstance(parameters, dict):
        raise _wrong(f"{path}.parameters", "a JSON schema of an object", parameters)
    elif parameters.get("type") not in (None, "object"):
        raise _wrong(f"{path}.parameters.type", "'object'", parameters["type"])
    rest = {} if description is None else {"description": description}
    return {"name": name, **rest, "parameters": parameters}


def _check_fields(value: dict[str, Any], fields: Sequence[str], path: str) -> None:
    """Check that a tool's unknown fields may be left out.

    Raises:
        BadRequest: a field may be misspelt, or is another protocol's name of a field.
    """
    for field in value:
        if field not in fields and value[field] is not None:
            if field in _MISPLACED:
                raise at(f"{path}.{field}", None, _MISPLACED[field])
            check_ignorable(field, f"{path}.{key_text(field)}", fields)


def unknown_fields(tools: object) -> list[str]:
    """The paths of the tools' fields that have no effect here, each field only for the first tool that has it.

    Args:
        tools: the request's ``tools``; need not be valid.
    """
    first: dict[str, str] = {}
    for n, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            continue
        function = tool.get("function")
        is_flat = "function" not in tool  # as in responses
        for value, fields, path in (
            (tool, (*_TOOL_FIELDS, *(_FIELDS * is_flat)), ""),
            (function, _FIELDS, ".function"),
        ):
            if isinstance(value, dict):
                for field in value.keys() - {*fields}:
                    if value[field] is not None and len(first) <= MAX_IGNORED:
                        first.setdefault(f"{path}.{key_text(field)}", f"tools[{n}]{path}.{key_text(field)}")
    return sorted(first.values())


def _is_shallow(value: list[Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]  # fmt: skip
        if not level:
            return True
    return False


def _wrong(path: str, expected: str, value: object) -> BadRequest:
    return at(path, None, f"expected {expected}, got {shown(value)}")
