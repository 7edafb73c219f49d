"""A sequence of the slot engine, from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.engine import SequenceRequest
from headwater.lm.grammars import Constraint
from headwater.lm.prefix_index import Chain
from headwater.lm.sampling import Sampler

__all__ = ["SlotSequence"]


@dataclass(eq=False)
class SlotSequence:
    """An admitted sequence."""

    request: SequenceRequest
    stops: frozenset[int]
    sampler: Sampler
    chain: Chain
    """The chain of the request's prompt; empty if the prompt is shorter than a block, or may not reuse prefixes."""
    constraint: Constraint | None = None
    cached: int = 0
    """Number of tokens in the cache: of the prompt, computed or copied, and then of the answer without its last
    token."""
    reused: int = 0
    """Number of prompt tokens that were not computed, because a row of the cache held them."""
    scored: int = 0
    """Number of prompt tokens for which the log probability of the following prompt token was reported."""
    answer: list[int] = field(default_factory=list)
    """Tokens of the answer; the last is the next step's input."""
    has_ended: bool = False
    prompt: list[int] = field(init=False)
    """Tokens to compute before the next token: the request's prompt and, if the sequence was put off, its answer so
    far."""

    def __post_init__(self) -> None:
        self.prompt = self.request.prompt

    def restart(self) -> None:
        """Have the sequence computed from its beginning when its turn comes."""
        self.prompt = [*self.request.prompt, *self.answer]
        self.cached = self.reused = 0
