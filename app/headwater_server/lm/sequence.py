"""What a sequence asks of the engine, the tokens that come of it, and how a request's sequences are read."""

from __future__ import annotations

from typing import Protocol

import msgspec

from headwater.engine import Grammar, PromptLogprob, Sampling

__all__ = ["Generation", "SequenceSpec", "Tokens"]


class SequenceSpec(msgspec.Struct, frozen=True):
    """One sequence to generate; a request may have several."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence, in addition to the model's own."""
    ignore_eos: bool = False
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    """As `headwater.engine.SequenceRequest.prompt_logprobs`."""


class Tokens(msgspec.Struct):
    """The new tokens of a sequence: one, or several if the reader is slower than the engine."""

    tokens: list[int]
    logprobs: list[float] | None = None
    """One per token, if the request asked for them."""
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """For each token the most probable ones with their logprobs, best first; if the request asked for them."""
    finish: str | None = None
    """Set with the sequence's last tokens: ``stop`` (a stop token, the last one here) or ``length``."""
    cached: int = 0
    """With the first tokens: how many of the prompt's tokens the engine's prefix cache had."""
    prompt: list[PromptLogprob] = []
    """The next of the prompt's log probabilities, which begin with those of its second token; if the request asked for
    them. They come before the first token."""


class Generation(Protocol):
    """A request under way, used in one event loop."""

    async def news(self) -> list[tuple[int, Tokens]]:
        """Wait for new tokens of any sequence; returns the place and tokens of each sequence that has some.

        Empty once all sequences have ended or been dropped.

        Raises:
            HeadwaterError: the request failed as a whole: `QueueFull`, `BadRequest`, `ReplicaLost`, `Unavailable`,
                `DeadlineExceeded`, `Cancelled`, `ContractBroken`, `CallableFailed`.
        """
        ...

    def drop(self, place: int) -> None:
        """Cancel a sequence, for instance after a stop string; `news` returns no more of it."""
        ...

    def close(self) -> None:
        """Cancel whatever still runs. May be called more than once."""
        ...
