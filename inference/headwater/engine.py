"""The interface of a language model's engine: requests, events, limits and errors.

An engine is single-threaded: a single thread makes all calls, and `Engine.step` does the work. A step advances every
sequence by at most one token, so one list of events fits in one packed response. The errors of an engine::

    ModelError
    ├── EngineFull               a queue is full (429)
    └── BadInput
        └── RequestRejected      this engine can never serve this request (400)
            └── RequestTooLong   prompt and answer exceed the context, or the cache
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from headwater.errors import BadInput, ModelError

__all__ = [
    "MAX_GRAMMAR",
    "SAMPLING_FIELDS",
    "Engine",
    "EngineFull",
    "EngineLimits",
    "Finish",
    "Grammar",
    "GrammarKind",
    "LogitBias",
    "Penalty",
    "PromptLogprob",
    "RepetitionPenalty",
    "RequestRejected",
    "RequestTooLong",
    "Sampling",
    "Seed",
    "SequenceRequest",
    "Share",
    "TokenEvent",
    "TopLogprobs",
]


class EngineFull(ModelError):
    """Too many sequences, or grammars to compile, wait; try again later."""


class RequestRejected(BadInput):
    """The engine can't serve this request, now or later."""


class RequestTooLong(RequestRejected):
    """Prompt and answer together exceed the model's context or the cache."""


Finish: TypeAlias = Literal["stop", "length", "cancelled", "error", "rejected", "out_of_memory"]
"""Why a sequence ended. ``stop``: a stop or end-of-sequence token. ``length``: `max_tokens` is reached. ``cancelled``:
`Engine.cancel`. ``error``: a failure. ``rejected``: the reason for a `RequestRejected` was found only after
`Engine.submit`. ``out_of_memory``: the device's memory does not suffice for the sequence."""

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
LogitBias: TypeAlias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]
"""Maps a token to the number that is added to its logit. The sequences of a request share the object."""
PromptLogprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]
"""The log probability of a prompt's token and the most probable tokens at its position, in the form of
`TokenEvent.logprob` and `TokenEvent.top`."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a sequence's tokens are chosen; `headwater.lm.sampling` has the formulas. Decoding the struct from JSON or
    MessagePack checks the ranges; the constructor doesn't.

    The defaults leave the model's distribution unchanged; temperature 0 takes the most probable token.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = {}
    seed: Seed | None = None
    """The same seed gives the same tokens, whichever other sequences are computed beside the sequence; None: a random
    seed."""
    logprobs: TopLogprobs | None = None
    """How many of the most probable tokens to report with each token; 0 reports only the chosen token's log
    probability, None nothing."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens before which neither an end-of-sequence token nor a token of `SequenceRequest.stop_ids` is
    chosen, unless no other token may follow."""


SAMPLING_FIELDS: Final = frozenset(Sampling.__struct_fields__)

MAX_GRAMMAR: Final = 65_536
"""Maximum length of a grammar's text, in characters."""
GrammarKind: TypeAlias = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A grammar of a whole answer: only a stop token or the length limit may end the answer before the grammar does.
    `headwater.lm.grammar_source` describes the dialects."""

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR)]
    field: str
    """The request's field that the grammar comes from, for messages."""
    before: Annotated[str, Meta(max_length=MAX_GRAMMAR)] = ""
    """What an answer may have before the text that follows the grammar, such as the model's reasoning: a grammar in
    Lark in which ``@answer`` stands for that text. Empty: nothing. Only requests to engines that support ``lark``
    have it."""


class SequenceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A sequence to generate."""

    id: str
    prompt: list[TokenId]
    max_tokens: Annotated[int, Meta(ge=0)]
    sampling: Sampling = Sampling()
    stop_ids: frozenset[TokenId] = frozenset()
    """Tokens that end the sequence, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    """Whether the model's end-of-sequence tokens are ignored; `stop_ids` still apply. With a grammar these tokens end
    the sequence where no other token may follow."""
    cache_scope: str = ""
    """The scope of the sequence's cache entries: cached parts of its prompt and answer are reused only for prompts with
    the same scope."""
    grammar: Grammar | None = None
    """The grammar of the answer. The sequence ends by itself only where the grammar ends; it may end earlier with a
    token of `stop_ids`, or with ``length``."""
    prompt_logprobs: TopLogprobs | None = None
    """Like `Sampling.logprobs`, for the tokens of the prompt. If it is set, the whole prompt is computed, even for an
    answer of no tokens."""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """A token of a sequence, or its end, or both; or a part of the prompt's log probabilities."""

    id: str
    index: int
    """The token's position in the answer, from 0; in an event without a token, the length of the answer."""
    token: int | None
    """None only in a final event without a token, and in an event with `prompt`. The token that stopped a sequence is
    reported like any other token."""
    logprob: float | None = None
    """Natural logarithm of the token's probability under the model, before bias, penalties, temperature and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens as (token, logprob), best first."""
    finish: Finish | None = None
    """Why the sequence ended; set only in the sequence's last event."""
    error: str = ""
    """Message of the failure, where `finish` is ``error``, ``rejected`` or ``out_of_memory``."""
    cached: int = 0
    """In the event of the first token: number of the prompt's tokens that were not computed, because an earlier
    sequence began with the same tokens."""
    prompt: tuple[PromptLogprob, ...] = ()
    """The next part of the prompt's log probabilities, which begin with the prompt's second token. An event with this
    field has no token and no `finish`. These events come before all other events of the sequence, and together they
    cover the whole prompt."""


class EngineLimits(msgspec.Struct, frozen=True):
    """The capacity of an engine."""

    max_sequences: int
    """Maximum number of sequences that are computed together."""
    max_waiting: int
    """Maximum number of sequences that wait in the queue, beyond `max_sequences`."""
    context_length: int
    """Maximum number of tokens of a prompt and its answer together."""
    cache_tokens: int
    """Number of tokens that the key/value cache holds, over all sequences."""
    vocab_size: int
    sampling: frozenset[str] = SAMPLING_FIELDS
    """The fields of `Sampling` that the engine supports; a request that sets another field must be refused."""
    grammars: frozenset[GrammarKind] = frozenset()
    """The kinds of `Grammar` that the engine supports; a request with another kind must be refused."""
    prompt_logprobs: bool = False
    """Whether the engine supports `SequenceRequest.prompt_logprobs`; if not, it must refuse requests that set the
    field."""


class Engine(Protocol):
    """Generates many sequences at once."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def active(self) -> int:
        """Number of sequences admitted: their prompt or answer is being computed."""

    @property
    def waiting(self) -> int:
        """Number of sequences in the waiting queue."""

    @property
    def cache_used(self) -> int:
        """Number of reserved tokens of the cache, at most `EngineLimits.cache_tokens`."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute or report anything."""

    def submit(self, request: SequenceRequest) -> None:
        """Put a sequence in the queue. Each accepted sequence has exactly one event with `TokenEvent.finish`, unless
        `close` drops it.

        Raises:
            EngineFull: the waiting queue is full, or too many grammars wait to be compiled.
            RequestTooLong: the sequence can never fit.
            RequestRejected: a field or grammar that `limits` doesn't include, an empty prompt, a token outside the
                vocabulary, an id in use.
        """

    def cancel(self, id: str) -> bool:
        """End a sequence, running or waiting, and free its place at once; the next `step` reports it as ``cancelled``.

        Returns whether there was a sequence with this id.
        """

    def step(self) -> list[TokenEvent]:
        """Compute one step of the admitted sequences: at most one token each. Returns the events since the last step.

        Never raises for a failure of a sequence or the model: affected sequences end with ``error``, ``rejected`` or
        ``out_of_memory``, other sequences continue.
        """

    def close(self) -> None:
        """Drop all sequences without events, and free the memory. The engine may be used again afterwards."""
