"""What goes over a channel: the frames of all the streams that one gateway worker has in a replica.

A stream that is a call of its own stays open in PyTriton, its stub and Triton, which takes 32 KB, and each of its
frames is a response, which takes a millisecond of CPU. So a worker opens one call, its channel, and what its streams
say while a response is on its way goes with the next one, a parcel: MessagePack of `Entry` tuples in the one output
`inference.wire.frame.FRAME`. The call that asks for a stream is answered by nothing but its end.

Nothing is unbounded, though PyTriton's queue of responses is: the worker says how many parcels it has got, and how much
its readers have taken of each stream (`ChannelNote`). Beyond the windows here the replica waits: the channel with what
it sends, and the stream with its next result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

__all__ = [
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
"""Parcels that may be on their way."""
PARCEL_BYTES: Final = 1024 * 1024
"""No further frame is put into a parcel of so many."""
STREAM_WINDOW: Final = 64
"""Frames of one stream that its reader need not have taken."""
STREAM_WINDOW_BYTES: Final = 1024 * 1024
"""The same in bytes; a frame that is larger goes alone."""

Entry = tuple[str, bytes | memoryview | None]
"""A stream's name and its next frame; None: it has said all."""


class ChannelNote(msgspec.Struct, omit_defaults=True):
    """What a worker says of its channel, of which it has one: in a call that asks for a stream, just which."""

    pid: int
    """The worker's process. The replica closes the channel when that ends."""
    number: int
    """Grows from one channel of a worker to its next, with which the one before is closed. Nanoseconds of the system's
    monotonic clock, so that no worker's are those of one before it."""
    opens: bool = False
    """The call stays open, and is answered with parcels."""
    parcels: int = 0
    """How many came by now."""
    taken: dict[str, tuple[int, int]] = {}
    """By stream, frames and bytes that its reader has taken by now."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]])


def encode_parcel(entries: Sequence[Entry]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode a parcel. Returns UINT8 [1, size]."""
    return np.frombuffer(_encoder.encode(entries), np.uint8).reshape(1, -1)


def decode_parcel(raw: bytes | memoryview) -> list[tuple[str, bytes | None]]:
    """Decode what `encode_parcel` wrote. Each frame is in memory of its own, so that none keeps its neighbours.

    Raises:
        ValueError: the bytes are no parcel.
    """
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a parcel: {error}") from error
