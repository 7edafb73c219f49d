"""JSON schemas of today's libraries, compiled by the engine's own compiler."""

from __future__ import annotations

import functools
import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from pydantic import BaseModel, Field
from tokenizers import Tokenizer

from headwater.lm.grammar_source import compiled, special_texts
from headwater.lm.grammars import KINDS
from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.held_schemas import FORMATS, held_schema
from tests.app.lm.scripted import FOLDER, HELLO, LIMITS
from tests.app.lm.tool_text import tool_text

pytestmark = pytest.mark.heavy


@functools.cache
def tokenizer() -> tuple[LLTokenizer, list[str], Tokenizer]:
    file = FOLDER / "tokenizer.json"
    read = LLTokenizer(file.read_text(), 4100, [0, 2])
    return read, special_texts(read), Tokenizer.from_file(str(file))


def takes(schema: Any, *values: Any, raw: bool = False) -> list[bool]:
    """Compile a schema (as a client sends it, unless ``raw`` is set). Returns whether an answer may be each of these
    values."""
    read, special, encoder = tokenizer()
    text = json.dumps(schema if raw else held_schema(schema, "form"))
    matcher, _ = compiled(read, special, "json_schema", text)
    taken = []
    for value in values:
        each = matcher.deep_copy()
        ids = encoder.encode(json.dumps(value), add_special_tokens=False).ids
        taken.append(each.try_consume_tokens(ids) == len(ids) and each.is_accepting())
    return taken


def refused(schema: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        held_schema(schema, "form")
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value.message


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_engine_holds_these_formats(name: str) -> None:
    assert takes({"type": "string", "format": name}, "?") == [False]


@pytest.mark.parametrize(
    "name",
    [
        "binary", "byte", "color", "decimal", "double", "file-path", "float", "idn-email", "int32", "int64", "iri",
        "json-pointer", "password", "path", "regex", "uri-reference", "uri-template", "url",
    ],
)  # fmt: skip
def test_other_formats_only_annotate(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert takes(schema, "?", 1) == [True, False]
    with pytest.raises(ValueError, match=f"Unknown format: {name}"):
        takes(schema, raw=True)


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9)] = 9


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    owner: str | None = None


class Node(BaseModel):
    """A tree."""

    name: Annotated[str, Field(min_length=1, max_length=20, examples=["root"])]
    children: list[Node] = []
    pair: tuple[int, str] | None = None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    raw: bytes | None = None
    extra: dict[str, Any] = {}


def test_what_pydantic_writes() -> None:
    tree = {"name": "a", "children": [{"name": "b", "children": [], "pair": [1, "x"]}]}
    assert takes(
        Node.model_json_schema(),
        tree,
        {"name": "a", "pet": {"kind": "cat", "lives": 3}},
        {"name": "a", "pet": {"kind": "dog", "owner": None}},
        {"name": "a", "pet": {"kind": "cow"}},
        {"name": ""},
        {"name": "a", "children": [{}]},
        {"name": "a", "pair": [1]},
    ) == [True, True, True, False, False, False, False]


ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path", "minLength": 1},
        "count": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "mode": {"const": "fast", "type": "string"},
        "labels": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "items": False},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    },
    "required": ["path"],
    "additionalProperties": False,
}


def test_what_zod_writes() -> None:
    assert takes(
        ZOD,
        {"path": "/a", "count": 3, "mode": "fast", "labels": {"x": "y"}, "pair": ["a", 1.5], "unit": None},
        {"path": "/a", "tags": ["x", "x"]},
        {"path": "/a", "mode": "slow"},
        {"path": "/a", "pair": ["a", 1, 2]},
        {"path": "/a", "other": 1},
        {"path": ""},
    ) == [True, True, False, False, False, False]


