"""Random JSON schemas, and what an answer must be to follow one."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, TypeAlias

import jsonschema_rs
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

__all__ = ["is_valid", "random_schemas", "schemas"]

Schema: TypeAlias = dict[str, Any]
Schemas: TypeAlias = st.SearchStrategy[Schema]

_NAMES = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8) | st.sampled_from(
    ["naïve", "a b", 'q"uote', "über", "日本", "x-y", "$id2", "back\\slash", "new\nline"]
)
_VALUES = st.none() | st.booleans() | st.integers(-1000, 1000) | st.text(max_size=10)
_LEAP_SECOND = re.compile(r"(\d\d:\d\d):60(?=[zZ.+-])")
_PATTERNS = [
    "^[a-z]{2,5}$", r"^\d{3}-\d{4}$", "^(foo|bar){1,3}$", "[0-9]", r"^\w{1,9}@\w{1,9}\.(com|org)$", '^[^"]{1,4}$',
]  # fmt: skip
_FORMATS = ["date", "date-time", "time", "uuid", "email", "ipv4", "ipv6", "hostname"]
_PLAIN: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["integer", "boolean"]},
    {"type": ["string", "null"], "maxLength": 6},
]


def _bounded(schema: Schema, low: str, high: str, lows: st.SearchStrategy[int], apart: int = 0) -> Schemas:
    """The schema with either bound, both, or none."""
    bounds = st.tuples(lows, st.integers(apart, 100))
    return st.tuples(bounds, st.booleans(), st.booleans()).map(
        lambda drawn: {
            **schema,
            **({low: drawn[0][0]} if drawn[1] else {}),
            **({high: drawn[0][0] + drawn[0][1]} if drawn[2] else {}),
        }
    )


def _leaves() -> Schemas:
    numbers = st.integers(-50, 50)
    exclusive = ("exclusiveMinimum", "exclusiveMaximum")
    return st.one_of(
        _bounded({"type": "string"}, "minLength", "maxLength", st.integers(0, 8)),
        st.sampled_from(_PATTERNS).map(lambda pattern: {"type": "string", "pattern": pattern}),
        st.sampled_from(_FORMATS).map(lambda name: {"type": "string", "format": name}),
        _bounded({"type": "integer"}, "minimum", "maximum", numbers),
        _bounded({"type": "number"}, "minimum", "maximum", numbers),
        _bounded({"type": "integer"}, *exclusive, numbers, apart=2),
        _bounded({"type": "number"}, *exclusive, numbers, apart=2),
        st.integers(1, 12).map(lambda step: {"type": "integer", "multipleOf": step}),
        st.lists(_VALUES, min_size=1, max_size=5, unique_by=repr).map(lambda values: {"enum": values}),
        _VALUES.map(lambda value: {"const": value}),
        st.sampled_from(_PLAIN),
    )


def _objects(inner: Schemas) -> Schemas:
    def made(properties: dict[str, Schema], required: list[bool], others: bool | Schema) -> Schema:
        names = [name for name, is_required in zip(properties, required, strict=False) if is_required]
        return {
            "type": "object",
            "properties": properties,
            **({"required": names} if names else {}),
            "additionalProperties": others,
        }

    flags = st.lists(st.booleans(), min_size=5, max_size=5)
    return st.builds(made, st.dictionaries(_NAMES, inner, max_size=5), flags, st.just(False) | inner)


def _arrays(inner: Schemas) -> Schemas:
    tuples = st.lists(inner, min_size=1, max_size=3).map(
        lambda items: {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    )
    lists = inner.flatmap(
        lambda items: _bounded({"type": "array", "items": items}, "minItems", "maxItems", st.integers(0, 4))
    )
    return lists | tuples


def _lists(value: Schema) -> Schema:
    """A linked list of these values: a schema that refers to itself."""
    rest = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node = {
        "type": "object",
        "properties": {"value": value, "next": rest},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def schemas() -> Schemas:
    """Schemas of the keywords that most requests have, each of which has an instance."""
    nested = st.recursive(
        _leaves(),
        lambda inner: (
            _objects(inner)
            | _arrays(inner)
            | st.lists(inner, min_size=1, max_size=3).map(lambda choices: {"anyOf": choices})
        ),
        max_leaves=12,
    )
    return st.one_of(_objects(nested), nested, _leaves().map(_lists))


def random_schemas(count: int) -> list[str]:
    """The texts of as many different schemas, the same ones in every run."""
    found: dict[str, None] = {}

    @seed(1)
    @settings(
        max_examples=2 * count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(schemas())
    def collect(schema: Schema) -> None:
        found[json.dumps(schema)] = None

    collect()
    texts = list(found)[:count]
    if len(texts) < count:
        raise RuntimeError(f"expected {count} schemas, got {len(texts)}")
    return texts


def is_valid(schema: str, answer: str) -> bool:
    """Whether an answer is JSON that follows the schema, formats included.

    Numbers are taken exactly, not rounded. Any minute may have a leap second, as in RFC 3339's syntax; the validator
    knows which had one.
    """
    try:
        value = json.loads(_LEAP_SECOND.sub(r"\1:59", answer), parse_float=Decimal)
    except ValueError:
        return False
    return jsonschema_rs.validator_for(json.loads(schema), validate_formats=True).is_valid(value)
