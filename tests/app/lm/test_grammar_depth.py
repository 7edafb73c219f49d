"""Bounds of grammars that the gateway checks itself."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from headwater.engine import MAX_GRAMMAR, GrammarKind
from headwater_server.errors import BadRequest
from headwater_server.lm.grammar_depth import MOST_DEPTH, check_depth, check_schema_depth


def chain(count: int) -> dict[str, Any]:
    """A schema of so many definitions, each of an array of the next one."""
    defs = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {}}}


def rules(count: int, definition: str = ":") -> str:
    lines = [f"start {definition} r0", *(f'r{n} {definition} "(" r{n + 1}' for n in range(count))]
    return "\n".join([*lines, f'r{count} {definition} "b"'])


@pytest.mark.parametrize(
    ("kind", "text_of", "most"),
    [
        ("json_schema", lambda n: json.dumps(chain(n)), MOST_DEPTH // 2 - 1),
        ("json_schema", lambda n: " " + '{"items":' * n + "{}" + "}" * n, MOST_DEPTH - 1),
        ("json_schema", lambda n: '{"anyOf":[' * n + "{}" + "]}" * n, MOST_DEPTH // 2 - 1),
        ("regex", lambda n: "(" * n + "a" + ")" * n, MOST_DEPTH),
        ("regex", lambda n: "(a|" * n + "b", MOST_DEPTH),
        ("lark", rules, MOST_DEPTH - 2),
        ("lark", lambda n: rules(n, "::="), MOST_DEPTH - 2),
        ("lark", lambda n: "start: " + "(" * n + '"a"' + ")" * n, MOST_DEPTH),
        ("lark", lambda n: f'start: "a" %json {json.dumps(chain(n))}', MOST_DEPTH // 2 - 1),
    ],
)
def test_depth_is_bounded(kind: GrammarKind, text_of: Callable[[int], str], most: int) -> None:
    check_depth(kind, text_of(most), "form")
    for count in (most + 1, 4 * most):
        with pytest.raises(BadRequest, match=f"^form: expected at most {MOST_DEPTH} .* within each other, got more"):
            check_depth(kind, text_of(count), "form")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"anyOf": [chain(3), {"enum": ["x" * 300]}]})),
        ("json_schema", json.dumps({"properties": {f"p{n}": {"$ref": "#"} for n in range(500)}})),
        ("json_schema", json.dumps({"$ref": "#/nowhere", "items": {"$ref": "http://a/b"}, "title": "x" * 300})),
        ("json_schema", "{" * 300),
        ("regex", r"\([(]()" * 300),
        ("regex", ")" * 300),
        ("lark", 'start: "(" /[(]/ // (\n' * 300),
        ("lark", 'a ::= ( [^"(] | "b" )*\n' * 300),
        ("lark", "start: " + " ".join(f"r{n}" for n in range(300)) + "\n" + "\n".join(f"r{n}: r0" for n in range(300))),
        ("lark", 'start: %json {"a": ' + "(" * 200),
    ],
)
def test_what_is_wide_recursive_or_unreadable_passes(kind: GrammarKind, text: str) -> None:
    check_depth(kind, text, "form")


def test_many_references_to_the_same_are_looked_at_once() -> None:
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    check_schema_depth({"$ref": "#/$defs/d0", "$defs": twice}, "form")


@pytest.mark.parametrize("text", ['"', '"\\', "/", "/\\", "[", "[\\", "(", "a:", "a ", "%json ", "%json {", "\\", "(?"])
@pytest.mark.parametrize("kind", ["json_schema", "regex", "lark"])
def test_hostile_texts_are_read_once(kind: GrammarKind, text: str) -> None:
    """In processor time: linear checks take some 0.05 s, quadratic ones well over 10 s."""
    began_s = time.process_time()
    with contextlib.suppress(BadRequest):
        check_depth(kind, (text * MAX_GRAMMAR)[:MAX_GRAMMAR], "form")
    assert time.process_time() - began_s < 3