MCP = {
    "$schema": "http://json-schema.org/schema#",
    "$comment": "of a server",
    "title": "Args",
    "type": "object",
    "x-order": ["a"],
    "deprecated": False,
    "properties": {
        "filter": {"$ref": "#/definitions/filter", "description": "Which"},
        "when": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}$", "examples": ["2026-01"]},
        "pair": {"type": "array", "items": [{"type": "string"}, {"type": "boolean"}], "additionalItems": False},
        "format": {"type": "string"},
        "not": {"type": ["integer", "null"], "nullable": True},
    },
    "required": None,
    "definitions": {"filter": {"type": "object", "properties": {"any": {"$ref": "#/definitions/filter"}}}},
}


def test_what_mcp_servers_write() -> None:
    assert takes(
        MCP,
        {"filter": {"any": {"any": {}}}, "when": "2026-01", "pair": ["a", True], "format": "x", "not": None},
        {"when": "2026"},
        {"filter": {"any": 1}},
        {"pair": [1, True]},
    ) == [True, False, False, False]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"not": {}}, "`not` is refused, since no answer can be held to it; leave it out"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems` is refused"),
        ({"if": {}, "then": {}}, "`if` is refused"),
        ({"propertyNames": {"pattern": "^a"}}, "`propertyNames` is refused"),
        ({"unevaluatedProperties": False}, "`unevaluatedProperties` is refused"),
        ({"type": "any"}, "the `type` 'any', which JSON Schema doesn't have is refused"),
        ({"pattern": "^(?!a)"}, "a `pattern` with a look-around or a reference to a group is refused"),
        ({"pattern": r"(a)\1"}, "a `pattern` with a look-around or a reference to a group is refused"),
        ({"$ref": "#/$defs/missing"}, "a `$ref` to '#/$defs/missing', which isn't in the schema is refused"),
        ({"$ref": "https://a.example/b"}, "a `$ref` to 'https://a.example/b', which is outside of the schema is"),
    ],
)
def test_what_cannot_be_held_is_refused_by_its_path(part: dict[str, Any], message: str) -> None:
    assert refused({"properties": {"a": {"items": [{}, {"anyOf": [part]}]}}}).startswith(
        f"form.properties.a.items[1].anyOf[0]: {message}"
    )
    with pytest.raises(ValueError, match=r"\w"):
        takes(part, raw=True)


@pytest.mark.parametrize("pattern", [r"^[(?!]$", r"\(?=", r"^(?:a|b)$", r"\\1", r"^(?<year>\d{4})$", r"[\d]"])
def test_patterns_with_similar_characters_pass(pattern: str) -> None:
    takes({"type": "string", "pattern": pattern})


def test_a_long_path_is_cut() -> None:
    schema: dict[str, Any] = {"not": {}}
    for _ in range(60):
        schema = {"properties": {"name" * 20: schema}}
    message = refused(schema)
    assert message.startswith("form.properties.namename")
    assert len(message) < 600


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{id(parameters)}", "parameters": parameters}}


def test_a_tools_schema_is_refused_where_the_call_must_keep_to_it_only() -> None:
    bad = {"type": "object", "properties": {"path": {"type": "string", "not": {"const": ""}}}}
    tools = [tool({}), tool({"properties": None}), tool({"type": "object"}), tool(bad)]
    limits = msgspec.structs.replace(LIMITS, grammars=KINDS)
    body: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": tools}

    def plan(**fields: Any) -> Any:
        return ChatRequest.read(json.dumps({**body, **fields}).encode()).plan(tool_text("hermes"), limits)

    assert plan().specs[0].grammar is None
    with pytest.raises(BadRequest) as caught:
        plan(tool_choice="required")
    assert caught.value.message == (
        "tools[3].function.parameters.properties.path: `not` is refused, since no answer can be held to it; leave it "
        'out, or let the model choose ("tool_choice": "auto" without "strict"): then it is ignored'
    )
    named = {"type": "function", "function": {"name": tools[3]["function"]["name"]}}
    with pytest.raises(BadRequest, match=r"^tools\[3\]\.function\.parameters\.properties\.path: "):
        plan(tool_choice=named)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["properties", "items", "anyOf", "format", "type", "$ref", "pattern", "required", "x", "const"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_json_is_a_schema_or_refused(schema: Any) -> None:
    try:
        held = held_schema(schema, "form")
    except BadRequest:
        return
    assert held_schema(held, "form") == held
