"""The interface of a language model's engine: requests, events, limits and errors.

An engine is single-threaded: one thread makes all calls, and `Engine.step` does the work. A step advances every
sequence by at most one token, so one list of events fits in one packed response. Its errors::

    ModelError
    ├── EngineFull               the waiting queue is full (429)
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
    """The waiting queue is full; try again later."""


class RequestRejected(BadInput):
    """The engine can't serve this request, now or later."""


class RequestTooLong(RequestRejected):
    """Prompt and answer together exceed what the model or the cache holds."""


Finish: TypeAlias = Literal["stop", "length", "cancelled", "error", "rejected", "out_of_memory"]
"""Why a sequence ended: a stop or end-of-sequence token, `max_tokens`, `Engine.cancel`, a failure; ``rejected``: as
`RequestRejected`, but found after `Engine.submit`; ``out_of_memory``: the device's memory does not suffice for it."""

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0)]
LogitBias: TypeAlias = dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]]
"""A number for each token, added to its logit. The sequences of a request share the object."""
PromptLogprob: TypeAlias = tuple[float, tuple[tuple[int, float], ...]]
"""Of a token of a prompt, what `TokenEvent.logprob` and `TokenEvent.top` are of an answer's."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a sequence's tokens are chosen; `headwater.lm.sampling` has the formulas. Decoding checks the ranges.

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
    """The same seed gives the same tokens, whoever the neighbours are."""
    logprobs: TopLogprobs | None = None
    """How many of the most probable tokens to report with each token; 0 reports the chosen one's only."""
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens before which neither an end-of-sequence token nor one of `SequenceRequest.stop_ids` is chosen, unless no
    other may follow."""


SAMPLING_FIELDS: Final = frozenset(Sampling.__struct_fields__)

MAX_GRAMMAR: Final = 65_536
"""The most characters of a grammar's text."""
GrammarKind: TypeAlias = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an answer must be, from its first token to its end; `headwater.lm.grammars` has the dialects."""

    kind: GrammarKind
    text: Annotated[str, Meta(max_length=MAX_GRAMMAR)]
    field: str
    """The request's field that it comes from, for messages."""


class SequenceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One sequence to generate."""

    id: str
    prompt: list[TokenId]
    max_tokens: Annotated[int, Meta(ge=0)]
    sampling: Sampling = Sampling()
    stop_ids: frozenset[TokenId] = frozenset()
    """Tokens that end the sequence, in addition to the model's own."""
    ignore_eos: bool = False
    """Whether the model's own end-of-sequence tokens are ignored; `stop_ids` still apply. With a grammar they end the
    sequence where nothing else may follow."""
    cache_scope: str = ""
    """Whose it is: what is kept of its prompt and answer is reused only for prompts of the same scope."""
    grammar: Grammar | None = None
    """The sequence ends by itself only where the grammar does; an earlier end is one of `stop_ids`, or ``length``."""
    prompt_logprobs: TopLogprobs | None = None
    """As `Sampling.logprobs`, of the prompt: all of it is computed then, also for an answer of no tokens."""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """One token of a sequence, or its end, or both."""

    id: str
    index: int
    """The token's position in the answer, from 0; in an event without a token, the length of the answer."""
    token: int | None
    """None only in a final event without a token, and in one with `prompt`. The token that stopped a sequence is
    reported like any other."""
    logprob: float | None = None
    """Natural logarithm of the token's probability under the model, before bias, penalties, temperature and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens as (token, logprob), best first."""
    finish: Finish | None = None
    """Set in the sequence's last event, and in no other."""
    error: str = ""
    """What went wrong, where `finish` is ``error``, ``rejected`` or ``out_of_memory``."""
    cached: int = 0
    """In the event of the first token: the prompt's tokens that were not computed, because an earlier sequence began
    so."""
    prompt: tuple[PromptLogprob, ...] = ()
    """The next of the prompt's log probabilities, which begin with those of its second token. Such events have no token
    and are no end; they come before any other of the sequence, and together are of the whole prompt."""


class EngineLimits(msgspec.Struct, frozen=True):
    """The capacity of an engine."""

    max_sequences: int
    """Sequences computed together."""
    max_waiting: int
    """Sequences that may wait beyond these."""
    context_length: int
    """The most tokens of a prompt and its answer together."""
    cache_tokens: int
    """Tokens the key/value cache holds, over all sequences."""
    vocab_size: int
    sampling: frozenset[str] = SAMPLING_FIELDS
    """The fields of `Sampling` that the engine supports; a request that sets another must be refused."""
    grammars: frozenset[GrammarKind] = frozenset()
    """The kinds of `Grammar` that the engine supports; a request with another must be refused."""
    prompt_logprobs: bool = False
    """Whether the engine supports `SequenceRequest.prompt_logprobs`; if not, it must refuse them."""


class Engine(Protocol):
    """Generates many sequences at once."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def active(self) -> int:
        """The number of sequences admitted: their prompt or answer is being computed."""

    @property
    def waiting(self) -> int:
        """The number of sequences in the waiting queue."""

    @property
    def cache_used(self) -> int:
        """Reserved tokens of the cache, at most `EngineLimits.cache_tokens`."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report anything."""

    def submit(self, request: SequenceRequest) -> None:
        """Put a sequence in the queue. Each one accepted has exactly one event with `TokenEvent.finish`.

        Raises:
            EngineFull: the waiting queue is full.
            RequestTooLong: the sequence can never fit.
            RequestRejected: an unsupported sampling field or grammar, a token outside the vocabulary, an id in use.
        """

    def cancel(self, id: str) -> bool:
        """End a sequence, running or waiting, and free its place at once; the next `step` reports it as ``cancelled``.

        Returns whether there was such a sequence.
        """

    def step(self) -> list[TokenEvent]:
        """Compute one step of all sequences: at most one token each.

        Never raises for a failure of a sequence or the model: the sequences affected end with ``error``, others go on.
        """

    def close(self) -> None:
        """Drop all sequences without events, and free the memory."""
