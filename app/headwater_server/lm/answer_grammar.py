"""The request fields that constrain an answer, and their conversion into a grammar.

Source: OpenAI's ``response_format``; vLLM's ``structured_outputs`` and its former ``guided_...`` fields; the fields and
formats of SGLang, llama.cpp, text-generation-inference, Fireworks and Together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from headwater.engine import MAX_GRAMMAR, EngineLimits, Grammar, GrammarKind
from headwater_server.codecs.faults import at, shown
from headwater_server.lm.grammar_depth import check_depth
from headwater_server.lm.held_schemas import held_schema
from headwater_server.lm.structural_tags import structural_lark

__all__ = [
    "CONSTRAINTS",
    "FORMAT_FIELDS",
    "JsonSchemaFormat",
    "ResponseFormat",
    "Schema",
    "SchemaOrText",
    "StructuredOutputs",
    "checked_grammar",
]

MAX_BEGINNINGS: Final = 9_000
"""Maximum number of different beginnings of labels: the engine's automaton has a state for each beginning, and at most
10,000 states."""
_ANY_OBJECT: Final = '{"type":"object"}'
CONSTRAINTS: Final = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "regex": "regex", "ebnf": "grammar", "grammar": "grammar",
    "structural_tag": "structural_tag",
}  # fmt: skip
"""Fields of other servers that constrain the answer: the field of `StructuredOutputs` with the same meaning."""
FORMAT_FIELDS: Final[dict[str, dict[str, str]]] = {
    "text": {},
    "json_object": {"schema": "json", "value": "json"},
    "json_schema": {"json_schema": "", "schema": "json"},
    "json": {"value": "json", "schema": "json"},
    "regex": {"pattern": "regex", "value": "regex"},
    "grammar": {"grammar": "grammar"},
    "structural_tag": {"structures": "", "triggers": "", "format": ""},
}
"""The types of ``response_format``, and the further fields of each: the field of `StructuredOutputs` with the same
meaning; empty if there is none."""

Schema = Annotated[dict[str, Any], Meta(description="JSON Schema")]
SchemaOrText = Annotated[Schema | str | None, Meta(description="JSON Schema, or its text")]


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``response_format.json_schema``. The answer follows the schema, whether or not ``strict`` is set."""

    name: str
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's ``response_format``, and the types and fields that other servers have for it."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "grammar", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: SchemaOrText = None
    value: Annotated[Schema | str | None, Meta(description="A JSON Schema or a regular expression")] = None
    pattern: Annotated[str | None, Meta(description="A regular expression")] = None
    grammar: Annotated[str | None, Meta(description="Lark, or GBNF")] = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    def grammar_of(self) -> Grammar | None:
        """The answer's grammar; `None` if any text is allowed.

        Raises:
            BadRequest: the type's field is missing, too large, too deep or of another type, or has a schema that can't
                be held (see `held_schema`); or there is a field of another type.
        """
        fields = {name: getattr(self, name) for name in self.__struct_fields__[1:] if getattr(self, name) is not None}
        kinds = FORMAT_FIELDS[self.type]
        for name in fields:
            if name not in kinds:
                types = " or ".join(f'"{kind}"' for kind, names in FORMAT_FIELDS.items() if name in names)
                expected = f"expected it with the type {types} only, got {shown(self.type)}; leave it out"
                raise at(f"response_format.{name}", None, expected)
        if self.type == "text":
            return None
        if self.type == "structural_tag":
            return _constraint("structural_tag", fields, "response_format")
        if self.json_schema is not None:
            path = "response_format.json_schema"
            return _schema_grammar(self.json_schema.schema or {}, path, f"{path}.schema")
        if not fields:
            if self.type == "json_object":
                return Grammar("json_schema", _ANY_OBJECT, "response_format")
            expected = "an object with a name and a schema" if self.type == "json_schema" else "a value"
            path = f"response_format.{next(iter(kinds))}"
            raise at(path, None, f'expected {expected}, got none; add it, or change "type"')
        name, value = next(iter(fields.items()))
        return _constraint(kinds[name], value, f"response_format.{name}")


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``structured_outputs``. Exactly one of the fields that constrain must be given."""

    json: SchemaOrText = None
    regex: Annotated[str | None, Meta(description="The whole answer matches it")] = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: Annotated[str | None, Meta(description="Lark, or GBNF")] = None
    json_object: bool | None = None
    structural_tag: Annotated[dict[str, Any] | str | None, Meta(description="Structures and triggers")] = None
    disable_fallback: Annotated[bool | None, Meta(description="Without effect: there is no fallback")] = None
    disable_any_whitespace: Annotated[bool | None, Meta(description="Only false is supported")] = None
    disable_additional_properties: Annotated[bool | None, Meta(description="Only false is supported")] = None
    whitespace_pattern: None = None

    def grammar_of(self) -> Grammar:
        """The answer's grammar.

        Raises:
            BadRequest: not exactly one field is given (a false `json_object` doesn't count); or the field is too large
                or too deep, has a schema that can't be held (see `held_schema`), or too many beginnings of labels.
        """
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if getattr(self, name):
                raise at(f"structured_outputs.{name}", None, "this model does not support it; expected false, got true")
        names = self.__struct_fields__[:6]
        fields = [name for name in names if getattr(self, name) not in (None, False)]
        if len(fields) != 1:
            expected = f"expected one of {', '.join(names)}"
            raise at("structured_outputs", None, f"{expected}, got {' and '.join(fields) or 'none'}")
        return _constraint(fields[0], getattr(self, fields[0]), f"structured_outputs.{fields[0]}")


def checked_grammar(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    limits: EngineLimits,
    others: Mapping[str, Any] | None = None,
) -> Grammar | None:
    """The grammar that a request asks for; `None` if any text is allowed.

    Args:
        response_format, structured_outputs: the request's fields.
        limits: the engine's limits.
        others: the request's fields of `CONSTRAINTS` that are set.

    Raises:
        BadRequest: a field is wrong, several fields ask for a grammar, or the engine doesn't support this kind of
            grammar.
    """
    grammars: dict[str, Grammar] = {}
    if response_format is not None and (grammar := response_format.grammar_of()) is not None:
        grammars["response_format"] = grammar
    if structured_outputs is not None:
        grammars["structured_outputs"] = structured_outputs.grammar_of()
    for name, value in (others or {}).items():
        grammars[name] = _constraint(CONSTRAINTS[name], value, name)
    if len(grammars) > 1:
        first, second = list(grammars)[:2]
        raise at(second, None, f"expected it without {first}; leave one of them out")
    for grammar in grammars.values():
        if grammar.kind not in limits.grammars:
            raise at(grammar.field, None, "this model does not support it; leave it out")
        return grammar
    return None


def _constraint(kind: str, value: Any, path: str) -> Grammar:
    """The grammar of a field of `StructuredOutputs`.

    Args:
        kind: the field.
        value: its value.
        path: its path in the request.
    """
    if kind == "json":
        return _schema_grammar(value, path, path)
    if kind == "regex":
        if not isinstance(value, str):
            raise at(path, None, f"expected a regular expression, got {shown(value)}")
        return _grammar("regex", value, path)
    if kind == "choice":
        return _grammar("lark", _choice(value, path), path)
    if kind == "grammar":
        return _grammar("lark", value, path)
    if kind == "structural_tag":
        return _grammar("lark", structural_lark(value, path), path)
    return Grammar("json_schema", _ANY_OBJECT, path)


def _schema_grammar(schema: dict[str, Any] | str, field: str, path: str) -> Grammar:
    """The grammar of a JSON schema, which is given decoded or as text. ``field`` is the grammar's field, ``path`` the
    schema's."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):  # the engine reports the error in the text
            return _grammar("json_schema", str(schema), field)
    text = json.dumps(held_schema(schema, path), ensure_ascii=False, separators=(",", ":"))
    _check_length(text, field)
    return Grammar("json_schema", text, field)


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
    _check_length(text, path)
    check_depth(kind, text, path)
    return Grammar(kind, text, path)


def _check_length(text: str, path: str) -> None:
    if len(text) > MAX_GRAMMAR:
        raise at(path, None, f"expected at most {MAX_GRAMMAR} characters, got {len(text)}; shorten it")


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()
