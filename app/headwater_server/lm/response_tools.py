"""The tools of a responses request, as the tools of the equivalent chat request.

Source: OpenAI's API reference, and what its Codex sends: functions within a namespace, which the model sees as
``NAMESPACE__NAME``; custom tools, which the model sees as functions of a single string; and tools that OpenAI's servers
run, which this server doesn't.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from headwater_server.codecs.faults import at, shown
from headwater_server.errors import BadRequest

__all__ = ["CUSTOM_INPUT", "OfferedTools", "ToolName", "flat_name", "offered_tools"]

SEPARATOR: Final = "__"
CUSTOM_INPUT: Final = "input"
"""The name of a custom tool's only parameter."""
_HOSTED: Final = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
    "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
})  # fmt: skip
"""Types of tools that the model isn't told of."""
_WITHOUT_EFFECT: Final = ("allowed_callers", "async", "defer_loading", "output_schema")
"""Fields of tools about which the model isn't told."""
_SYNTAXES: Final = ("lark", "regex")


class ToolName(NamedTuple):
    """What an answer says of a tool that is called."""

    name: str
    namespace: str = ""
    """Empty for a tool outside of namespaces."""
    is_custom: bool = False


class OfferedTools(NamedTuple):
    """What the equivalent chat request says of the tools."""

    tools: object
    """Its ``tools``, which it checks."""
    choice: object
    """Its ``tool_choice``, which it checks."""
    places: dict[str, str]
    """The path of each tool in the responses request, by its path in the chat request."""
    ignored: tuple[str, ...]
    """Paths without effect: of tools that the model isn't told of, of their fields, and of formats that can't hold."""
    expressions: tuple[str, ...]
    """Paths of custom tools' formats that hold only where the answer has a grammar: regular expressions."""
    names: dict[str, ToolName]
    """Custom tools, and tools within a namespace, by the name that the model sees."""


def flat_name(name: object, namespace: object) -> object:
    """The name that the model sees of a function; ``namespace`` is None for a function outside of namespaces."""
    return (
        f"{namespace}{SEPARATOR}{name}" if namespace and isinstance(namespace, str) and isinstance(name, str) else name
    )


