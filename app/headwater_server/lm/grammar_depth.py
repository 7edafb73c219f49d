"""Limits the nesting depth of a client's grammar, because the library that compiles grammars is recursive.

All checks take time linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from headwater.engine import GrammarKind
from headwater_server.codecs.faults import at

__all__ = ["MOST_DEPTH", "check_depth", "check_schema_depth", "reference_target"]

MOST_DEPTH: Final = 256
"""Maximum nesting depth: of objects, arrays and references of a schema, or of parentheses and rules of a grammar."""
_END: Final = object()
_REGEX: Final = re.compile(r"\\.|\[\^?\]?(?:\\.?|[^\]\\])*\]?|[()]", re.DOTALL)
"""A parenthesis, or an escape or character class, which may contain the same character."""
_LARK: Final = re.compile(
    r'"(?:\\.?|[^"\\\n])*"?|(?://|#)[^\n]*|/(?:\\.?|[^/\\\n])*/?|%json\s*(?=\{)|[()\[\]{}]|[A-Za-z_][\w-]*|::=|:'
)
"""The tokens of Lark and GBNF that matter for the depth. An unterminated string or regular expression ends at the end
of its line."""


def check_depth(kind: GrammarKind, text: str, path: str) -> None:
    """Check the nesting depth of a grammar's text. An invalid text may pass: the library reports its error.

    Args:
        kind: see `Grammar.kind`.
        text: see `Grammar.text`.
        path: the path of the request's field.

    Raises:
        BadRequest: the nesting is deeper than `MOST_DEPTH`.
    """
    if len(text) <= MOST_DEPTH:
        return
    if kind == "json_schema":
        _check_json(text, len(text) - len(text.lstrip()), path)
    elif kind == "regex":
        depth = 0
        for match in _REGEX.finditer(text):
            depth += {"(": 1, ")": -1}.get(match[0], 0)
            _check(depth, "parentheses", path)
    else:
        _check_lark(text, path)


def check_schema_depth(schema: object, path: str) -> None:
    """Check the nesting depth of a JSON schema. Each part of the schema is visited once, as in the library, regardless
    of the number of references to it.

    Args:
        schema: the schema, decoded.
        path: the path of the request's field.

    Raises:
        BadRequest: the nesting is deeper than `MOST_DEPTH`.
    """
    visited: set[int] = set()
    stack = [iter([schema])]
    while stack:
        part = next(stack[-1], _END)
        if part is _END:
            stack.pop()
        elif isinstance(part, (dict, list)) and id(part) not in visited:
            visited.add(id(part))
            _check(len(stack), "objects, arrays and references", path)
            stack.append(_parts(schema, part))


def _check(depth: int, parts: str, path: str) -> None:
    if depth > MOST_DEPTH:
        raise at(path, None, f"expected at most {MOST_DEPTH} {parts} within each other, got more; flatten it")


def _check_json(text: str, begin: int, path: str) -> int:
    """Check the schema that starts at index `begin` of a text. Returns the index of its end, or `begin` if there is no
    valid JSON.

    Raises:
        BadRequest: the nesting is too deep.
    """
    try:
        schema, end = json.JSONDecoder().raw_decode(text, begin)
    except ValueError:
        return begin
    except RecursionError as error:
        raise at(path, None, f"expected at most {MOST_DEPTH} objects and arrays within each other, got more") from error
    check_schema_depth(schema, path)
    return end


def _check_lark(text: str, path: str) -> None:
    """Check a grammar in Lark or GBNF: its parentheses, its JSON schemas, and the references from rule to rule."""
    rules: dict[str, list[str]] = {}
    name = ""
    depth = begin = 0
    while (match := _LARK.search(text, begin)) is not None:
        word, begin = match[0], match.end()
        if word.startswith("%"):
            begin = _check_json(text, begin, path)
        elif word in ("(", "[", "{"):
            depth += 1
            _check(depth, "parentheses", path)
        elif word in (")", "]", "}"):
            depth -= 1
        elif word in (":", "::="):
            references = rules.get(name)
            name = references.pop() if references else ""
            rules[name] = []
            depth = 0
        elif word[0].isalpha() or word[0] == "_":
            rules.setdefault(name, []).append(word)
    visited: set[str] = set()
    for first in rules:
        stack = [iter([first])]
        while stack:
            rule = next(stack[-1], None)
            if rule is None:
                stack.pop()
            elif rule in rules and rule not in visited:
                visited.add(rule)
                _check(len(stack), "rules", path)
                stack.append(iter(rules[rule]))


def _parts(schema: object, part: dict[str, Any] | list[Any]) -> Iterator[Any]:
    """The direct children of a part of a schema, and the target of its reference."""
    if isinstance(part, dict):
        if isinstance(reference := part.get("$ref"), str):
            yield reference_target(schema, reference)
        yield from part.values()
    else:
        yield from part


def reference_target(schema: object, reference: str) -> object:
    """The target of a reference within the schema. Returns the reference itself if it leads elsewhere."""
    if not reference.startswith("#"):
        return reference
    place = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and key in place:
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and int(key[:9]) < len(place):
            place = place[int(key[:9])]
        else:
            return reference
    return place
