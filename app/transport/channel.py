"""A gateway worker's side of a channel: the frames of all its streams in one replica (`inference.wire.parcel`)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Final

from inference.wire.parcel import PARCEL_WINDOW, STREAM_WINDOW, STREAM_WINDOW_BYTES, ChannelNote, decode_parcel

__all__ = ["StreamChannel", "Taken"]


class Taken:
    """How much of a stream its reader has taken, and what of that the replica knows."""

    __slots__ = ("_bytes", "_frames", "_told_bytes", "_told_frames")

    def __init__(self) -> None:
        self._frames = self._bytes = self._told_frames = self._told_bytes = 0

    def add(self, size_bytes: int) -> bool:
        """Another frame. Returns whether the replica should know: it may soon wait for that."""
        self._frames += 1
        self._bytes += size_bytes
        return (
            self._frames - self._told_frames >= STREAM_WINDOW // 2
            or self._bytes - self._told_bytes >= STREAM_WINDOW_BYTES // 2
        )

    def tell(self) -> tuple[int, int]:
        """Frames and bytes by now, as the replica gets to know them."""
        self._told_frames, self._told_bytes = self._frames, self._bytes
        return self._frames, self._bytes


class StreamChannel:
    """One channel.

    What is to be acknowledged gathers for a turn of the event loop, and while another message is on its way.

    Args:
        post: sends a message that says this. Its answer, which is its end, is told by `end_post`.
    """

    def __init__(self, post: Callable[[ChannelNote], None]) -> None:
        self._post = post
        self._loop = asyncio.get_running_loop()
        self.note: Final = ChannelNote(os.getpid(), time.monotonic_ns())
        """Names it."""
        self._parcels = 0
        self._told_parcels = 0
        self._taken: dict[str, tuple[int, int]] = {}
        """Not told yet."""
        self._is_posting = False

    def opening(self) -> ChannelNote:
        """What opens it."""
        return ChannelNote(self.note.pid, self.note.number, opens=True)

    def open_parcel(self, raw: bytes) -> list[tuple[str, bytes | None]]:
        """Take in a parcel that came: by stream a frame, or None for its end.

        Raises:
            ValueError: it is none.
        """
        self._parcels += 1
        self._post_soon()
        return decode_parcel(raw)

    def note_taken(self, stream: str, taken: Taken) -> None:
        """Have the replica know how far a stream's reader has got."""
        self._taken[stream] = taken.tell()
        self._post_soon()

    def end_post(self) -> None:
        """The last message has been heard."""
        self._is_posting = False
        self._post_soon()

    def _post_soon(self) -> None:
        if not self._is_posting and (self._taken or self._parcels - self._told_parcels >= PARCEL_WINDOW // 2):
            self._is_posting = True
            self._loop.call_soon(self._post_now)

    def _post_now(self) -> None:
        taken, self._taken = self._taken, {}
        self._told_parcels = self._parcels
        self._post(ChannelNote(self.note.pid, self.note.number, parcels=self._parcels, taken=taken))
