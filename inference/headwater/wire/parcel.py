"""Parcels: packed frames of all streams of a gateway worker in a replica, sent over the worker's channel.

A call per stream would cost memory in Triton and its stub for as long as the stream lasts, and CPU time per frame. A
worker therefore opens a single call to each replica, its channel. Frames that are made while a response is being sent
leave together with the next response. Such a response is a parcel: MessagePack of `Entry` tuples in the output
`headwater.wire.frame.FRAME`. The call that requests a stream ends without a response, unless it is refused.

Triton's queue of responses is unbounded, so the worker acknowledges the parcels that it has received, and the frames
that its readers have taken from each stream (`ChannelNote`). When the windows defined here are exceeded, the channel
waits before it sends a parcel, and the stream waits before it computes its next result.
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
"""A parcel that has reached this size gets no further frames."""
STREAM_WINDOW: Final = 64
"""A stream pauses once its reader has not taken this many frames, unless the stream holds the pipeline's turn."""
STREAM_WINDOW_BYTES: Final = 1024 * 1024
"""The same for the bytes of the frames that the reader has not taken. A frame may be larger."""

LEASE_S: Final = 10.0
"""Seconds that the channel of a worker on another machine stays open without a message from the worker. The worker
sends at least three messages in this time."""

Entry = tuple[str, bytes | memoryview | None]
"""A stream's name and its next frame; None ends the stream."""


class ChannelNote(msgspec.Struct, omit_defaults=True):
    """A worker's message about its channel. In a call that requests a stream it only identifies the channel."""

    pid: int
    """The worker's process id; the replica closes the channel when this process ends. Negative: the worker is on
    another machine, is identified by this number, and has a lease (`LEASE_S`)."""
    number: int
    """Number of the channel; a greater number closes the worker's previous channel. It is taken from the system's
    monotonic clock in nanoseconds, so that a later worker with the same process id can't repeat it."""
    opens: bool = False
    """Whether to open the channel: the call then stays open and is answered with parcels."""
    parcels: int = 0
    """The number of parcels received so far."""
    taken: dict[str, tuple[int, int]] = {}
    """Numbers of frames and of bytes that a stream's reader has taken so far, for streams with news."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]])


def encode_parcel(entries: Sequence[Entry]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode a parcel. Returns UINT8 [1, size]."""
    return np.frombuffer(_encoder.encode(entries), np.uint8).reshape(1, -1)


def decode_parcel(raw: bytes | memoryview) -> list[tuple[str, bytes | None]]:
    """Decode an encoded parcel. Each frame is a separate copy, so that a kept frame doesn't keep the whole parcel.

    Raises:
        ValueError: the bytes are not a parcel.
    """
    try:
        return _decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a parcel: {error}") from error
