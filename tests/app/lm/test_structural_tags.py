"""Structural tags, compiled by the engine's own compiler, and what is refused of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from headwater.lm.grammar_source import compiled, special_texts
from headwater_server.errors import BadRequest
from headwater_server.lm.structural_tags import structural_lark
from tests.app.lm.scripted import FOLDER

pytestmark = pytest.mark.heavy
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TAG: dict[str, Any] = {
    "structures": [
        {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "boolean"}, "end": "</function>"},
        {"begin": "[[", "end": "]]"},
    ],
    "triggers": ["<function=", "[["],
}


@pytest.mark.parametrize(
    ("text", "is_begun", "is_whole"),
    [
        ("", True, True),
        ("plain\ntext é", True, True),
        ('so: <function=f>{"a":1}</function> and\n<function=g>true</function>.', True, True),
        ("<func", True, True),
        ("<function=", True, False),
        ("<function=h", False, False),
        ('<function=g>{"a":1}', False, False),
        ('<function=f>{"b":1}', False, False),
        ("x [[[1, 2]]] y", True, True),
        ("x [[nothing", False, False),
    ],
)
def test_each_trigger_begins_a_structure(text: str, is_begun: bool, is_whole: bool) -> None:
    file = FOLDER / "tokenizer.json"
    tokenizer = LLTokenizer(file.read_text(), 4100, [0, 2])
    matcher, _ = compiled(tokenizer, special_texts(tokenizer), "lark", structural_lark(TAG, "form"))
    ids = Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    begun = matcher.try_consume_tokens(ids) == len(ids)
    assert (begun, begun and matcher.is_accepting()) == (is_begun, is_whole)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("{", "form: expected JSON, got"),
        ({"format": {"type": "any_text"}}, "form.format: not supported here; send `structures` and `triggers`"),
        ({}, "form.structures: expected at least one structure, got none"),
        ({"structures": [{}]}, "form.structures[0].begin: expected this field"),
        (
            {"structures": [{"begin": "<a>"}], "triggers": ["<b"]},
            "form.structures[0].begin: expected a text that starts",
        ),
        ({"structures": [{"begin": "<a>"}], "triggers": [""]}, "form.structures[0].begin: expected a text that starts"),
        ({**TAG, "triggers": [*TAG["triggers"], "<x"]}, "form.triggers[2]: expected a structure that begins with it"),
        (
            {"structures": [{"begin": "<a>", "schema": {"not": {}}}], "triggers": ["<a"]},
            "form.structures[0].schema: `not` is refused",
        ),
        ({"structures": [{"begin": "<a>", "schema": True}], "triggers": ["<a"]}, "form.structures[0].schema: expected"),
    ],
)
def test_what_is_wrong_is_named(tag: Any, message: str) -> None:
    for form in [tag] if isinstance(tag, str) else [tag, json.dumps(tag)]:
        with pytest.raises(BadRequest) as caught:
            structural_lark(form, "form")
        assert caught.value.message.startswith(message)
