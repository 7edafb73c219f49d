"""Frames: the answers of a fused pipeline, or of a model that streams or has a coroutine function as ``__call__``.

Triton's requested outputs are fixed per request, and Triton copies each output separately. A frame is therefore a
single output of a decoupled response, `FRAME`: ``UINT8 [1, size]``. Its bytes are the length of a MessagePack header
(little-endian uint32), the header, and the tensors' bytes in the protocol's binary form, in the header's order. Frames
of streams may be sent in parcels (`headwater.wire.parcel`) instead.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from headwater.datatypes import pack_bytes
from headwater.signature import TensorSpec
from headwater.wire.arrays import Array

__all__ = [
    "FRAME",
    "CacheCount",
    "Frame",
    "FrameTensor",
    "Piece",
    "StepCount",
    "decode_frame",
    "encode_frame",
    "tensor_bytes",
]

FRAME: Final = "headwater_frame"

_LENGTH: Final = struct.Struct("<I")


class FrameTensor(msgspec.Struct, array_like=True):
    """One tensor of a piece."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """Batch axis first."""
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Piece(msgspec.Struct, array_like=True):
    """One head's answer for the rows of the batch that requested this head, in the batch's order."""

    head: str
    rows: int
    compute_us: int
    """Time of the head's step, in microseconds."""
    failures: list[tuple[int, int, str]] = []
    """For each failed row: its index in this piece, its `headwater.wire.report.Status`, and a message. In failed rows
    the tensors hold zeros."""
    tensors: list[FrameTensor] = []
    """Empty if every row failed, and in the final piece of a stream that ended without a failure."""
    is_last: bool = True
    """Whether this is the head's final piece for these rows. In a stream, earlier pieces have False."""


class CacheCount(msgspec.Struct, array_like=True):
    """Counters of the replica's cache of a step's outputs, since their last report in any call."""

    hits: int = 0
    """Rows that were answered with cached outputs."""
    misses: int = 0
    """Rows that were computed."""
    evictions: int = 0
    """Rows removed from the cache to make room."""
    size_bytes: int = 0
    """Memory of all cached rows now."""


class StepCount(msgspec.Struct, array_like=True):
    """A step's counters since the call's last frame."""

    step: str
    calls: int
    """Calls, not counting retries and warm-up."""
    retries: int
    compute_us: int
    """Compute time in microseconds, including retries."""
    cache: CacheCount | None = None
    """Counters of the step's cache; None if the cache wasn't used."""


class Frame(msgspec.Struct, array_like=True):
    """The results and counters since the call's last frame."""

    pieces: list[Piece]
    counts: list[StepCount]
    held_rows: int = 0
    """Rows of all gateway workers that the replica is computing or has waiting now, including this call's rows; 0 if
    the call was refused."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def tensor_bytes(spec: TensorSpec, array: Array) -> bytes:
    """The bytes of an array in wire form."""
    if spec.datatype == "BYTES":
        return pack_bytes(array.ravel().tolist())
    return array.tobytes()


def encode_frame(frame: Frame, data: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode a frame and the bytes of all its tensors, in order. Returns UINT8 [1, size]."""
    head = _encoder.encode(frame)
    raw = b"".join((_LENGTH.pack(len(head)), head, *data))
    return np.frombuffer(raw, np.uint8).reshape(1, -1)


def decode_frame(raw: bytes | memoryview) -> tuple[Frame, list[list[memoryview]]]:
    """Decode an encoded frame: returns the frame, and for each piece its tensors' bytes as views of ``raw``.

    Raises:
        ValueError: the bytes are not a frame.
    """
    view = memoryview(raw)
    if len(view) < _LENGTH.size:
        raise ValueError(f"expected a frame, got {len(view)} bytes")
    offset = _LENGTH.size + _LENGTH.unpack_from(view)[0]
    try:
        frame = _decoder.decode(view[_LENGTH.size : offset])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"expected a frame's head: {error}") from error
    data = []
    for piece in frame.pieces:
        views = []
        for tensor in piece.tensors:
            views.append(view[offset : offset + tensor.size_bytes])
            offset += tensor.size_bytes
        data.append(views)
    if offset != len(view):
        raise ValueError(f"expected a frame of {offset} bytes, got {len(view)}")
    return frame, data
