"""What a deployment answers: outputs, and how each head of a pipeline fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.errors import DeadlineExceeded, HeadwaterError, QueueFull, Unavailable
from app.tensors import RawTensor

__all__ = ["Answer", "HeadAnswer", "Outputs"]

Outputs = dict[str, RawTensor]


@dataclass(slots=True)
class HeadAnswer:
    """One result of a request: of one head of a pipeline, or of a model that is none (then the name is empty)."""

    head: str
    outputs: Outputs = field(default_factory=dict)
    """Those of the wanted outputs that it computes; empty if it failed."""
    error: HeadwaterError | None = None
    took_ms: float = 0.0
    """Since the request was taken in."""

    @property
    def status(self) -> str:
        """``ok``, ``timeout``, ``unavailable`` or ``failed``."""
        if self.error is None:
            return "ok"
        if isinstance(self.error, DeadlineExceeded):
            return "timeout"
        return "unavailable" if isinstance(self.error, (Unavailable, QueueFull)) else "failed"


class Answer(NamedTuple):
    """The whole answer to a request."""

    outputs: Outputs
    """The wanted ones, less those of omitted heads."""
    omitted: Sequence[HeadAnswer] = ()
    """Heads that failed and say ``on_error: omit``."""
