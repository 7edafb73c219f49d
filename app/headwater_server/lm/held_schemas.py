"""JSON schemas as pydantic, zod and MCP servers write them, in the form that the grammar engine can hold answers to.

Source: the JSON Schema specification (drafts 4 to 2020-12), and the keywords and formats that llguidance 1.9 refuses.
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeAlias

from headwater_server.codecs.faults import at, key_text, shown
from headwater_server.errors import BadRequest
from headwater_server.lm.grammar_depth import check_schema_depth, reference_target

__all__ = ["FORMATS", "MAX_OPTIONAL", "held_schema"]

MAX_OPTIONAL: Final = 500
"""Maximum number of optional properties of an object in a JSON schema: the engine's parser holds at most 2,500 items:
four for each optional property, and some for the schema around the object."""
FORMATS: Final = frozenset({
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
})  # fmt: skip
"""The formats of strings to which the engine can hold an answer. Any other format only annotates."""
_DRAFTS: Final = frozenset(
    f"http{secure}://json-schema.org/{draft}/schema"
    for secure, drafts in (("", ("draft-04", "draft-06", "draft-07")), ("s", ("draft/2019-09", "draft/2020-12")))
    for draft in drafts
)
"""The values of ``$schema`` that the engine knows, without a last ``#``."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords for an object of schemas by name."""
_WITHIN: Final = frozenset({
    "items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf",
})  # fmt: skip
"""Keywords for a schema, or for an array of schemas."""
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "contains": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "else": (),
    "if": (),
    "maxContains": (),
    "minContains": (),
    "not": (),
    "then": (),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
"""Keywords that the engine refuses, with the values that constrain nothing."""
_TYPES: Final = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_VALUES: Final = frozenset({"const", "default"})
"""Keywords for which null is a value."""
_UNHELD_PATTERN: Final = re.compile(r"\\.|\[\^?\]?(?:\\.?|[^\]\\])*\]?|\(\?(?:<?[=!]|>)", re.DOTALL)
"""A look-around or atomic group, or an escape or character class, which may contain the same characters."""
_MAX_PATH: Final = 400

_Place: TypeAlias = tuple["_Place", str] | str
"""A path in the request: the path of the outer part and the last step."""


def held_schema(schema: Any, path: str, fix: str = "leave it out") -> Any:
    """The schema without annotations that the engine refuses: formats that it can't hold, null for an absent keyword,
    and keywords with a value that constrains nothing. A branch of a ``oneOf`` with a ``discriminator`` requires the
    property that tells the branches apart.

    Args:
        schema: the schema, decoded.
        path: its path in the request.
        fix: what to do about a part that can't be held, as the end of a message.

    Raises:
        BadRequest: the schema has a part that no answer can be held to, is nested too deeply, or has an object with
            more than `MAX_OPTIONAL` optional properties; the message has the part's path.
    """
    check_schema_depth(schema, path)
    return _Walk(schema, fix).held(schema, path)


class _Walk:
    def __init__(self, root: Any, fix: str) -> None:
        self._root = root
        self._fix = fix

    def held(self, schema: Any, place: _Place) -> Any:
        if not isinstance(schema, dict):
            return schema
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            if value is None and key not in _VALUES:
                continue
            if key in _NAMED and isinstance(value, dict):
                inner = (place, f".{key}")
                kept[key] = {
                    name: self.held(part, (inner, f".{key_text(name)}")) for name, part in value.items()
                }  # fmt: skip
            elif key in _WITHIN:
                kept[key] = self._within(value, (place, f".{key}"))
            elif key in _NEUTRAL:
                if not any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL[key]):
                    raise self._unheld(place, f"`{key}`")
            elif key == "format":
                if isinstance(value, str) and value in FORMATS:
                    kept[key] = value
            elif key != "$schema" or (isinstance(value, str) and value.removesuffix("#") in _DRAFTS):
                self._check(key, value, place)
                kept[key] = value
        self._check_optional(kept, place)
        return _told_apart(kept) if "discriminator" in kept else kept

    def _within(self, value: Any, place: _Place) -> Any:
        if isinstance(value, list):
            return [self.held(part, (place, f"[{n}]")) for n, part in enumerate(value)]
        return self.held(value, place)

    def _check(self, key: str, value: Any, place: _Place) -> None:
        if key == "$ref" and isinstance(value, str):
            if value.startswith("#/") and reference_target(self._root, value) is value:
                raise self._unheld(place, f"a `$ref` to {shown(value)}, which isn't in the schema")
            if not value.startswith("#") and "$id" not in self._root:
                raise self._unheld(place, f"a `$ref` to {shown(value)}, which is outside of the schema")
        elif key == "pattern" and isinstance(value, str):
            if any(match[0].startswith("(") or match[0][1:].isdigit() for match in _UNHELD_PATTERN.finditer(value)):
                raise self._unheld(place, "a `pattern` with a look-around or a reference to a group")
        elif key == "type":
            for kind in value if isinstance(value, list) else [value]:
                if not isinstance(kind, str) or kind not in _TYPES:
                    raise self._unheld(place, f"the `type` {shown(kind)}, which JSON Schema doesn't have")

    def _check_optional(self, schema: dict[str, Any], place: _Place) -> None:
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL:
            needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
            optional = len(properties.keys() - needed)
            if optional > MAX_OPTIONAL:
                expected = f"expected objects with at most {MAX_OPTIONAL} optional properties, got {optional}"
                raise at(_path(place), None, f"{expected}; require more of them, or group them in objects")

    def _unheld(self, place: _Place, part: str) -> BadRequest:
        return at(_path(place), None, f"{part} is refused, since no answer can be held to it; {self._fix}")


def _told_apart(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose ``oneOf`` has branches that require the discriminator's property. pydantic doesn't require a
    property with a default, so that branches would overlap, which the engine refuses."""
    name = schema["discriminator"].get("propertyName") if isinstance(schema["discriminator"], dict) else None
    branches = schema.get("oneOf")
    if not isinstance(name, str) or not isinstance(branches, list):
        return schema
    told = []
    for branch in branches:
        required = branch.get("required", []) if isinstance(branch, dict) else None
        told.append({**branch, "required": [*required, name]} if isinstance(required, list) else branch)
    return {**schema, "oneOf": told}


def _path(place: _Place) -> str:
    steps: list[str] = []
    while isinstance(place, tuple):
        place, step = place
        steps.append(step)
    path = "".join([place, *reversed(steps)])
    return path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."
