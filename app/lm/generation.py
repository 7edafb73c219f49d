"""What a request asks of a language model in tokens, and what it is answered."""

from __future__ import annotations

from typing import Protocol

import msgspec

from inference.engine import Sampling

__all__ = ["Generation", "SequenceSpec", "Tokens"]


class SequenceSpec(msgspec.Struct, frozen=True):
    """One sequence to generate; a request may have several."""

    prompt: list[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it, beside the model's own."""
    ignore_eos: bool = False


class Tokens(msgspec.Struct):
    """What has come of a sequence since it was last asked for: one token, or several if the reader is behind."""

    tokens: list[int]
    logprobs: list[float] | None = None
    """One a token, if asked for."""
    tops: list[tuple[tuple[int, float], ...]] | None = None
    """For each token the most probable ones, best first, with their logarithms; if asked for."""
    finish: str | None = None
    """Set with the sequence's last tokens: ``stop`` (a stop token, which is the last one here) or ``length``."""


class Generation(Protocol):
    """A request under way. Everything happens in one event loop."""

    async def news(self) -> list[tuple[int, Tokens]]:
        """Wait until any sequence has news. Gives all there are: place of the sequence, and what has come of it.

        Empty: all sequences have ended or been dropped.

        Raises:
            HeadwaterError: the request failed as a whole: `QueueFull`, `BadRequest`, `ReplicaLost`, `Unavailable`,
                `DeadlineExceeded`, `Cancelled`, `ContractBroken`, `CallableFailed`.
        """
        ...

    def drop(self, place: int) -> None:
        """Nobody wants more of this sequence (a stop string was found): it is cancelled, and has no more news."""
        ...

    def close(self) -> None:
        """Nobody wants any more of the request: what still runs is cancelled. May be called more than once."""
        ...
