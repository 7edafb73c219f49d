"""Answers in a given form: compiles grammars, and computes which tokens may follow, with llguidance.

``json_schema`` is JSON Schema as llguidance has it (docs/json_schema.md there), without its leniency: what it can't
follow is refused. ``regex`` is a regular expression of Rust's crate `regex` for the whole answer. ``lark`` is
llguidance's dialect of Lark, or GBNF.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from torch import Tensor

from inference.engine import Grammar, GrammarKind, SequenceRequest
from inference.errors import ReplicaError
from inference.lm.sampling import Allowed
from inference.runtime.failure_log import text_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["KINDS", "Constraint", "Grammars", "Masks", "refusal"]

KINDS: Final = frozenset[GrammarKind]({"json_schema", "regex", "lark"})
CACHED: Final = 64
"""How many compiled grammars are kept."""
MOST_COMPILING: Final = 256
"""How many grammars may wait to be compiled, or be compiled."""
MOST_MULTIPLE: Final = 10_000
"""The greatest common multiple of a schema's `multipleOf`: the library's automaton has as many states."""
MASK_THREADS: Final = 4
_INWARDS: Final = {
    "minimum": math.inf, "exclusiveMinimum": math.inf, "maximum": -math.inf, "exclusiveMaximum": -math.inf,
}  # fmt: skip
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_LARGEST: Final = 2**63 - 1
"""As a bound the library takes it for what it is, although no double holds it."""
_HUGE: Final = 2**1023
_JSON_OPTIONS: Final[JsonCompileOptions] = {"lenient": False, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}
"""Refuse what can't be followed, and bound the space between elements, because weak models write nothing else."""

