"""The state that a running stream shares with its request: cancellation and the pipeline's turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["StreamControl"]


class StreamControl:
    """Cancels one stream; used in one event loop only."""

    __slots__ = ("_awaiting", "has_turn", "is_cancelled")

    def __init__(self) -> None:
        self.is_cancelled = False
        """Whether the stream must end."""
        self.has_turn = False
        """Whether the stream has the pipeline's turn: all others wait for it, so it must not wait for its reader."""
        self._awaiting: asyncio.Task[Any] | None = None
        """The stream's task, while it awaits the model."""

    def cancel(self) -> None:
        """End the stream. An async generator gets `asyncio.CancelledError` where it awaits, once."""
        if not self.is_cancelled and self._awaiting is not None:
            self._awaiting.cancel()
        self.is_cancelled = True

    @contextlib.contextmanager
    def awaiting_model(self) -> Iterator[None]:
        """A context in which the current task awaits the model's code, the only place that `cancel` interrupts."""
        self._awaiting = asyncio.current_task()
        try:
            yield
        finally:
            self._awaiting = None