def offered_tools(tools: object, choice: object) -> OfferedTools:
    """Convert the tools, and the choice among them.

    Args:
        tools: the request's ``tools``.
        choice: its ``tool_choice``.

    Raises:
        BadRequest: a namespace, a custom tool's format or the choice is wrong; or a tool must be called, and there is
            a tool that the model isn't told of.
    """
    allowed, choice = _allowed(choice)
    offered = OfferedTools([], choice, {}, (), (), {})
    if not isinstance(tools, list):
        return offered._replace(tools=tools, choice=_chat_choice(choice))
    chat_tools: list[object] = []
    ignored: list[str] = []
    expressions: list[str] = []
    for tool, path, namespace in _each(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind in _HOSTED:
            if choice == "required" and allowed is None:
                expected = "expected functions only where a tool must be called, since this server runs no other tools"
                raise at(f"{path}.type", None, f"{expected}, got {shown(kind)}")
            ignored.append(path)
            continue
        place = f"tools[{len(chat_tools)}]"
        if not isinstance(tool, dict):
            offered.places[place] = path
            chat_tools.append(tool)
            continue
        namespace = namespace or tool.get("namespace")
        name = flat_name(tool.get("name"), namespace)
        if allowed is not None and not (isinstance(name, str) and name in allowed):
            continue
        if kind == "custom":
            tool = _function(tool, path, ignored, expressions)
        if isinstance(name, str) and (name != tool.get("name") or kind == "custom"):
            offered.names[name] = ToolName(str(tool.get("name")), str(namespace or ""), kind == "custom")
        ignored += [f"{path}.{field}" for field in _WITHOUT_EFFECT if tool.get(field)]
        offered.places[place] = offered.places[f"{place}.function"] = path
        chat_tools.append({"type": tool.get("type"), "function": {**_chat_fields(tool), "name": name}})
    if allowed is not None:
        _check_allowed(allowed, chat_tools)
    return offered._replace(
        tools=chat_tools, choice=_chat_choice(choice), ignored=tuple(ignored), expressions=tuple(expressions)
    )


def _each(tools: list[Any]) -> Iterator[tuple[Any, str, str | None]]:
    """Each tool with its path and its namespace; None outside of namespaces. Raises `BadRequest` if a namespace is
    wrong."""
    for n, tool in enumerate(tools):
        path = f"tools[{n}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            yield tool, path, None
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise at(f"{path}.name", None, f"expected the namespace's name, got {shown(tool.get('name'))}")
        if not isinstance(tool.get("tools"), list):
            raise at(f"{path}.tools", None, f"expected an array of functions, got {shown(tool.get('tools'))}")
        for number, inner in enumerate(tool["tools"]):
            yield inner, f"{path}.tools[{number}]", tool["name"]


def _chat_fields(tool: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tool that the chat request checks, with the tool's own name."""
    return {field: tool[field] for field in tool if field not in ("type", "namespace", *_WITHOUT_EFFECT)}


def _function(tool: dict[str, Any], path: str, ignored: list[str], expressions: list[str]) -> dict[str, Any]:
    """A custom tool as a function of a single string. The path of a format that can't hold is added to ``ignored``, of
    one that holds in a grammar to ``expressions``. Raises `BadRequest` if the format is wrong."""
    parameter = {"type": "string"}
    format, path = tool.get("format"), f"{path}.format"
    if format is not None and (not isinstance(format, dict) or format.get("type") not in ("text", "grammar")):
        raise at(path, None, f"expected an object of the type 'text' or 'grammar', got {shown(format)}")
    if format is not None and format["type"] == "grammar":
        syntax, definition = format.get("syntax"), format.get("definition")
        if syntax not in _SYNTAXES:
            raise at(f"{path}.syntax", None, f"expected 'lark' or 'regex', got {shown(syntax)}")
        if not isinstance(definition, str):
            raise at(f"{path}.definition", None, f"expected a string, got {shown(definition)}")
        if syntax == "lark":  # no JSON schema says that a string is of a context-free language
            parameter["description"] = f"A text that this Lark grammar accepts:\n{definition}"
            ignored.append(path)
        else:
            parameter["pattern"] = f"^(?:{definition})$"
            expressions.append(path)
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: parameter},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    fields = {field: value for field, value in tool.items() if field != "format"}
    return {**fields, "type": "function", "parameters": parameters}


def _allowed(choice: object) -> tuple[dict[str, str] | None, object]:
    """The names that the model sees of the tools that may be called, each with its path in the choice, None: all; and
    the choice among them. Raises `BadRequest` if a choice of the type ``allowed_tools`` is wrong."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None, choice
    mode, tools = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("none", "auto", "required"):
        raise at("tool_choice.mode", None, f"expected 'none', 'auto' or 'required', got {shown(mode)}")
    if not isinstance(tools, list) or not tools:
        raise at("tool_choice.tools", None, f"expected an array of tools, got {shown(tools)}")
    allowed: dict[str, str] = {}
    for n, tool in enumerate(tools):
        path = f"tool_choice.tools[{n}]"
        if not isinstance(tool, dict):
            raise at(path, None, f"expected an object with the tool's type and name, got {shown(tool)}")
        kind, name = tool.get("type"), flat_name(tool.get("name"), tool.get("namespace"))
        if kind not in ("function", "custom"):
            if mode == "required" or not isinstance(kind, str) or kind not in _HOSTED:
                raise _no_such_tool(f"{path}.type", kind)
        elif not isinstance(name, str):
            raise at(f"{path}.name", None, f"expected the tool's name, got {shown(name)}")
        else:
            allowed[name] = f"{path}.name"
    return allowed, mode


def _check_allowed(allowed: dict[str, str], chat_tools: list[Any]) -> None:
    names = {tool["function"]["name"] for tool in chat_tools if isinstance(tool, dict)}
    for name, path in allowed.items():
        if name not in names:
            raise at(path, None, f"expected one of the functions in tools, got {shown(name)}")


def _chat_choice(choice: object) -> object:
    """A choice, other than of the type ``allowed_tools``, in a chat request's form."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind not in ("function", "custom"):
        raise _no_such_tool("tool_choice.type", kind)
    return {"type": "function", "function": {"name": flat_name(choice.get("name"), choice.get("namespace"))}}


def _no_such_tool(path: str, kind: object) -> BadRequest:
    expected = "expected 'function' or 'custom', since this server runs no other tools"
    return at(path, None, f"{expected}, got {shown(kind)}")
