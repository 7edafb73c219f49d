"""The tools of a responses request, as the tools of the equivalent chat request.

Source: OpenAI's API reference, and what its Codex sends: functions within a namespace, which the model sees as
``NAMESPACE__NAME``, and tools that OpenAI's servers run, which this server doesn't.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from headwater_server.codecs.faults import at, shown

__all__ = ["OfferedTools", "chat_tool", "flat_name", "offered_tools"]

SEPARATOR: Final = "__"
_NOT_OFFERED: Final = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
    "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
    "web_search_preview_2025_03_11",
})  # fmt: skip
"""Types of tools that the model isn't told of."""


class OfferedTools(NamedTuple):
    """What the equivalent chat request says of the tools."""

    tools: object
    """Its ``tools``, which it checks."""
    places: dict[str, str]
    """The path of each tool in the responses request, by its path in the chat request."""
    ignored: tuple[str, ...]
    """Paths of the tools that the model isn't told of."""
    namespaces: dict[str, tuple[str, str]]
    """The namespace and name of a function within a namespace, by the name that the model sees."""


def flat_name(name: object, namespace: object) -> object:
    """The name that the model sees of a function; ``namespace`` is None for a function outside of namespaces."""
    return (
        f"{namespace}{SEPARATOR}{name}" if namespace and isinstance(namespace, str) and isinstance(name, str) else name
    )


def chat_tool(tool: object) -> object:
    """A tool, or a tool choice, in a chat request's form."""
    if not isinstance(tool, dict):
        return tool
    function = {name: tool[name] for name in tool if name not in ("type", "namespace")}
    if "namespace" in tool:
        function["name"] = flat_name(tool.get("name"), tool["namespace"])
    return {"type": tool.get("type"), "function": function}


def offered_tools(tools: object, choice: object) -> OfferedTools:
    """Convert the tools.

    Args:
        tools: the request's ``tools``.
        choice: its ``tool_choice``.

    Raises:
        BadRequest: a namespace is wrong; or a tool must be called, and there is a tool that the model isn't told of.
    """
    found = OfferedTools([], {}, (), {})
    if not isinstance(tools, list):
        return found._replace(tools=tools)
    offered: list[object] = []
    ignored: list[str] = []

    def offer(tool: Any, path: str, namespace: str | None = None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace" and namespace is None:
            _check_namespace(tool, path)
            for n, inner in enumerate(tool["tools"]):
                offer(inner, f"{path}.tools[{n}]", tool["name"])
        elif isinstance(kind, str) and kind in _NOT_OFFERED:
            if choice == "required":
                expected = "expected functions only where a tool must be called, since this server runs no other tools"
                raise at(f"{path}.type", None, f"{expected}, got {shown(kind)}")
            ignored.append(path)
        else:
            place = f"tools[{len(offered)}]"
            found.places[place] = found.places[f"{place}.function"] = path
            if isinstance(tool, dict) and isinstance(namespace := namespace or tool.get("namespace"), str):
                tool = {**tool, "namespace": namespace}
                found.namespaces[str(flat_name(tool.get("name"), namespace))] = namespace, str(tool.get("name"))
            offered.append(chat_tool(tool))

    for n, tool in enumerate(tools):
        offer(tool, f"tools[{n}]")
    return found._replace(tools=offered, ignored=tuple(ignored))


def _check_namespace(tool: dict[str, Any], path: str) -> None:
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise at(f"{path}.name", None, f"expected the namespace's name, got {shown(tool.get('name'))}")
    if not isinstance(tool.get("tools"), list):
        raise at(f"{path}.tools", None, f"expected an array of functions, got {shown(tool.get('tools'))}")
