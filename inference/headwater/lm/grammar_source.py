"""Translates grammars for llguidance, and compiles them.

``json_schema`` is JSON Schema as llguidance supports it (docs/json_schema.md in its repository), without its leniency:
a schema with unsupported parts is refused. ``regex`` is a regular expression in the syntax of Rust's crate `regex`,
which the whole answer must match. ``lark`` is llguidance's dialect of Lark, or GBNF.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["compiled", "short_reason", "special_texts"]

MOST_MULTIPLE: Final = 10_000
"""Limit of the common multiple of a schema's `multipleOf` numbers: the library's automaton has as many states."""
_INWARDS: Final = {
    "minimum": math.inf, "exclusiveMinimum": math.inf, "maximum": -math.inf, "exclusiveMaximum": -math.inf,
}  # fmt: skip
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LARGEST: Final = 2**63 - 1
"""The library reads a bound of exactly this value correctly, although a double can't hold it."""
_HUGE: Final = 2**1023
_JSON_OPTIONS: Final[JsonCompileOptions] = {"lenient": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
"""Refuse schemas with unsupported parts, and bound the white space between elements, because weak models would write
white space without end."""

_LIMITS: Final = LLParserLimits(
    # See `headwater_server.lm.held_schemas.MAX_OPTIONAL`; the time for an ambiguous grammar is quadratic in this
    # limit.
    max_items_in_row=2500,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
_NOT_FORCING: Final = {"name": "not_forcing", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}
"""An unused grammar: its option applies to the grammars listed beside it. See `_unforced`."""
_ESCAPED: Final = re.compile(r"\\u((?!d[89a-f])[0-9a-f]{4})", re.IGNORECASE)
_JSON: Final = re.compile(r'"(?:\\.?|[^"\\\n])*"?|/(?:\\.?|[^/\\\n])+/?|(?://|#).*|%json\s*(?=\{)')
"""The beginning of a JSON schema in Lark, or a part that may contain the same characters: a string, expression or
comment. An unterminated string or expression ends with its line, so that a search takes linear time; the library
refuses such a grammar."""


def compiled(
    tokenizer: LLTokenizer, special: Sequence[str], kind: str, text: str, before: str = ""
) -> tuple[LLMatcher, bytes]:
    """Compile a grammar, and compute which tokens an answer may begin with.

    Args:
        tokenizer: the model's tokenizer.
        special: the texts of the tokenizer's special tokens.
        kind: `headwater.engine.Grammar.kind`.
        text: `headwater.engine.Grammar.text`.
        before: `headwater.engine.Grammar.before`.

    Returns:
        The grammar's state at the beginning of an answer, and the mask, a bit for each token of the vocabulary.

    Raises:
        ValueError: the grammar is wrong, unsupported or too complex.
    """
    try:
        source = _source(kind, text)
        if before:
            source = _after(before, source)
        if _writes_special(text, special):
            source = _unforced(source)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()  # finds errors that only use shows
        error = matcher.get_error()
    except MemoryError:
        raise
    except BaseException as failure:  # the library's panics are BaseExceptions
        error = str(failure) or type(failure).__name__
    if error:
        raise ValueError(short_reason(error))
    return matcher, mask


def special_texts(tokenizer: LLTokenizer) -> list[str]:
    """The texts of a tokenizer's special tokens."""
    ids = [id for id in range(tokenizer.vocab_size) if tokenizer.is_special_token(id)]
    return [text for id in ids if (text := tokenizer.decode_str([id]))]


def short_reason(error: str) -> str:
    """The library's error message without the parts that are for its developers, cut to 400 characters."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:400]


def _writes_special(text: str, special: Sequence[str]) -> bool:
    """Whether a grammar of this text may spell out a special token, perhaps in escaped characters."""
    plain = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text).replace("\\", "")
    return any(token in plain for token in special)


def _source(kind: str, text: str) -> str:
    """The grammar in the library's format."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "json_schema":
        schema = json.loads(text)
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError("expected an object")
        _check_multiples(schema)
        schema = _with_exact_numbers(schema)
        return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
    if text.lstrip().startswith("{"):
        raise ValueError("expected a grammar in Lark or GBNF, got JSON")
    return grammar_from("grammar", "".join(_with_options(text)))


def _unforced(source: str) -> str:
    """The grammar with an option that lets the model choose the tokens of a text that has no alternative.

    Without the option the library would tokenize such a text, read characters that spell a special token as that token,
    and then refuse the token because it stands for no text.
    """
    return json.dumps({"grammars": [*_grammars(source), _NOT_FORCING]})


def _after(before: str, source: str) -> str:
    """The grammar `before`, in which ``@answer`` stands for the grammar `source`."""
    first, *others = _grammars(source)
    return json.dumps({"grammars": [{"lark_grammar": before}, {**first, "name": "answer"}, *others]})


def _grammars(source: str) -> list[dict[str, Any]]:
    """The list of grammars of which `_source` consists."""
    grammars: list[dict[str, Any]] = json.loads(source)["grammars"] if source.startswith("{") else []
    return grammars or [{"lark_grammar": source}]


def _with_options(lark: str) -> Iterator[str]:
    """The parts of a Lark grammar, with `_JSON_OPTIONS` in its JSON schemas."""
    begin = 0
    while (match := _JSON.search(lark, begin)) is not None:
        end = match.end()
        yield lark[begin:end]
        if match[0].startswith("%"):
            schema, end = json.JSONDecoder().raw_decode(lark, end)
            _check_multiples(schema)
            yield json.dumps({**_with_exact_numbers(schema), "x-guidance": _JSON_OPTIONS})
        begin = end
    yield lark[begin:]


def _check_multiples(schema: dict[str, Any]) -> None:
    """Refuse a schema with too large an automaton.

    Raises:
        ValueError: the common multiple of its `multipleOf` numbers exceeds `MOST_MULTIPLE`.
    """
    steps = [Fraction(str(number)) for number in _multiples(schema)]
    scale = math.lcm(*[step.denominator for step in steps])
    if math.lcm(*[int(step * scale) for step in steps]) > MOST_MULTIPLE:
        raise ValueError(f"multipleOf: expected numbers with a common multiple of at most {MOST_MULTIPLE} steps")


def _multiples(schema: object) -> Iterator[Any]:
    if isinstance(schema, dict):
        if isinstance(multiple := schema.get("multipleOf"), (int, float)):
            yield multiple
        for value in schema.values():
            yield from _multiples(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _multiples(value)


def _with_exact_numbers(schema: Any) -> Any:
    """A schema, or a part of a schema, with bounds that doubles hold exactly, because the library reads bounds as
    doubles. Other integer bounds are moved inwards to the next double.

    Raises:
        ValueError: a constant is an integer that a double can't hold exactly.
    """
    if isinstance(schema, list):
        return [_with_exact_numbers(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    exact_schema: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):  # its keys are names, not keywords
            exact_schema[key] = {name: _with_exact_numbers(part) for name, part in value.items()}
            continue
        if key in ("const", "enum") and (wrong := next(_inexact(value), None)) is not None:
            raise ValueError(f"{key}: expected integers that doubles hold exactly, got {wrong}; write it as a string")
        inwards = _INWARDS.get(key)
        if inwards is not None and next(_inexact(value), _LARGEST) != _LARGEST:
            exact_schema[key] = _inner_double(value, inwards)
        else:
            exact_schema[key] = _with_exact_numbers(value)
    return exact_schema


def _inexact(value: object) -> Iterator[int]:
    """The integers in a value that a double can't hold exactly."""
    if isinstance(value, int) and int(_double(value)) != value:
        yield value
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _inexact(part)


def _inner_double(bound: int, inwards: float) -> int:
    nearest = _double(bound)
    return int(nearest if (nearest < bound) == (inwards < 0) else math.nextafter(nearest, inwards))


def _double(value: int) -> float:
    return float(max(-_HUGE, min(value, _HUGE)))
