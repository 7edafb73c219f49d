"""What a request comes to in tokens: its sequences, checked against what the model can take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from app.codecs.faults import at
from app.errors import BadRequest
from app.lm.sampling_fields import TextEnd
from app.lm.sequence import SequenceSpec
from app.lm.text_stream import TextStream
from inference.engine import EngineLimits, Sampling

if TYPE_CHECKING:  # tokenizers take memory: they are loaded where there is a language model
    from app.lm.text.token_texts import TokenTexts

__all__ = ["Prompt", "TextPlan", "answer_capacity", "check_size", "fitting_tokens", "plan"]

CHAT_ANSWER_TOKENS: Final = 256
"""Of an answer whose length the client doesn't say, even if it takes more than a sequence's share of the cache."""


LONGEST_TOKEN_CHARACTERS: Final = 256
"""On average, in any text that a context holds."""


class Prompt(NamedTuple):
    """One prompt."""

    ids: list[int]
    max_tokens: int
    prefix: str = ""
    """A text that stands before its answers."""


class TextPlan(NamedTuple):
    """A request's sequences, and how they become text."""

    specs: list[SequenceSpec]
    """The choices of the first prompt, then those of the next."""
    prefixes: list[str]
    end: TextEnd
    prompt_tokens: int
    """Of all prompts, each counted once."""
    timeout_s: float | None = None

    def streams(self, texts: TokenTexts) -> list[TextStream]:
        """The texts to be, one for each sequence."""
        return [
            TextStream(
                texts,
                spec.prompt,
                stops=self.end.stops,
                include_stop=self.end.include_stop,
                skip_special_tokens=self.end.skip_special_tokens,
                logprobs=spec.sampling.logprobs is not None,
                prefix=prefix,
            )
            for spec, prefix in zip(self.specs, self.prefixes, strict=True)
        ]


def plan(
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    end: TextEnd,
    limits: EngineLimits,
    timeout_s: float | None = None,
) -> TextPlan:
    """Make sequences of prompts.

    Args:
        prompts: what is to be answered.
        n: choices of each. With a seed, that of choice i is the seed plus i: they differ, and come again.
        sampling, end: of all.
        limits: what the model can take.
        timeout_s: what the client gives the request.

    Raises:
        BadRequest: more sequences than there are places, those for waiting included.
    """
    places = limits.max_sequences + limits.max_waiting
    if len(prompts) * n > places:
        field = "n" if n > 1 else "prompt"
        raise at(field, None, f"expected at most {places} answers in all, got {len(prompts)} prompts x {n}")
    samplings = [sampling]
    if sampling.seed is not None:
        samplings = [msgspec.structs.replace(sampling, seed=_seed(sampling.seed + i)) for i in range(n)]
    specs = [
        SequenceSpec(prompt.ids, prompt.max_tokens, samplings[i % len(samplings)], end.stop_ids, end.ignore_eos)
        for prompt in prompts
        for i in range(n)
    ]
    prefixes = [prompt.prefix for prompt in prompts for _ in range(n)]
    return TextPlan(specs, prefixes, end, sum(len(prompt.ids) for prompt in prompts), timeout_s)


def check_size(field: str, text: str, limits: EngineLimits) -> None:
    """Refuse a text that can't fit, before it takes seconds to say how many tokens it has.

    Raises:
        BadRequest: it is longer than any context.
    """
    bound, what = _bound(limits)
    if len(text) > bound * LONGEST_TOKEN_CHARACTERS:
        raise at(
            field,
            None,
            f"{what} is {bound} tokens, prompt and answer together; expected at most "
            f"{bound * LONGEST_TOKEN_CHARACTERS} characters, got {len(text)}; shorten it",
        )


def answer_capacity(field: str, ids: Sequence[int], limits: EngineLimits) -> int:
    """How many tokens an answer can have at most.

    Args:
        field: the request's field that has the prompt.
        ids: of the prompt.
        limits: what the model can take.

    Raises:
        BadRequest: the prompt has no token, one outside the vocabulary, or more than fit.
    """
    if not ids:
        raise at(field, None, "expected at least one token, got none; begin the text with something")
    if max(ids) >= limits.vocab_size:
        raise at(field, None, f"expected tokens from 0 to {limits.vocab_size - 1}, got {max(ids)}")
    bound, what = _bound(limits)
    if len(ids) >= bound:
        raise at(
            field,
            None,
            f"{what} is {bound} tokens, prompt and answer together; expected at most {bound - 1} in the prompt, got "
            f"{len(ids)}; shorten it",
        )
    return bound - len(ids)


def fitting_tokens(field: str, path: str, max_tokens: int, ids: Sequence[int], room: int, limits: EngineLimits) -> int:
    """A number of tokens that the client asks for.

    Args:
        field: the request's field that has the prompt.
        path: that which has the number.
        max_tokens: the number.
        ids: of the prompt.
        room: what `answer_capacity` gave.
        limits: what the model can take.

    Raises:
        BadRequest: more than there is room for.
    """
    if max_tokens <= room:
        return max_tokens
    bound, what = _bound(limits)
    raise BadRequest(
        f"{path}: {what} is {bound} tokens, but this request comes to {len(ids) + max_tokens}: {len(ids)} in {field}, "
        f"and an answer of {max_tokens}; expected at most {room}, or a shorter prompt",
        field=path,
    )


def _bound(limits: EngineLimits) -> tuple[int, str]:
    if limits.cache_tokens < limits.context_length:
        return limits.cache_tokens, "this model's cache"
    return limits.context_length, "this model's maximum context length"


def _seed(seed: int) -> int:
    """Within 64 bits: past the largest comes the smallest."""
    return (seed + 2**63) % 2**64 - 2**63
