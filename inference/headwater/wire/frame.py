"""Frames: the decoupled Triton responses of a fused pipeline or a streaming model.

Triton's requested outputs are per request, and each costs a copy of its own; so a frame is one output, `FRAME`:
``UINT8 [1, size]``. Its bytes are the length of a MessagePack header (little-endian uint32), the header, and the
tensors' bytes in the protocol's binary form, in the header's order.
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
    """One head's answer for the rows of the batch that want it, in their order."""

    head: str
    rows: int
    compute_us: int
    """Time of the head's step, in microseconds."""
    failures: list[tuple[int, int, str]] = []
    """(index among these rows, `headwater.wire.report.Status`, message); the tensors hold zeros in failed rows."""
    tensors: list[FrameTensor] = []
    """Empty if every row failed."""
    is_last: bool = True
    """Whether this is the head's final piece for these rows; in a stream only the last piece."""


class CacheCount(msgspec.Struct, array_like=True):
    """What became of rows where a step's outputs are kept, since the call's last frame."""

    hits: int = 0
    """Rows whose outputs were there."""
    misses: int = 0
    """Rows that were computed."""
    evictions: int = 0
    """Rows that made way for others."""
    size_bytes: int = 0
    """Memory of all rows that the replica keeps now."""


class StepCount(msgspec.Struct, array_like=True):
    """A step's counters since the call's last frame."""

    step: str
    calls: int
    """Calls without retries and warm-up."""
    retries: int
    compute_us: int
    """Compute time in microseconds, including retries."""
    cache: CacheCount | None = None
    """Of a step whose outputs are kept."""


class Frame(msgspec.Struct, array_like=True):
    """Everything new since the call's last frame."""

    pieces: list[Piece]
    counts: list[StepCount]
    held_rows: int = 0
    """Rows of all gateway workers that the replica has now, this call's included, computed or waiting."""


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
    """Decode what `encode_frame` wrote: the frame, and for each piece its tensors' bytes as views of ``raw``.

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
