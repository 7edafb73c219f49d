"""Tools of responses requests, and the choice among them, as the chat request has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from openai.types.responses import Tool, ToolChoiceTypes

from headwater_server.errors import BadRequest
from headwater_server.lm.response_tools import OfferedTools, ToolName, offered_tools

FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "c", "description": "d"}
SPACE: dict[str, Any] = {"type": "namespace", "name": "s", "tools": [FUNCTION, CUSTOM]}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "a|b"}


def kinds(value: Any) -> Iterator[str]:
    """The types of the client's classes of tools."""
    for tool in get_args(get_args(value)[0]):
        yield from get_args(tool.model_fields["type"].annotation)


def offered_names(offered: OfferedTools) -> list[Any]:
    assert isinstance(offered.tools, list)
    return [tool["function"]["name"] for tool in offered.tools]


@pytest.mark.parametrize("kind", sorted({*kinds(Tool), *get_args(ToolChoiceTypes.model_fields["type"].annotation)}))
def test_each_kind_of_tool_is_offered_or_left_out_and_named(kind: str) -> None:
    tool = {"function": FUNCTION, "custom": CUSTOM, "namespace": SPACE}.get(kind, {"type": kind, "name": "x"})
    offered = offered_tools([tool], "auto")
    if kind in ("function", "custom", "namespace"):
        assert offered.tools
        assert not offered.ignored
        return
    assert (offered.tools, offered.ignored) == ([], ("tools[0]",))
    for tools, choice in (([tool], "required"), ([FUNCTION, tool], {"type": kind})):
        with pytest.raises(BadRequest, match=f"got '{kind}'") as caught:
            offered_tools(tools, choice)
        assert caught.value.field in ("tools[0].type", "tool_choice.type")


def test_a_custom_tool_is_a_function_of_a_string() -> None:
    offered = offered_tools([CUSTOM, SPACE], None)
    parameters = {
        "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
        "additionalProperties": False,
    }  # fmt: skip
    chat = {"type": "function", "function": {"name": "c", "description": "d", "parameters": parameters}}
    assert isinstance(offered.tools, list)
    assert offered.tools[0] == chat
    assert offered_names(offered) == ["c", "s__f", "s__c"]
    assert offered.names == {
        "c": ToolName("c", "", True), "s__f": ToolName("f", "s", False), "s__c": ToolName("c", "s", True),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "parameter", "ignored", "expressions"),
    [
        (None, {}, (), ()),
        ({"type": "text"}, {}, (), ()),
        (REGEX, {"pattern": "^(?:a|b)$"}, (), ("tools[0].format",)),
        (LARK, {"description": "A text that this Lark grammar accepts:\nstart: /a+/"}, ("tools[0].format",), ()),
    ],
)
def test_a_format_reaches_the_model(format: Any, parameter: Any, ignored: Any, expressions: Any) -> None:
    offered = offered_tools([{**CUSTOM, "format": format}], None)
    assert isinstance(offered.tools, list)
    properties = offered.tools[0]["function"]["parameters"]["properties"]
    assert properties == {"input": {"type": "string", **parameter}}
    assert (offered.ignored, offered.expressions) == (ignored, expressions)


def test_allowed_tools_are_the_only_tools() -> None:
    tools = [FUNCTION, {**FUNCTION, "name": "g"}, CUSTOM, SPACE, {"type": "web_search"}]
    allowed = [{"type": "custom", "name": "c"}, {"type": "function", "name": "f", "namespace": "s"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    offered = offered_tools(tools, choice)
    assert (offered_names(offered), offered.choice) == (["c", "s__f"], "required")
    assert offered.places["tools[1].function"] == "tools[3].tools[0]"
    hosted = {**choice, "mode": "auto", "tools": [{"type": "web_search"}]}
    assert (offered_tools(tools, hosted).tools, offered_tools(tools, hosted).choice) == ([], "auto")


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        ({"mode": "any", "tools": [FUNCTION]}, "tool_choice.mode"),
        ({"mode": "auto"}, "tool_choice.tools"),
        ({"mode": "auto", "tools": []}, "tool_choice.tools"),
        ({"mode": "auto", "tools": ["f"]}, "tool_choice.tools[0]"),
        ({"mode": "auto", "tools": [{"type": {}}]}, "tool_choice.tools[0].type"),
        ({"mode": "required", "tools": [FUNCTION, {"type": "web_search"}]}, "tool_choice.tools[1].type"),
        ({"mode": "auto", "tools": [{"type": "function", "name": ["f"]}]}, "tool_choice.tools[0].name"),
        ({"mode": "auto", "tools": [{"type": "function", "name": "g"}]}, "tool_choice.tools[0].name"),
    ],
)
def test_a_wrong_choice_of_allowed_tools_is_named(choice: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        offered_tools([FUNCTION], {"type": "allowed_tools", **choice})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("format", "field"),
    [
        ("text", "tools[0].format"),
        ({"type": "json"}, "tools[0].format"),
        ({**LARK, "syntax": "ebnf"}, "tools[0].format.syntax"),
        ({**LARK, "definition": None}, "tools[0].format.definition"),
    ],
)
def test_a_wrong_format_is_named(format: Any, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        offered_tools([{**CUSTOM, "format": format}], None)
    assert caught.value.field == field


def test_a_tool_by_its_name() -> None:
    for choice, name in (
        ({"type": "custom", "name": "c"}, "c"),
        ({"type": "function", "name": "f", "namespace": "s"}, "s__f"),
    ):
        assert offered_tools([CUSTOM, SPACE], choice).choice == {"type": "function", "function": {"name": name}}


def test_fields_of_tools_about_which_the_model_is_not_told_are_named() -> None:
    tool = {**FUNCTION, "defer_loading": True, "async": False, "output_schema": {"type": "object"}}
    offered = offered_tools([tool], None)
    assert offered.ignored == ("tools[0].defer_loading", "tools[0].output_schema")
    assert isinstance(offered.tools, list)
    assert offered.tools[0]["function"].keys() == {"name", "parameters", "strict"}
