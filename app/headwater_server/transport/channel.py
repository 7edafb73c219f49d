"""A gateway worker's end of a channel, which carries the frames of all the worker's streams from one replica.

See `headwater.wire.parcel` for the protocol.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from typing import Final

from headwater.wire.parcel import LEASE_S, PARCEL_WINDOW, STREAM_WINDOW, STREAM_WINDOW_BYTES, ChannelNote, decode_parcel

__all__ = ["StreamChannel", "Taken"]

_LEASED: Final = -1 - secrets.randbits(62)
"""Identifies this process to replicas on other machines."""


class Taken:
    """Counts the frames and bytes that a stream's reader has taken, and how many of them are acknowledged to the
    replica."""

    __slots__ = ("_acked_bytes", "_acked_frames", "_bytes", "_frames")

    def __init__(self) -> None:
        self._frames = self._bytes = self._acked_frames = self._acked_bytes = 0

    def add(self, size_bytes: int) -> bool:
        """Count a frame. Returns whether to acknowledge now, because the replica may soon stop and wait for it."""
        self._frames += 1
        self._bytes += size_bytes
        return (
            self._frames - self._acked_frames >= STREAM_WINDOW // 2
            or self._bytes - self._acked_bytes >= STREAM_WINDOW_BYTES // 2
        )

    def acknowledge(self) -> tuple[int, int]:
        """The frames and bytes taken so far; from now on they count as acknowledged."""
        self._acked_frames, self._acked_bytes = self._frames, self._bytes
        return self._frames, self._bytes


class StreamChannel:
    """A channel to a replica.

    Acknowledgements are gathered for a turn of the event loop, and while the previous message is unanswered.

    Args:
        post: sends a message with this note; once the message is answered, call `end_post`.
        is_leased: whether the replica is on another machine. It can't see this process end, so the channel has a lease.
    """

    def __init__(self, post: Callable[[ChannelNote], None], *, is_leased: bool = False) -> None:
        self._post = post
        self._loop = asyncio.get_running_loop()
        self.note: Final = ChannelNote(_LEASED if is_leased else os.getpid(), time.monotonic_ns())
        """Identifies the channel."""
        self._parcels = 0
        self._acked_parcels = 0
        self._taken: dict[str, tuple[int, int]] = {}
        """Frames and bytes to acknowledge, by stream."""
        self._is_posting = False
        self._timer = self._loop.call_later(LEASE_S / 3, self._renew) if is_leased else None

    def close(self) -> None:
        """Stop renewing the lease."""
        if self._timer is not None:
            self._timer.cancel()

    def opening(self) -> ChannelNote:
        """The note that opens the channel."""
        return ChannelNote(self.note.pid, self.note.number, opens=True)

    def open_parcel(self, raw: bytes) -> list[tuple[str, bytes | None]]:
        """Unpack a parcel. Returns pairs of a stream and a frame; None in place of a frame is the stream's end.

        Raises:
            ValueError: the bytes are no parcel.
        """
        self._parcels += 1
        self._post_soon()
        return decode_parcel(raw)

    def note_taken(self, stream: str, taken: Taken) -> None:
        """Acknowledge the frames that a stream's reader has taken."""
        self._taken[stream] = taken.acknowledge()
        self._post_soon()

    def end_post(self) -> None:
        """Note that the last message was answered."""
        self._is_posting = False
        self._post_soon()

    def _post_soon(self) -> None:
        if not self._is_posting and (self._taken or self._parcels - self._acked_parcels >= PARCEL_WINDOW // 2):
            self._is_posting = True
            self._loop.call_soon(self._post_now)

    def _renew(self) -> None:
        self._timer = self._loop.call_later(LEASE_S / 3, self._renew)
        if not self._is_posting:  # else a message in flight renews the lease
            self._is_posting = True
            self._post_now()

    def _post_now(self) -> None:
        taken, self._taken = self._taken, {}
        self._acked_parcels = self._parcels
        self._post(ChannelNote(self.note.pid, self.note.number, parcels=self._parcels, taken=taken))
