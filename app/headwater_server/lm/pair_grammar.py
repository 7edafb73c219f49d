"""Rules of Lark for arguments that a model writes one by one, each between tags, instead of as a JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from headwater_server.lm.lark import marked, quoted

__all__ = ["can_hold_pairs", "pair_rules"]

_KEY: Final = re.compile(r'[^<>"=\n]{1,256}')
_COMBINED: Final = (
    "$ref", "allOf", "anyOf", "oneOf", "not", "if", "enum", "const", "patternProperties", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "minProperties", "maxProperties",
)  # fmt: skip
"""Keywords that relate an object's properties to each other."""
_SLASH: Final = re.compile(r"\\.|/", re.DOTALL)
"""A slash, or an escape, which may contain it."""
_ANY: Final = "(?s:.*)"
_DEFINITIONS: Final = ("$defs", "definitions")


def can_hold_pairs(schema: Mapping[str, Any]) -> bool:
    """Whether `pair_rules` can hold arguments to the schema of a function's parameters: each property for itself."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        not any(keyword in schema for keyword in _COMBINED)
        and isinstance(properties, dict)
        and isinstance(required, list)
        and all(name in properties for name in required)
        and all(_KEY.fullmatch(name) and isinstance(part, dict | bool) for name, part in properties.items())
    )


def pair_rules(
    name: str,
    schema: Mapping[str, Any],
    pair: Callable[[str, bool], tuple[str, str, str]],
    token_id: Callable[[str], int | None],
) -> list[str]:
    """The rules of an object's properties in the schema's order; optional properties may be left out.

    Args:
        name: the name of the first rule.
        schema: the object's schema, of which `can_hold_pairs` is true.
        pair: returns for a key, and whether its value is a string that is written as it is: the Lark of what stands
            before the value, the text of the tag after the value, and the Lark of the rest.
        token_id: returns the id of an added token; `None` for any other text.
    """
    required = schema.get("required", [])
    parts: list[str] = []
    rules: list[str] = []
    for n, (key, part) in enumerate(schema.get("properties", {}).items()):
        value, rule = f"{name}_{n}", part if isinstance(part, dict) else {}
        resolved = _resolved(rule, schema)
        is_text = _is_text(resolved)
        before, end, rest = pair(key, is_text)
        body = f"{before} {value} {rest}".strip()
        parts.append(body if key in required else f"({body})?")
        if not is_text:
            definitions = {word: schema[word] for word in _DEFINITIONS if word in schema}
            json = msgspec.json.encode({**definitions, **rule}).decode()
            rules += [f"{value}: {value}_j {marked(end, token_id)}", f"{value}_j: %json {json}"]
        elif (labels := _labels(resolved)) is not None:
            rules.append(f"{value}: ({' | '.join(map(quoted, labels))}) {marked(end, token_id)}")
        else:
            rules += _text_rules(value, _expression(resolved), marked(end, token_id))
    return [f"{name}: {' '.join(parts) or quoted('')}", *rules]


def _text_rules(value: str, expression: str, end: str) -> list[str]:
    """The rules of a text up to the Lark of the tag that ends it. Literals end the text where they first occur; tokens
    don't occur in a text."""
    literal, token, _ = end.partition("<[")
    literal = literal.strip()
    if not literal:
        return [f"{value}: {value}_t {end}", f"{value}_t: /{expression}/"]
    text = f"{value}_t[suffix={literal}]: /{expression}/"
    more = "+" if token and expression == _ANY else ""  # the text may contain the literal without the token
    return [f"{value}: {value}_t{more} {end.removeprefix(literal)}".rstrip(), text]


def _resolved(part: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema without its reference to a definition, and without the alternative null."""
    for _ in range(8):
        reference = part.get("$ref")
        choices = part.get("anyOf") or part.get("oneOf")
        if isinstance(reference, str):
            place, _, name = reference.removeprefix("#/").partition("/")
            target = schema.get(place, {}).get(name) if place in _DEFINITIONS else None
        elif isinstance(choices, list):
            others = [choice for choice in choices if choice != {"type": "null"}]
            target = others[0] if len(others) == 1 else None
        else:
            return part
        if not isinstance(target, dict):
            return part
        part = target
    return part


def _is_text(part: Mapping[str, Any]) -> bool:
    """Whether a value may be a string. Where other types are possible, too, the reader of calls tells by the text."""
    kind = part.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None:
        return "string" in kinds
    labels = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(labels, list):
        return all(isinstance(label, str) for label in labels)
    choices = part.get("anyOf") or part.get("oneOf")
    if isinstance(choices, list):
        return any(not isinstance(choice, dict) or _is_text(choice) for choice in choices)
    return "$ref" not in part and "properties" not in part and "items" not in part


def _labels(part: Mapping[str, Any]) -> list[str] | None:
    """The strings that a value may be; `None` if it may be any."""
    labels = [part["const"]] if "const" in part else part.get("enum")
    if not isinstance(labels, list) or not labels:
        return None
    return [label for label in labels if isinstance(label, str)] or None


def _expression(part: Mapping[str, Any]) -> str:
    """The regular expression of a string. A pattern comes before bounds of the length."""
    pattern = part.get("pattern")
    if isinstance(pattern, str):
        begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[begin : len(pattern) - end]
        inner = _SLASH.sub(lambda match: r"\/" if match[0] == "/" else match[0], inner).replace("\n", r"\n")
        return f"{'' if begin else _ANY}(?:{inner}){'' if end else _ANY}"
    least, most = part.get("minLength"), part.get("maxLength")
    if not isinstance(least, int) and not isinstance(most, int):
        return _ANY
    return f"(?s:.{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}})"
