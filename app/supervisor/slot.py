"""See app/supervisor/slot.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from app.supervisor.host import Launched
from app.supervisor.replica_memory import Place

__all__ = ["FIRST_BACKOFF_S", "LAST_BACKOFF_S", "STEADY_AFTER_S", "Slot"]


FIRST_BACKOFF_S: Final = 0.5

LAST_BACKOFF_S: Final = 30.0

STEADY_AFTER_S: Final = 60.0
"""A process that lived this long is replaced at once, without the backoff of earlier crashes."""


@dataclass(eq=False)
class Slot:
    """A place that one replica after another has."""

    launched: Launched | None = None
    place: Place | None = None
    """Room that was found for the next."""
    is_kept: bool = True
    """Whether a replica that ends is replaced."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def release(self) -> None:
        """Let no other replica follow."""
        self.is_kept = False
        self.released.set()
