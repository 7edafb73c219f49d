"""The parameters of a sequence, its tokens as they arrive, and the interface for reading a request's sequences."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headwater.engine import Grammar, PromptLogprob, Sampling

__all__ = ["Generation", "SequenceSpec", "Tokens"]


class SequenceSpec(msgspec.Struct, frozen=True):
    """A sequence to generate. A request may have several. The fields mean the same as in
    `headwater.engine.SequenceRequest`."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence, in addition to the model's end-of-sequence tokens."""
    ignore_eos: bool = False
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """See `headwater.engine.SequenceRequest.prompt_logprobs`."""


class Tokens(msgspec.Struct):
    """The new tokens of a sequence: several if the reader is slower than the engine; an empty list if only the other
    fields are new."""

    tokens: list[int]
    logprobs: list[float] | None = None
    """The log probability of each token, if the request asked for log probabilities."""
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """For each position the most probable tokens with their log probabilities, best first, if the request asked for
    them."""
    finish: str | None = None
    """Set with the sequence's last tokens: ``stop`` (the last token in `tokens` is a stop token) or ``length``. None
    before."""
    cached: int = 0
    """Number of the prompt's tokens that the engine's prefix cache had. Set with the first tokens; 0 with later
    tokens."""
    prompt: list[PromptLogprob] = []
    """The next log probabilities of the prompt's tokens, starting with the second token, if the request asked for them.
    The last of them arrive before the first generated token, or with it."""


class Generation(Protocol):
    """A language model's request in flight, used in a single event loop. Sequences are numbered from 0, in the
    request's order."""

    async def news(self) -> list[tuple[int, Tokens]]:
        """Wait for new tokens, or the end, of any sequence. Returns index and new tokens of each sequence that has
        news.

        The list is empty once all sequences have been read to their ends or dropped.

        Raises:
            HeadwaterError: the whole request failed: `QueueFull`, `BadRequest`, `ReplicaLost`, `Unavailable`,
                `DeadlineExceeded`, `Cancelled`, `ContractBroken`, `CallableFailed`.
        """
        ...

    def drop(self, place: int) -> None:
        """Cancel the sequence with index `place`, for instance after a stop string. `news` returns no more tokens of
        it."""
        ...

    def close(self) -> None:
        """Cancel all sequences that still run. May be called more than once."""
        ...
