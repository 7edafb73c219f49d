"""The fields of several servers that constrain an answer: each becomes the same grammar, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headwater.engine import Grammar
from headwater_server.errors import BadRequest
from headwater_server.lm.answer_grammar import CONSTRAINTS
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.known_fields import read_known
from headwater_server.lm.responses import ResponsesRequest
from tests.app.lm.scripted import HELLO, LIMITS, tiny_text

ABLE = msgspec.structs.replace(LIMITS, grammars=frozenset({"json_schema", "regex", "lark"}))
BODIES: dict[Any, dict[str, Any]] = {
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "x"},
    ResponsesRequest: {"input": "x"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "format": "binary"}}}
HELD = '{"type":"object","properties":{"a":{"type":"string"}}}'
CHOICE = 'start: CHOICE\nCHOICE: "a" | "b"'
GBNF = 'root ::= "a" | "b"'


def grammar(kind: Any = ChatRequest, **fields: Any) -> Grammar | None:
    body = json.dumps({"model": "m", **BODIES[kind], **fields}).encode()
    request, ignored = read_known(body, kind)
    assert ignored == ()
    (spec,) = request.plan(tiny_text(), ABLE).specs
    made: Grammar | None = spec.grammar
    return made


def refused(kind: Any = ChatRequest, **fields: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        grammar(kind, **fields)
    return caught.value.message


@pytest.mark.parametrize("kind", list(BODIES))
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"guided_json": SCHEMA}, Grammar("json_schema", HELD, "guided_json")),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", HELD, "guided_json")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, Grammar("lark", CHOICE, "guided_choice")),
        ({"guided_grammar": GBNF}, Grammar("lark", GBNF, "guided_grammar")),
        ({"json_schema": SCHEMA}, Grammar("json_schema", HELD, "json_schema")),
        ({"json_schema": json.dumps(SCHEMA)}, Grammar("json_schema", HELD, "json_schema")),
        ({"regex": "a+"}, Grammar("regex", "a+", "regex")),
        ({"ebnf": GBNF}, Grammar("lark", GBNF, "ebnf")),
        ({"grammar": GBNF}, Grammar("lark", GBNF, "grammar")),
        ({"grammar": ""}, None),
        (dict.fromkeys(CONSTRAINTS), None),
    ],
)
def test_fields_of_other_servers_constrain_on_every_route(
    kind: Any, fields: dict[str, Any], expected: Grammar | None
) -> None:
    assert grammar(kind, **fields) == expected


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar("json_schema", '{"type":"object"}', "response_format")),
        ({"type": "json_object", "schema": SCHEMA}, Grammar("json_schema", HELD, "response_format.schema")),
        ({"type": "json_object", "value": SCHEMA}, Grammar("json_schema", HELD, "response_format.value")),
        ({"type": "json", "value": SCHEMA}, Grammar("json_schema", HELD, "response_format.value")),
        ({"type": "json_schema", "schema": SCHEMA}, Grammar("json_schema", HELD, "response_format.schema")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}, "schema": None},
            Grammar("json_schema", HELD, "response_format.json_schema"),
        ),
        ({"type": "regex", "pattern": "a+"}, Grammar("regex", "a+", "response_format.pattern")),
        ({"type": "regex", "value": "a+"}, Grammar("regex", "a+", "response_format.value")),
        ({"type": "grammar", "grammar": GBNF}, Grammar("lark", GBNF, "response_format.grammar")),
    ],
)
def test_response_formats_of_other_servers(kind: Any, form: dict[str, Any], expected: Grammar | None) -> None:
    assert grammar(kind, response_format=form) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_json": {}, "regex": "a"}, "regex: expected it without guided_json; leave one of them out"),
        (
            {"response_format": {"type": "json_object"}, "grammar": GBNF},
            "grammar: expected it without response_format; leave one of them out",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_regex": "a"},
            "guided_regex: expected it without structured_outputs; leave one of them out",
        ),
        ({"guided_json": {"not": {}}}, "guided_json: `not` is refused"),
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json.properties.a: `not` is refused"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"if": {}}}}},
         "response_format.json_schema.schema: `if` is refused"),
        ({"guided_choice": []}, "guided_choice: expected at least 1"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
         "structured_outputs.disable_any_whitespace: this model does not support it; expected false, got true"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
         "structured_outputs.whitespace_pattern: this model does not support it"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern: not supported here"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern: expected a value, got none; add it"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value: expected a regular expression"),
        ({"response_format": {"type": "text", "schema": {}}},
         'response_format.schema: expected it with the type "json_object" or "json_schema" or "json" only, got'),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected an object with a name"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    assert refused(**fields).startswith(message)


def test_responses_name_their_own_field() -> None:
    assert refused(ResponsesRequest, response_format={"type": "text"}).startswith(
        "response_format: not supported here: it would constrain the answer; send it as `text.format`"
    )
    form = {"type": "json_schema", "name": "n", "schema": {"properties": {"a": {"not": {}}}}}
    assert refused(ResponsesRequest, text={"format": form}).startswith("text.format.schema.properties.a: `not` is")


def test_neutral_options_beside_a_constraint_are_taken() -> None:
    fields = {"regex": "a", "disable_fallback": True, "disable_any_whitespace": False, "whitespace_pattern": None}
    assert grammar(structured_outputs=fields) == Grammar("regex", "a", "structured_outputs.regex")


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"}],
    "triggers": ["<function="],
}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": TAG}, "response_format"),
        ({"structural_tag": TAG}, "structural_tag"),
        ({"structural_tag": json.dumps(TAG)}, "structural_tag"),
        ({"structured_outputs": {"structural_tag": TAG}}, "structured_outputs.structural_tag"),
    ],
)
def test_structural_tags_are_one_grammar_under_every_name(fields: dict[str, Any], field: str) -> None:
    made = grammar(**fields)
    assert made is not None
    assert (made.kind, made.field) == ("lark", field)
    assert f"%json {HELD}" in made.text
