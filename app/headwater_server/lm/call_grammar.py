"""The grammar of an answer that calls tools, in llguidance's dialect of Lark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import orjson

from headwater.engine import MAX_GRAMMAR, Grammar
from headwater_server.codecs.faults import at
from headwater_server.lm.held_schemas import held_schema
from headwater_server.lm.text.tool_calls import CallFormat

__all__ = ["call_grammar"]

_FIX: Final = 'leave it out, or let the model choose ("tool_choice": "auto" without "strict"): then it is ignored'


def call_grammar(
    format: CallFormat,
    tools: Mapping[int, Mapping[str, Any]],
    special_id: Callable[[str], int | None],
    *,
    is_single: bool,
    content: Grammar | None = None,
) -> Grammar:
    """The grammar of an answer that has a call of any of these tools, or several calls unless `is_single` is set; with
    `content`, the answer may be JSON of this schema instead.

    Args:
        format: the format of calls.
        tools: the tools that may be called, in the form that `headwater_server.lm.tools.checked_tools` returns, by
            their places in the request.
        special_id: returns the id of a special token; `None` for any other text.
        is_single: whether the answer has at most a single call.
        content: the JSON schema of an answer without calls; `None` if the answer must call a tool.

    Raises:
        BadRequest: `content` is not JSON; or a tool's schema can't be held (see `held_schema`); or the whole grammar is
            longer than `MAX_GRAMMAR`.
    """

    def mark(text: str) -> str:
        token = special_id(text)
        return _string(text) if token is None else f"<[{token}]>"

    opening, closing, between = "", "", _string("; ")
    if format.name == "hermes":
        opening, closing, between = f'{mark("<tool_call>")} "\\n"', f'"\\n" {mark("</tool_call>")}', '"\\n"'
    elif format.name == "mistral":
        between = '""' if format.has_names else '", "'
    calls = "call" if is_single else f"call ({between} call)*"
    if format.name == "mistral" and not format.has_names:
        calls = f'{mark("[TOOL_CALLS]")} "[" {calls} "]"'
    rules = [f"start: {calls}" if content is None else f"start: {calls} | content"]
    if content is not None:
        try:
            msgspec.json.decode(content.text)
        except msgspec.DecodeError as error:
            raise at(content.field, None, f"expected a JSON schema, got text that is no JSON: {error}") from error
        rules.append(f"content: %json {content.text}")
    functions = []
    for n, tool in tools.items():
        function = tool["function"]
        parameters = held_schema(function["parameters"], f"tools[{n}].function.parameters", _FIX)
        name, schema = function["name"], {"type": "object", **parameters}
        if format.has_names:
            begin = f'{mark("[TOOL_CALLS]")} "{name}" {mark("[ARGS]")}'
            end = ""
        else:
            key = "parameters" if format.name == "llama3" else "arguments"
            begin, end = _string(f'{{"name": "{name}", "{key}": '), '"}"'
        functions.append(f"f{n}")
        rules += [f"f{n}: {begin} a{n} {end}", f"a{n}: %json {msgspec.json.encode(schema).decode()}"]
    rules.append(f"call: {opening} ({' | '.join(functions)}) {closing}")
    text = "\n".join(rules)
    if len(text) > MAX_GRAMMAR:
        expected = f"expected schemas that come to a grammar of at most {MAX_GRAMMAR} characters"
        raise at("tools", None, f"{expected}, got {len(text)}; shorten them, or offer fewer")
    return Grammar("lark", text, "tools")


def _string(text: str) -> str:
    """A text as a quoted Lark string."""
    return orjson.dumps(text).decode()
