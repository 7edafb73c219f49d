"""Errors of an engine.

::

    ModelError
    ├── EngineFull               the waiting queue is full (429)
    └── BadInput
        └── RequestRejected      this engine can never serve this request (400)
            └── RequestTooLong   prompt and answer exceed the context, or the cache

What an engine is asked, what it answers, and the calls between.

An engine is single-threaded: one thread makes all calls, and `Engine.step` does the work. It advances every sequence
by at most one token, so one list of events is what one packed response carries.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from inference.errors import BadInput, ModelError

__all__ = [
    "SAMPLING_FIELDS",
    "Engine",
    "EngineFull",
    "EngineLimits",
    "Finish",
    "Penalty",
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
    """As many requests wait as may; try again later."""


class RequestRejected(BadInput):
    """The engine can't serve this request, now or later."""


class RequestTooLong(RequestRejected):
    """Prompt and answer together exceed what the model or the cache holds."""


Finish: TypeAlias = Literal["stop", "length", "cancelled", "error"]
"""Why a sequence ended: a stop or end-of-sequence token, `max_tokens`, `Engine.cancel`, a failure."""

Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]

Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]

RepetitionPenalty: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]

Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

TopLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=20)]

TokenId: TypeAlias = Annotated[int, Meta(ge=0)]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How a sequence's tokens are chosen; `inference.lm.sampling` has the formulas. Ranges hold for what is decoded.

    The defaults are the model's distribution as it is; temperature 0 takes the most probable token.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Share = 1.0
    min_p: Share = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] = {}
    seed: Seed | None = None
    """The same seed gives the same tokens, whoever the neighbours are."""
    logprobs: TopLogprobs | None = None
    """How many of the most probable tokens to report with each token; 0 reports the chosen one's only."""


SAMPLING_FIELDS: Final = frozenset(Sampling.__struct_fields__)


class SequenceRequest(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One sequence to generate."""

    id: str
    prompt: list[TokenId]
    max_tokens: Annotated[int, Meta(ge=0)]
    sampling: Sampling = Sampling()
    stop_ids: frozenset[TokenId] = frozenset()
    """Tokens that end it, beside the model's own."""
    ignore_eos: bool = False
    """Whether the model's own end-of-sequence tokens don't end it; `stop_ids` still do."""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """One token of a sequence, or its end, or both."""

    id: str
    index: int
    """0 for the sequence's first token, and one more for each; of an event without a token, how many there were."""
    token: int | None
    """None only in an end that brings no token. The token that stopped a sequence is reported as any other."""
    logprob: float | None = None
    """Natural logarithm of the token's probability under the model, before bias, penalties, temperature and filters."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most probable, best first."""
    finish: Finish | None = None
    """Set in the sequence's last event, and in no other."""
    error: str = ""
    """What went wrong, where `finish` is ``error``."""


class EngineLimits(msgspec.Struct, frozen=True):
    """What an engine can take."""

    max_sequences: int
    """How many are computed together."""
    max_waiting: int
    """How many more may wait."""
    context_length: int
    """Tokens of a prompt and its answer."""
    cache_tokens: int
    """Tokens the key/value cache holds, over all sequences."""
    vocab_size: int
    sampling: frozenset[str] = SAMPLING_FIELDS
    """Which fields of `Sampling` it heeds; a request that sets another must be refused."""


class Engine(Protocol):
    """Generates many sequences at once."""

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def active(self) -> int:
        """How many sequences hold a place: prompt or answer being computed."""

    @property
    def waiting(self) -> int:
        """How many wait for one."""

    @property
    def cache_used(self) -> int:
        """Tokens of the cache that are reserved, at most `EngineLimits.cache_tokens`."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do or report anything."""

    def submit(self, request: SequenceRequest) -> None:
        """Put a sequence in the queue. Each one accepted has exactly one event with `TokenEvent.finish`.

        Raises:
            EngineFull: as many wait as may.
            RequestTooLong: it can never fit.
            RequestRejected: an unsupported sampling field, a token outside the vocabulary, an id in use.
        """

    def cancel(self, id: str) -> bool:
        """End a sequence wherever it is and free its place at once; the next `step` reports it as ``cancelled``.

        Returns whether there was one.
        """

    def step(self) -> list[TokenEvent]:
        """Compute one step of all sequences: at most one token each.

        Never raises for what a sequence or the model does: those affected end with ``error``, the others go on.
        """

    def close(self) -> None:
        """Forget all sequences, without events, and free the memory."""
