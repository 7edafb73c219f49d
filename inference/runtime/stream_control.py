"""What a running stream and whoever asked for it know of each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["StreamControl"]


class StreamControl:
    """Cancels one stream. Everything happens in one event loop."""

    __slots__ = ("_awaiting", "has_turn", "is_cancelled")

    def __init__(self) -> None:
        self.is_cancelled = False
        """Whether the stream shall end."""
        self.has_turn = False
        """Whether all others wait for it: then it must wait for nobody."""
        self._awaiting: asyncio.Task[Any] | None = None
        """The task that runs the stream, while it awaits the model."""

    def cancel(self) -> None:
        """Nobody wants more of it. An async generator gets `asyncio.CancelledError` where it awaits, once."""
        if not self.is_cancelled and self._awaiting is not None:
            self._awaiting.cancel()
        self.is_cancelled = True

    @contextlib.contextmanager
    def awaiting_model(self) -> Iterator[None]:
        """While the current task awaits the model's own code, which `cancel` interrupts. It interrupts nothing else."""
        self._awaiting = asyncio.current_task()
        try:
            yield
        finally:
            self._awaiting = None
