"""One sequence of a request: what is asked of the engine in tokens, and a slot for the tokens that were not yet read.

The slot merges what comes in order, and takes nothing else.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from app.errors import ContractBroken, HeadwaterError
from inference.engine import Sampling
from inference.wire.lm import SequenceEvent, Submit

__all__ = ["Generation", "SequenceOwner", "SequenceSpec", "TokenSlot", "Tokens"]


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


class SequenceChannel(Protocol):
    """What carries a sequence, as the sequence knows it."""

    def cancel(self, slot: TokenSlot) -> None:
        """Have the replica end the sequence."""
        ...


class SequenceOwner(Protocol):
    """A request, as its sequences' channel knows it."""

    @property
    def request_id(self) -> str:
        """Not unique: it is the client's."""
        ...

    def hear(self, slot: TokenSlot, now_s: float) -> None:
        """A sequence has something to read."""
        ...

    def end(self, slot: TokenSlot, now_s: float) -> None:
        """A sequence has ended by itself; its last tokens may be there to read."""
        ...

    def fail(self, error: HeadwaterError) -> None:
        """A sequence has failed, and so has the request."""
        ...

    def restart(self, error: HeadwaterError) -> None:
        """The channel has ended, and the replica never had the request; ``error`` says why."""
        ...


class TokenSlot:
    """One sequence of a request.

    However slowly it is read, it holds at most `SequenceSpec.max_tokens` tokens.

    Args:
        owner: the request.
        place: of the sequence in its request.
        spec: what is asked.
    """

    __slots__ = (
        "_logprobs", "_logprobs_wanted", "_max_tokens", "_spec", "_tokens", "_tops", "channel", "count", "finish",
        "heard_s", "is_listed", "is_running", "is_sent", "number", "owner", "place", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, owner: SequenceOwner, place: int, spec: SequenceSpec) -> None:
        self.owner = owner
        self.place = place
        self.prompt_tokens = len(spec.prompt)
        self.channel: SequenceChannel | None = None
        """That it was submitted on."""
        self.number = -1
        """Its name there."""
        self.is_running = True
        """Whether there is more to come."""
        self.is_sent = False
        """Whether the replica may have it."""
        self.is_listed = False
        """Whether its owner knows that there is something to read; the owner's own."""
        self.count = 0
        """Tokens that came by now."""
        self.heard_s = 0.0
        """When the last of them did, by the loop's time."""
        self.finish: str | None = None
        """Why it ended, once it has by itself."""
        self._spec: SequenceSpec | None = spec
        self._max_tokens = spec.max_tokens
        self._logprobs_wanted = spec.sampling.logprobs
        self._tokens: list[int] = []
        self._logprobs: list[float] | None = None
        self._tops: list[tuple[tuple[int, float], ...]] | None = None

    def submit(self) -> Submit:
        """The message that asks for it."""
        spec = self._spec
        assert spec is not None
        self.is_sent = True
        return Submit(
            self.number, self.owner.request_id, spec.prompt, spec.max_tokens, spec.sampling, spec.stop_ids,
            spec.ignore_eos,
        )  # fmt: skip

    def forget_spec(self) -> None:
        """The replica has it: it won't be asked for again, and the prompt needn't be kept."""
        self._spec = None

    def take(self, event: SequenceEvent) -> None:
        """Take in what an event brings.

        Raises:
            ContractBroken: it doesn't continue what is here; nothing of it was taken.
        """
        if event.index != self.count:
            did = "repeated tokens" if event.index < self.count else "left tokens out"
            raise self._broken(f"expected token {self.count}, got {event.index}: the engine {did}")
        tokens = event.tokens
        if not tokens:
            return
        count = self.count + len(tokens)
        if count > self._max_tokens:
            raise self._broken(
                f"expected at most {self._max_tokens} tokens, got {count}: the engine went on after the end"
            )
        if self._logprobs_wanted is not None:
            self._take_logprobs(event)
        if self._tokens:
            self._tokens += tokens
        else:
            self._tokens = tokens
        self.count = count

    def read(self) -> Tokens:
        """All that is here, which then isn't any more."""
        news = Tokens(self._tokens, self._logprobs, self._tops, self.finish)
        self._tokens, self._logprobs, self._tops = [], None, None
        return news

    def after_end(self, event: SequenceEvent) -> ContractBroken:
        """What is wrong with an event that comes after the sequence's end."""
        got = f"token {event.index}" if event.tokens else f"another end ({event.finish})"
        return self._broken(f"expected nothing after its end at {self.count} tokens, got {got}")

    def _take_logprobs(self, event: SequenceEvent) -> None:
        counts = {"logprobs": len(event.logprobs or ())}
        if self._logprobs_wanted:
            counts["tops"] = len(event.tops or ())
        for name, got in counts.items():
            if got != len(event.tokens):
                raise self._broken(f"{name}: expected {len(event.tokens)}, one a token, got {got}")
        if self._logprobs is None:
            self._logprobs, self._tops = event.logprobs, event.tops if self._logprobs_wanted else None
        else:
            self._logprobs += event.logprobs or []
            if self._tops is not None:
                self._tops += event.tops or []

    def _broken(self, what: str) -> ContractBroken:
        return ContractBroken(f"sequence {self.place}: {what}")
