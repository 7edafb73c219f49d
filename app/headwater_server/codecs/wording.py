"""Parses msgspec's error messages, and describes in words the values that its types accept.

Of other modules, only `headwater_server.codecs.faults` depends on msgspec's wording: it looks for "surrogate".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

__all__ = [
    "PARSE_ERRORS",
    "PATH_PART",
    "ParsedError",
    "bounds_at",
    "choices_at",
    "fields_at",
    "has_array_first",
    "has_float",
    "kind_of",
    "parsed",
    "structs_of",
]

PARSE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""All exceptions that msgspec raises for a client's input."""
PATH_PART: Final = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
"""A key or a subscript in a path."""
_KINDS: Final = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean",
    "array": "an array", "object": "an object", "null": "null",
}  # fmt: skip
_BOUNDED: Final = {
    "int": inspect.IntType, "float": inspect.FloatType, "str": inspect.StrType, "array": inspect.ListType,
}  # fmt: skip
_UNITS: Final = {"str": " characters", "array": " entries"}
_WORDING: Final = re.compile(
    r"Expected `(?P<expected>[^`]*)`(?:, got `(?P<got>[^`]*)`)?"
    r"|Expected `(?P<bounded>int|float|str|array)` (?:of length )?[<>]=? \S+"
    r"|Object contains unknown field `(?P<unknown>.*)`"
    r"|Object missing required field `(?P<missing>.*)`"
    r"|Invalid (?:enum )?value (?P<value>.*)",
    re.DOTALL,
)
_BYTE: Final = re.compile(r"\(byte (\d+)\)\Z")


def kind_of(name: str) -> str:
    """The words for a type, from msgspec's name of the type, such as ``int`` or ``float | null``. In a union, null is
    left out."""
    return " or ".join(_KINDS.get(part, part) for part in name.split(" | ") if part != "null" or name == "null")


class ParsedError(NamedTuple):
    """The parts of an error message of msgspec. Parts that the message doesn't have are empty or None."""

    text: str
    """The message without the path."""
    path: str
    """The value's path, such as ``.inputs[0].shape[1]``; ``[...]`` stands for a key of a dict."""
    expected: str = ""
    """msgspec's name of the expected type or types, such as ``float | null``."""
    got: str = ""
    """msgspec's name of the value's type; empty for a wrong tag of a struct."""
    unknown: str | None = None
    """A field that the object must not have."""
    missing: str | None = None
    """A required field that the object lacks."""
    value: str | None = None
    """A value that isn't among the choices."""
    bounded: str | None = None
    """msgspec's name of the type of a value that is out of bounds."""
    is_out_of_range: bool = False
    """Whether a number is beyond the range of its type."""
    byte: int | None = None
    """The offset at which the JSON is malformed."""
    is_followed: bool = False
    """Whether further characters follow valid JSON."""


def parsed(error: Exception) -> ParsedError:
    """Parse the message of an msgspec error."""
    text, separator, path = str(error).rpartition(" - at `$")
    text, path = (text, path[:-1]) if separator else (str(error), "")
    if wording := _WORDING.fullmatch(text):
        parts: dict[str, Any] = {name: part for name, part in wording.groupdict().items() if part is not None}
        return ParsedError(text, path, **parts)
    where = _BYTE.search(text)
    return ParsedError(
        text.removeprefix("JSON is malformed: "),
        path,
        is_out_of_range=text.endswith("out of range"),
        byte=int(where[1]) if where else None,
        is_followed="trailing characters" in text,
    )


def has_array_first(error: Exception) -> bool:
    """Whether the error is that an array's first element is an array, although the type allows no nesting. Faster than
    `parsed`."""
    return str(error).endswith("got `array` - at `$[0]`")


def has_float(error: Exception) -> bool:
    """Whether the error is a float in place of an integer. Faster than `parsed`."""
    return str(error).startswith("Expected `int`, got `float` - at ")


_type_info: Final[Callable[[Any], inspect.Type]] = functools.cache(inspect.type_info)


def _types_at(kind: Any, path: str) -> Sequence[inspect.Type]:
    """The types that ``kind`` accepts at a path."""
    alternatives = _alternatives(_type_info(kind))
    for part in PATH_PART.finditer(path):
        inner: list[inspect.Type] = []
        for alternative in alternatives:
            if part[1] is not None and isinstance(alternative, inspect.StructType):
                inner += [field.type for field in alternative.fields if field.encode_name == part[1]]
                if alternative.tag_field == part[1]:
                    inner.append(inspect.LiteralType((alternative.tag,)))
            elif part[1] is None and isinstance(alternative, inspect.ListType):
                inner.append(alternative.item_type)
            elif part[1] is None and isinstance(alternative, inspect.DictType):
                inner.append(alternative.value_type)
        alternatives = [alternative for kinds in inner for alternative in _alternatives(kinds)]
    return alternatives


def _alternatives(kind: inspect.Type) -> Sequence[inspect.Type]:
    if isinstance(kind, inspect.Metadata):
        return (kind, *_alternatives(kind.type))
    if isinstance(kind, inspect.UnionType):
        return [alternative for within in kind.types for alternative in _alternatives(within)]
    return (kind,)


def structs_of(kind: Any) -> list[inspect.StructType]:
    """The structs that a type accepts. ``kind`` is a type, or msgspec's description of a type."""
    info = kind if isinstance(kind, inspect.Type) else _type_info(kind)
    return [part for part in _alternatives(info) if isinstance(part, inspect.StructType)]


def bounds_at(kind: Any, path: str, name: str) -> str:
    """The bounds of the type at a path, in words; ``name`` is msgspec's name of the type."""
    alternatives = _types_at(kind, path)
    for alternative in alternatives:
        if (
            isinstance(alternative, inspect.Metadata)
            and isinstance(alternative.type, _BOUNDED[name])
            and alternative.extra
        ):
            return str(alternative.extra["expected"])
    bare: Any = next(alternative for alternative in alternatives if isinstance(alternative, _BOUNDED[name]))
    unit = _UNITS.get(name, "")
    low, high = (bare.min_length, bare.max_length) if unit else (bare.ge, bare.le)
    if low is None or high is None:
        return f"at least {low}{unit}" if high is None else f"at most {high}{unit}"
    return f"{low} to {high}{unit}" if unit else f"{_KINDS[name]} from {low} to {high}"


def choices_at(kind: Any, path: str) -> str:
    """The values that ``kind`` accepts at a path, in words."""
    literals = [literal for literal in _types_at(kind, path) if isinstance(literal, inspect.LiteralType)]
    return " or ".join(repr(value) for literal in literals for value in literal.values)


def fields_at(kind: Any, path: str) -> list[str]:
    """Names of the supported fields of the object at a path."""
    structs = [struct for struct in _types_at(kind, path) if isinstance(struct, inspect.StructType)]
    fields = [field for struct in structs for field in struct.fields]
    return [field.encode_name for field in fields if not isinstance(field.type, inspect.NoneType)]
