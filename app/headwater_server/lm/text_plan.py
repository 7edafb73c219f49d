"""Converts a request into sequences of tokens, checked against the engine's limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from headwater.engine import EngineLimits, Grammar, Sampling
from headwater_server.codecs.faults import at
from headwater_server.errors import BadRequest, ContextTooLong
from headwater_server.lm.sampling_fields import TextEnd
from headwater_server.lm.sequence import SequenceSpec
from headwater_server.lm.text.answer_reader import AnswerReading
from headwater_server.lm.text.stop_automaton import StopAutomaton
from headwater_server.lm.text_stream import TextStream

if TYPE_CHECKING:  # importing tokenizers takes memory: only workers with a language model import it
    from headwater_server.lm.text.token_texts import TokenTexts

__all__ = ["Prompt", "TextPlan", "answer_tokens", "bounded_ids", "check_count", "check_size", "plan", "text_ids"]

_TOKEN_CHARACTERS: Final = 256
"""An upper bound of the average number of characters per token, for any text that fits into a context."""
_PROBE_CHARACTERS: Final = 8
"""An upper bound of the average number of characters per token in most texts. Of a text with more characters than this
times the allowed number of tokens, first only a beginning of that length is encoded."""
_PROBE_GROWTH: Final = 4
"""Factor by which the next beginning is longer, so that all beginnings together have at most 4/3 of the text's
characters."""
_CUT_TOKENS: Final = 256
"""An upper bound of the number of tokens that cutting a text adds to its beginning, beyond an eighth of the allowed
tokens."""


class Prompt(NamedTuple):
    """A prompt, and the parameters of its answers that may differ among the prompts of a request."""

    ids: list[int]
    max_tokens: int
    """Maximum number of tokens of each answer."""
    prefix: str = ""
    """Text to put before each answer: the prompt's text, if the client wants it repeated."""
    offsets: Sequence[int] = ()
    """Offset in characters of each token's text in the prefix; empty unless the answers include the prompt's log
    probabilities."""


class TextPlan(NamedTuple):
    """A request's sequences, and how their tokens are converted into text."""

    specs: list[SequenceSpec]
    """The choices of the first prompt, then the choices of the next prompt, and so on."""
    prefixes: list[str]
    """The text to put before each sequence's text."""
    offsets: list[Sequence[int]]
    """Each sequence's `Prompt.offsets`."""
    end: TextEnd
    prompt_tokens: int
    """Number of tokens of all prompts. Each prompt counts once."""
    timeout_s: float | None = None
    """Maximum duration of the request in seconds; None: no maximum."""
    n: int = 1
    """Number of choices of each prompt."""
    reading: AnswerReading | None = None
    """How the texts are divided into reasoning, content and tool calls; `None` if the whole texts are content."""
    ignored: tuple[str, ...] = ()
    """Paths of the request's fields without effect, which the answer's header `headwater-ignored` names."""

    def streams(self, texts: TokenTexts) -> list[TextStream]:
        """A new `TextStream` for each sequence."""
        marks = {}
        if self.reading is not None:
            marks = {token: mark for mark in self.reading.marks if (token := texts.added_id(mark)) is not None}
        stops = StopAutomaton(self.end.stops) if self.end.stops else None
        return [
            TextStream(
                texts,
                spec.prompt,
                stops=stops,
                include_stop=self.end.include_stop,
                skip_special_tokens=self.end.skip_special_tokens,
                min_tokens=spec.sampling.min_tokens,
                marks=marks,
                has_ends=self.reading is not None and self.reading.reasoning is not None,
                logprobs=spec.sampling.logprobs is not None,
                prefix=prefix,
                offsets=offsets,
            )
            for spec, prefix, offsets in zip(self.specs, self.prefixes, self.offsets, strict=True)
        ]


def plan(
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    end: TextEnd,
    limits: EngineLimits,
    timeout_s: float | None,
    grammar: Grammar | None = None,
    prompt_logprobs: int | None = None,
) -> TextPlan:
    """Make `n` sequences of each prompt. If a seed is set, the sequences of a prompt get the seeds ``seed``,
    ``seed + 1`` and so on. The plan has no `reading`: the caller adds it.

    Raises:
        BadRequest: the engine can't hold this number of running and waiting sequences; or the minimum number of tokens
            of an answer exceeds its maximum.
    """
    min_tokens = sampling.min_tokens
    max_tokens = min(prompt.max_tokens for prompt in prompts)
    if min_tokens > max_tokens:
        raise at("min_tokens", None, f"expected at most {max_tokens}, the most tokens of the answer, got {min_tokens}")
    places = limits.max_sequences + limits.max_waiting
    if len(prompts) * n > places:
        field = "n" if n > 1 else "prompt"
        raise at(field, None, f"expected at most {places} answers in all, got {len(prompts)} prompts x {n}")
    samplings = [sampling] * n
    if sampling.seed is not None:
        samplings = [msgspec.structs.replace(sampling, seed=_seed(sampling.seed + i)) for i in range(n)]
    specs = [
        SequenceSpec(prompt.ids, prompt.max_tokens, each, end.stop_ids, end.ignore_eos, grammar, prompt_logprobs)
        for prompt in prompts
        for each in samplings
    ]
    prefixes = [prompt.prefix for prompt in prompts for _ in range(n)]
    offsets = [prompt.offsets for prompt in prompts for _ in range(n)]
    return TextPlan(specs, prefixes, offsets, end, sum(len(prompt.ids) for prompt in prompts), timeout_s, n)