_SCHEMA_LIMITS: Final[dict[str, Any]] = {"max_items_in_row": 1000, "step_max_items": 20_000}
_LARK_LIMITS: Final[dict[str, Any]] = {"max_items_in_row": 200, "step_max_items": 5000}
"""An ambiguous grammar takes time quadratic in these."""
_LIMITS: Final[dict[str, Any]] = {"max_lexer_states": 10_000, "max_grammar_size": 100_000, "verbose_errors": False}
_EXPECTED: Final = {"json_schema": "a JSON schema", "regex": "a regular expression", "lark": "a grammar"}
_NOT_FORCING: Final = {"name": "not_forcing", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: ""'}
"""A grammar that is not used, but whose option holds for those beside it: see `_unforced`."""
_ESCAPED: Final = re.compile(r"\\u((?!d[89a-f])[0-9a-f]{4})", re.IGNORECASE)
_JSON: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?://|#).*|%json\s*(?=\{)')
"""A JSON schema in Lark, or something that may contain the same characters: a string, expression or comment."""


def refusal(grammar: Grammar, reason: str) -> str:
    """The message of a request that is rejected for its grammar."""
    return f"{grammar.field}: expected {_EXPECTED[grammar.kind]} that answers can be held to, but {reason}"


class Constraint:
    """The state of a sequence in its grammar.

    Args:
        request: the sequence's, with a grammar.
        compiled: the grammar.
    """

    __slots__ = ("_grammar", "error", "ignore_eos", "matcher", "token")

    def __init__(self, request: SequenceRequest, compiled: LLMatcher) -> None:
        assert request.grammar is not None
        self._grammar = request.grammar
        self.matcher = compiled.deep_copy()
        """The library's state; used by the thread that computes masks."""
        self.ignore_eos = request.ignore_eos
        """Whether an end-of-sequence token is allowed only where nothing else is."""
        self.token: int | None = None
        """The last token, if the matcher hasn't consumed it."""
        self.error = ""
        """Why the sequence can't go on."""

    def fail(self, reason: str) -> None:
        """Note that the library gave up."""
        self.error = refusal(self._grammar, reason)


class Masks:
    """Masks of sequences, which another thread is computing."""

    def __init__(self, rows: Sequence[int], bits: Future[Tensor], vocab_size: int) -> None:
        self._rows = rows
        self._bits = bits
        self._vocab_size = vocab_size

    def allowed(self, device: torch.device) -> Allowed:
        """Wait for the masks."""
        bits = self._bits.result().to(device)
        powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
        tokens = (bits[:, :, None] & powers).bool().flatten(1)
        return Allowed(self._rows, tokens[:, : self._vocab_size])


class Grammars:
    """Compiles grammars for one tokenizer, in threads of its own, and remembers the last ones.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: the model's; it may exceed the tokenizer's.
        eos_ids: the model's end-of-sequence tokens.

    Raises:
        ReplicaError: the tokenizer is of a kind that the library doesn't know, or no token ends a sequence.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        if not eos_ids:
            raise ReplicaError("the model has no end-of-sequence token")
        self._eos_ids = sorted(eos_ids)
        self._vocab_size = vocab_size
        try:
            self._tokenizer = LLTokenizer(tokenizer.read_text(encoding="utf-8"), vocab_size, self._eos_ids)
        except Exception as error:
            raise ReplicaError(f"llguidance can't read {tokenizer}: {text_of(error)}") from error
        found = [id for id in range(self._tokenizer.vocab_size) if self._tokenizer.is_special_token(id)]
        self._special = [text for id in found if (text := self._tokenizer.decode_str([id]))]
        """The texts of the special tokens."""
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="mask")
        self._executor = LLExecutor(min(MASK_THREADS, torch.get_num_threads()))
        self._lock = Lock()
        self._cache: OrderedDict[tuple[str, str], Future[LLMatcher]] = OrderedDict()
        self._compiling = 0

    @property
    def is_busy(self) -> bool:
        """Whether no further grammar should be compiled now."""
        return self._compiling >= MOST_COMPILING

    def compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """Start to compile a grammar, unless that is done.

        The future raises `ValueError` if the grammar is wrong, unsupported or too complex.
        """
        key = (grammar.kind, grammar.text)
        with self._lock:
            found = self._cache.get(key)
            if found is not None:
                self._cache.move_to_end(key)
                return found
            self._compiling += 1
            future = self._cache[key] = self._compilers.submit(self._compiled, grammar)
            if len(self._cache) > CACHED:
                self._cache.popitem(last=False)
        future.add_done_callback(self._note_compiled)
        return future

    def begin(self, constraints: Sequence[Constraint | None]) -> Masks | None:
        """Start to compute which tokens may come next in each row; None if all may in all rows."""
        rows = [row for row, one in enumerate(constraints) if one is not None]
        if not rows:
            return None
        given = [one for one in constraints if one is not None]
        return Masks(rows, self._masker.submit(self._bits, given), self._vocab_size)

    def _note_compiled(self, future: Future[LLMatcher]) -> None:
        with self._lock:
            self._compiling -= 1

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        try:
            limits = _SCHEMA_LIMITS if grammar.kind == "json_schema" else _LARK_LIMITS
            source = _source(grammar)
            if self._writes_special(grammar.text):
                source = _unforced(source)
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**limits, **_LIMITS))
            if not matcher.is_error():
                matcher.compute_bitmask()  # finds what only use shows, and makes the first mask of each sequence cheap
            error = matcher.get_error()
        except BaseException as failure:  # the library's panics are BaseExceptions
            error = text_of(failure) or type(failure).__name__
        if error:
            raise ValueError(_reason(error))
        return matcher

    def _writes_special(self, text: str) -> bool:
        """Whether a grammar of this text may spell out a special token, perhaps in escaped characters."""
        plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text).replace("\\", "")
        return any(special in plain for special in self._special)

    def _bits(self, constraints: Sequence[Constraint]) -> Tensor:
        """The masks, uint8 [rows, bytes], one bit a token; an error is noted in its constraint."""
        bits = torch.empty(len(constraints), (self._vocab_size + 31) // 32 * 4, dtype=torch.uint8)
        try:
            if chosen := [(one.matcher, one.token) for one in constraints if one.token is not None]:
                self._executor.consume_token_par(chosen)
            self._executor.unsafe_compute_mask_ptr(
                [(one.matcher, row) for row, one in enumerate(constraints)],
                bits.data_ptr(),
                bits.shape[1],
                bits.shape[0],
            )
        except BaseException as error:
            for one in constraints:
                one.fail(f"{type(error).__name__}: {text_of(error)}")
        for row, one in enumerate(constraints):
            one.token = None
            if one.matcher.is_error():
                one.fail(_reason(one.matcher.get_error()))
            elif one.ignore_eos and not one.matcher.is_stopped():
                for id in self._eos_ids:
                    bits[row, id // 8] &= ~(1 << id % 8) & 255
        return bits


def _source(grammar: Grammar) -> str:
    """The grammar as the library takes it."""
    text = grammar.text
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if grammar.kind == "json_schema":
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
    """A grammar that leaves it to the model with which tokens it writes a text that has no alternative.

    The library would tokenize such a text, and take what looks like a special token for that token, which it then
    refuses because it stands for no text.
    """
    grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return json.dumps({"grammars": [*grammars, _NOT_FORCING]})


def _with_options(lark: str) -> Iterator[str]:
    """The parts of a grammar in Lark, whose JSON schemas have our options."""
    begin = 0
    while (found := _JSON.search(lark, begin)) is not None:
        end = found.end()
        yield lark[begin:end]
        if found[0].startswith("%"):
            schema, end = json.JSONDecoder().raw_decode(lark, end)
            _check_multiples(schema)
            yield json.dumps({**_with_exact_numbers(schema), "x-guidance": _JSON_OPTIONS})
        begin = end
    yield lark[begin:]


def _check_multiples(schema: dict[str, Any]) -> None:
    """Refuse a schema whose automaton would be too large.

    Raises:
        ValueError: it is.
    """
    steps = [Fraction(str(one)) for one in _multiples(schema)]
    scale = math.lcm(*[step.denominator for step in steps])
    if math.lcm(*[int(step * scale) for step in steps]) > MOST_MULTIPLE:
        raise ValueError(f"multipleOf: expected numbers with a common multiple of at most {MOST_MULTIPLE} steps")


def _multiples(schema: object) -> Iterator[Any]:
    if isinstance(schema, dict):
        if isinstance(one := schema.get("multipleOf"), (int, float)):
            yield one
        for value in schema.values():
            yield from _multiples(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _multiples(value)


def _with_exact_numbers(schema: Any) -> Any:
    """A schema, or a part of one, whose bounds doubles hold, as which the library reads them: those of no double are
    moved inwards to the next one.

    Raises:
        ValueError: a constant is an integer that no double holds.
    """
    if isinstance(schema, list):
        return [_with_exact_numbers(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, dict):  # whose keys are no keywords
            found[key] = {name: _with_exact_numbers(one) for name, one in value.items()}
            continue
        if key in ("const", "enum") and (wrong := next(_inexact(value), None)) is not None:
            raise ValueError(f"{key}: expected integers that doubles hold exactly, got {wrong}; write it as a string")
        inwards = _INWARDS.get(key)
        if inwards is not None and next(_inexact(value), _LARGEST) != _LARGEST:
            found[key] = _inner_double(value, inwards)
        else:
            found[key] = _with_exact_numbers(value)
    return found


def _inexact(value: object) -> Iterator[int]:
    """The integers in a value that no double holds."""
    if isinstance(value, int) and int(_double(value)) != value:
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _inexact(one)


def _inner_double(bound: int, inwards: float) -> int:
    nearest = _double(bound)
    return int(nearest if (nearest < bound) == (inwards < 0) else math.nextafter(nearest, inwards))


def _double(value: int) -> float:
    return float(max(-_HUGE, min(value, _HUGE)))


def _reason(error: str) -> str:
    return " ".join(error.replace("<non-verbose/>", "").split())[:400]
