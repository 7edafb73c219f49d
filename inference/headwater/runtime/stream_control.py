"""The state that a running stream shares with its channel: cancellation, turn, and the reader's progress."""

from __future__ import annotations

import asyncio
from typing import Any

from headwater.wire.parcel import STREAM_WINDOW, STREAM_WINDOW_BYTES

__all__ = ["StreamControl"]


class StreamControl:
    """Cancels a stream, and holds it back while its reader is behind; used in a single event loop.

    Used as a context manager while the current task awaits the model's code. `cancel` interrupts the task only there.
    """

    __slots__ = (
        "_awaiting", "_capacity", "bytes", "frames", "has_turn", "is_cancelled", "name", "taken_bytes", "taken_frames",
    )  # fmt: skip

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.is_cancelled = False
        """Whether the stream must end."""
        self.has_turn = False
        """Whether the stream may hold the pipeline's turn while it sends frames. All other batches wait for the turn:
        then the stream must not wait for its reader."""
        self.frames = self.bytes = 0
        """Frames and bytes sent over a channel."""
        self.taken_frames = self.taken_bytes = 0
        """Frames and bytes that the reader has taken."""
        self._awaiting: asyncio.Task[Any] | None = None
        """The stream's task, while it awaits the model."""
        self._capacity: asyncio.Future[None] | None = None
        """Pending while the stream waits for its reader; None otherwise."""

    def cancel(self) -> None:
        """End the stream. An async generator gets `asyncio.CancelledError` once, where it awaits."""
        if not self.is_cancelled and self._awaiting is not None:
            self._awaiting.cancel()
        self.is_cancelled = True
        self._wake()

    def __enter__(self) -> None:
        self._awaiting = asyncio.current_task()

    def __exit__(self, *error: object) -> None:
        self._awaiting = None

    async def wait(self, event: asyncio.Event) -> bool:
        """Wait for an event, or until the stream is cancelled. Returns False if the stream is cancelled."""
        try:
            if not self.is_cancelled:
                with self:
                    await event.wait()
        except asyncio.CancelledError:
            if not self.is_cancelled:
                raise
        return not self.is_cancelled

    def take(self, frames: int, size_bytes: int) -> None:
        """Note the frames and bytes that the reader has taken so far."""
        self.taken_frames, self.taken_bytes = frames, size_bytes
        if not self.is_full:
            self._wake()

    async def capacity(self) -> None:
        """Wait until the reader's window has capacity for the next frame, or the stream is cancelled."""
        while self.is_full and not self.is_cancelled:
            self._capacity = asyncio.get_running_loop().create_future()
            try:
                await self._capacity
            finally:
                self._capacity = None

    @property
    def is_full(self) -> bool:
        """Whether the reader is behind by a whole window."""
        return (
            self.frames - self.taken_frames >= STREAM_WINDOW or self.bytes - self.taken_bytes >= STREAM_WINDOW_BYTES
        )  # fmt: skip

    def _wake(self) -> None:
        if self._capacity is not None and not self._capacity.done():
            self._capacity.set_result(None)
