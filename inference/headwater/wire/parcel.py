"""Parcels: packed frames of all the streams that one gateway worker has in a replica, sent over its channel.

One call per stream would cost memory in Triton and its stub for as long as the stream lasts, and CPU time per frame. So
a worker opens one call, its channel, and the frames made while a response is on its way leave with the next one, a
parcel: MessagePack of `Entry` tuples in the one output `headwater.wire.frame.FRAME`. The call that asks for a stream is
answered by nothing but its end.

Triton's queue of responses is unbounded, so the worker acknowledges the parcels it has received and what its readers
have taken of each stream (`ChannelNote`). Beyond the windows here the channel waits before it sends, and the stream
before it computes its next result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

__all__ = [
    "LEASE_S",
    "PARCEL_BYTES",
    "PARCEL_WINDOW",
    "STREAM_WINDOW",
    "STREAM_WINDOW_BYTES",
    "ChannelNote",
    "Entry",
    "decode_parcel",
    "encode_parcel",
]

PARCEL_WINDOW: Final = 16
"""The most parcels sent but not acknowledged."""
PARCEL_BYTES: Final = 1024 * 1024
"""A parcel of this size gets no further frame."""
STREAM_WINDOW: Final = 64
"""The most frames of one stream that its reader has not taken."""
STREAM_WINDOW_BYTES: Final = 1024 * 1024
"""The same in bytes; a frame that is larger goes alone."""

LEASE_S: Final = 10.0
"""How long the channel of a worker on another machine stays open without a message about it. The worker sends one at
least three times as often."""

Entry = tuple[str, bytes | memoryview | None]
"""A stream's name and its next frame; None ends the stream."""


class ChannelNote(msgspec.Struct, omit_defaults=True):
    """A worker's message about its one channel; in a call that asks for a stream it only identifies the channel."""

    pid: int
    """The worker's process; the replica closes the channel when it ends. Negative: the worker is on another machine, is
    known by this number, and has a lease (`LEASE_S`)."""
    number: int
    """Identifies the channel; a greater number closes the worker's previous channel. It is taken from the system's
    monotonic clock in nanoseconds, so that a later worker with the same process id can't repeat one."""
    opens: bool = False
    """Whether to open the channel: the call stays open and is answered with parcels."""
    parcels: int = 0
    """The number of parcels received so far."""
    taken: dict[str, tuple[int, int]] = {}
    """For each stream the frames and bytes that its reader has taken so far."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]])


def encode_parcel(entries: Sequence[Entry]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode a parcel. Returns UINT8 [1, size]."""
    return np.frombuffer(_encoder.encode(entries), np.uint8).reshape(1, -1)


def decode_parcel(raw: bytes | memoryview) -> list[tuple[str, bytes | None]]:
    """Decode what `encode_parcel` wrote. Each frame has its own memory, so that none keeps its neighbours alive.

    Raises:
        ValueError: the bytes are not a parcel.
    """
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a parcel: {error}") from error