def check_size(field: str, text: str, limits: EngineLimits) -> None:
    """Refuse a text that is certainly too long. Counting its tokens would take seconds.

    Raises:
        ContextTooLong: the text has more than `_TOKEN_CHARACTERS` characters for each token of the context or cache.
    """
    max_characters = _bound(limits)[0] * _TOKEN_CHARACTERS
    if len(text) > max_characters:
        raise _too_long(field, f"at most {max_characters} characters, got {len(text)}", limits)


def bounded_ids(text: str, encode: Callable[[str], list[int]], max_tokens: int) -> list[int] | None:
    """The token ids of a text; `None` if a beginning of the text already has certainly more than `max_tokens` tokens.
    The returned ids may be more than `max_tokens`, too.

    A beginning has the same tokens as the whole text, except the last few, which the cut may change.
    """
    size = max_tokens * _PROBE_CHARACTERS
    while size < len(text):
        if len(encode(text[:size])) > max_tokens + max_tokens // 8 + _CUT_TOKENS:
            return None
        size *= _PROBE_GROWTH
    return encode(text)


def text_ids(field: str, text: str, encode: Callable[[str], list[int]], limits: EngineLimits) -> list[int]:
    """The token ids of the text in this field of the request. The caller must check their number (`answer_tokens`).

    Raises:
        BadRequest: the text is certainly too long, or not Unicode text.
    """
    check_size(field, text, limits)
    bound = _bound(limits)[0]
    ids = bounded_ids(text, encode, bound)
    if ids is None:
        raise _too_long(field, f"at most {bound - 1} in the prompt, got more", limits)
    return ids


def check_count(field: str, count: int, limits: EngineLimits) -> None:
    """Refuse a prompt of `count` tokens if not even an answer of one token fits into context and cache with it.

    Raises:
        ContextTooLong: no answer fits.
    """
    bound = _bound(limits)[0]
    if count >= bound:
        raise _too_long(field, f"at most {bound - 1} in the prompt, got {count}", limits)


def _too_long(field: str, expected: str, limits: EngineLimits) -> BadRequest:
    bound, bound_name = _bound(limits)
    fault = f": {bound_name} is {bound} tokens, prompt and answer together; expected {expected}; shorten it"
    return ContextTooLong.about(field, fault)


def answer_tokens(
    field: str, path: str, ids: Sequence[int], wanted: int | None, default: int, limits: EngineLimits
) -> int:
    """The maximum number of tokens of a prompt's answer.

    Args:
        field: the request's field that contains the prompt.
        path: the request's field that contains `wanted`.
        ids: the prompt's token ids.
        wanted: the number that the client asked for, if any.
        default: the number if the client asked for no number; reduced if fewer tokens fit.
        limits: the engine's limits.

    Raises:
        BadRequest: the prompt is empty, has a token outside the vocabulary, or doesn't fit, alone or with an answer of
            `wanted` tokens.
    """
    if not ids:
        raise at(field, None, "expected at least one token, got none; begin the text with something")
    if max(ids) >= limits.vocab_size:
        raise at(field, None, f"expected tokens from 0 to {limits.vocab_size - 1}, got {max(ids)}")
    check_count(field, len(ids), limits)
    bound, bound_name = _bound(limits)
    max_tokens = bound - len(ids)
    if wanted is None:
        return min(default, max_tokens)
    if wanted > max_tokens:
        raise ContextTooLong.about(
            path,
            f": {bound_name} is {bound} tokens, but this request comes to {len(ids) + wanted}: {len(ids)} in {field}, "
            f"and an answer of {wanted}; expected at most {max_tokens}, or a shorter prompt",
        )
    return wanted


def _bound(limits: EngineLimits) -> tuple[int, str]:
    """The maximum number of tokens of a prompt and its answer together, and the name of this limit for messages."""
    if limits.cache_tokens < limits.context_length:
        return limits.cache_tokens, "this model's cache"
    return limits.context_length, "this model's maximum context length"


def _seed(seed: int) -> int:
    """Wrap a seed around to a signed 64-bit integer."""
    return (seed + 2**63) % 2**64 - 2**63
