"""Gives arguments that a model writes as raw text the types of their tool's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import orjson

from headwater_server.lm.text.python_literals import NUMBER, json_string, python_value

__all__ = ["loaded", "property_schema", "repaired", "typed"]

_REPAIRED: Final = re.compile(r'\\.|"|[\x00-\x1f]', re.DOTALL)
"""An escape, a quote, or a control character."""
_ALL: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_MAX_SCHEMAS: Final = 64
"""Maximum number of schemas that are looked at for the types of an argument."""
_FIRST: Final = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def repaired(text: str) -> str:
    """JSON text with the control characters in its strings escaped, which JSON demands and models forget."""
    is_string = False

    def replace(match: re.Match[str]) -> str:
        nonlocal is_string
        mark = match[0]
        if mark == '"':
            is_string = not is_string
        return f"\\u{ord(mark):04x}" if is_string and mark < " " else mark

    return _REPAIRED.sub(replace, text)


def loaded(text: str) -> Any:
    """The value of JSON text. Where it has numbers beyond those of a double, all numbers become strings.

    Raises:
        ValueError: the text is no JSON, or isn't valid Unicode.
    """
    try:
        return orjson.loads(text)
    except ValueError:
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False).encode()  # fails for half a surrogate pair
        return value


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"expected JSON, got {word}")


def property_schema(parameters: Mapping[str, Any], name: str) -> object:
    """The schema of a property of an object with this schema; an empty schema if there is none."""
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return parameters.get("additionalProperties", {})


def typed(text: str, schema: object, root: Mapping[str, Any]) -> str:
    """An argument as JSON text. A string keeps its text; numbers keep their digits.

    Args:
        text: the argument as the model wrote it.
        schema: the argument's JSON schema.
        root: the schema that contains `schema`, for references.
    """
    types = _types(schema, root) or _ALL
    if types == {"string"}:
        return json_string(text)
    value = _value(text.strip())
    if value is not None:
        kind = "number" if value[0] in "-0123456789" else _FIRST[value[0]]
        if kind != "string" and (kind in types or (kind == "number" and "integer" in types)):
            return value
        if kind == "string" and "string" not in types:
            return value
    return json_string(text)


def _value(text: str) -> str | None:
    """The text as JSON, if it is JSON or a literal of Python."""
    if NUMBER.fullmatch(text):
        return text
    for candidate in (text, repaired(text)):
        try:
            loaded(candidate)
        except (ValueError, RecursionError):
            continue
        return candidate
    try:
        value = python_value(text)
        loaded(value)
    except (ValueError, RecursionError):  # NotLiteral is a ValueError
        return None
    return value


def _types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it allows all."""
    types, seen, queue = set[str](), 0, [schema]
    while queue and seen < _MAX_SCHEMAS:
        seen += 1
        each = queue.pop()
        if not isinstance(each, Mapping):
            continue
        kind = each.get("type")
        types.update([kind] if isinstance(kind, str) else kind if isinstance(kind, list) else ())
        if kind is None:
            values = each["enum"] if isinstance(each.get("enum"), list) else [each["const"]] if "const" in each else []
            types.update(_type_of(value) for value in values)
            queue += [part for key in ("anyOf", "oneOf", "allOf") for part in _list(each.get(key))]
            queue.append(_referenced(each.get("$ref"), root))
    return frozenset(types) & _ALL


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _referenced(reference: object, root: Mapping[str, Any]) -> object:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    schema: Any = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    kinds = {str: "string", dict: "object", list: "array"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "null")
