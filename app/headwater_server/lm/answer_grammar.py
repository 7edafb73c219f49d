"""The request fields for structured output, and their conversion into a grammar."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headwater.engine import MAX_GRAMMAR, EngineLimits, Grammar, GrammarKind
from headwater_server.codecs.faults import at, shown
from headwater_server.lm.grammar_depth import check_depth

__all__ = [
    "JsonSchemaFormat",
    "ResponseFormat",
    "Schema",
    "StructuredOutputs",
    "check_optional",
    "checked_grammar",
]

MAX_BEGINNINGS: Final = 9_000
"""Maximum number of different beginnings of labels: the engine's automaton has a state for each beginning, and at most
10,000 states."""
MAX_OPTIONAL: Final = 500
"""Maximum number of optional properties of an object in a JSON schema: the engine's parser holds at most 2,500 items:
four for each optional property, and some for the schema around the object."""
_ANY_OBJECT: Final = '{"type":"object"}'

Schema = Annotated[dict[str, Any], Meta(description="JSON Schema")]


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``response_format.json_schema``. The answer follows the schema, whether or not ``strict`` is set."""

    name: str
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> Grammar | None:
        """The answer's grammar; `None` if any text is allowed.

        Raises:
            BadRequest: `json_schema` is missing; its schema is too large, too deep, or has an object with too many
                optional properties; or it is given with another type than ``json_schema``.
        """
        path = "response_format.json_schema"
        if self.json_schema is not None and self.type != "json_schema":
            raise at(path, None, f'expected it with the type "json_schema" only, got {shown(self.type)}; leave it out')
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar("json_schema", _ANY_OBJECT, "response_format")
        if self.json_schema is None:
            raise at(path, None, 'expected an object with a name and a schema, got none; add it, or change "type"')
        return _schema_grammar(self.json_schema.schema or {}, path)


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``. Exactly one field must be given."""

    json: Annotated[Schema | str | None, Meta(description="JSON Schema, or its text")] = None
    regex: Annotated[str | None, Meta(description="The whole answer matches it")] = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: Annotated[str | None, Meta(description="Lark, or GBNF")] = None
    json_object: bool | None = None

    def grammar_of(self) -> Grammar:
        """The answer's grammar.

        Raises:
            BadRequest: not exactly one field is given (a false `json_object` doesn't count); or the field is too large
                or too deep, has an object with too many optional properties, or too many beginnings of labels.
        """
        fields = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(fields) != 1:
            expected = f"expected one of {', '.join(self.__struct_fields__)}"
            raise at("structured_outputs", None, f"{expected}, got {' and '.join(fields) or 'none'}")
        path = f"structured_outputs.{fields[0]}"
        if self.json is not None:
            return _schema_grammar(self.json, path)
        if self.regex is not None:
            return _grammar("regex", self.regex, path)
        if self.choice is not None:
            return _grammar("lark", _choice(self.choice, path), path)
        if self.grammar is not None:
            return _grammar("lark", self.grammar, path)
        return Grammar("json_schema", _ANY_OBJECT, path)


def checked_grammar(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None, limits: EngineLimits
) -> Grammar | None:
    """The grammar that a request asks for; `None` if any text is allowed.

    Raises:
        BadRequest: a field is wrong, both fields ask for a grammar, or the engine doesn't support this kind of grammar.
    """
    grammar = None if response_format is None else response_format.grammar()
    if structured_outputs is not None:
        if grammar is not None:
            raise at("structured_outputs", None, "expected it without response_format; leave one of them out")
        grammar = structured_outputs.grammar_of()
    if grammar is not None and grammar.kind not in limits.grammars:
        raise at(grammar.field, None, "this model does not support it; leave it out")
    return grammar


def check_optional(schema: object, path: str) -> None:
    """Refuse a schema with more than `MAX_OPTIONAL` optional properties in an object: the engine could not parse such
    an object to its end.

    Args:
        schema: the schema.
        path: the request's field.

    Raises:
        BadRequest: an object has more optional properties.
    """
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        elif isinstance(part, dict):
            stack += part.values()
            properties, required = part.get("properties"), part.get("required")
            if isinstance(properties, dict) and len(properties) > MAX_OPTIONAL:
                needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
                optional = len(properties.keys() - needed)
                if optional > MAX_OPTIONAL:
                    expected = f"expected objects with at most {MAX_OPTIONAL} optional properties, got {optional}"
                    raise at(path, None, f"{expected}; require more of them, or group them in objects")


def _schema_grammar(schema: dict[str, Any] | str, path: str) -> Grammar:
    """The grammar of a JSON schema, which is given decoded or as text."""
    grammar = _grammar("json_schema", schema if isinstance(schema, str) else _text(schema), path)
    if isinstance(schema, str):
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # the engine reports the error in the text
            check_optional(msgspec.json.decode(schema), path)
    else:
        check_optional(schema, path)
    return grammar


def _choice(labels: Sequence[str], path: str) -> str:
    """The text of a Lark grammar of these labels as a single terminal, since the engine can follow only about 200
    alternatives of a rule.

    Raises:
        BadRequest: the labels have more than `MAX_BEGINNINGS` different beginnings, counted in bytes of their JSON.
    """
    beginnings, before = 0, b""
    for label in sorted(_text(label).encode() for label in labels):
        beginnings += len(label) - sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, label, strict=False))
        )
        before = label
    if beginnings > MAX_BEGINNINGS:
        expected = f"expected labels with at most {MAX_BEGINNINGS} different beginnings"
        raise at(path, None, f"{expected} (the sum of their lengths, shared beginnings once), got {beginnings}")
    return f"start: CHOICE\nCHOICE: {' | '.join(map(_text, labels))}"


def _grammar(kind: GrammarKind, text: str, path: str) -> Grammar:
    if len(text) > MAX_GRAMMAR:
        raise at(path, None, f"expected at most {MAX_GRAMMAR} characters, got {len(text)}; shorten it")
    check_depth(kind, text, path)
    return Grammar(kind, text, path)


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
