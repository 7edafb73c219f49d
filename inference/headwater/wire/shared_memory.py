"""Large tensors of a call, in memory shared by the gateway and the replica.

Triton copies a tensor some six times in each direction. Large tensors bypass Triton: the gateway writes them into a
segment, an anonymous file (``memfd_create``) that the replica opens under ``/proc``, and sends placeholders through
Triton. The replica may put the answer's large tensors into the same segment, behind the inputs.

Segments need no sweep: the kernel removes the file when the last process that has it open ends. ``/dev/shm`` isn't
used, because its size, 64 MB in a container, would be a limit.

Tensors in frames (`headwater.wire.frame`), the inputs of streams, and ``BYTES`` are sent inline, not in segments.

From ``answer_at`` on a segment holds the length (little-endian uint32) of a JSON object
``{"output": [offset, [shape]]}``, or 0 if there is no object; the offset at which the outputs end (uint64); the object;
and, at ``answer_at`` + `ANSWER_HEAD_BYTES`, the outputs.

The segment of a replica on another machine is a file on that machine. The replica's port
(`headwater_server.cluster.port`) creates the file, replaces `ELSEWHERE` with its path, and sends the outputs that the
replica wrote into it after Triton's answer.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES
from headwater.signature import TensorSpec
from headwater.wire.arrays import Array

__all__ = [
    "ALIGNMENT",
    "ANSWER_HEAD_BYTES",
    "ASSUMED_DIMENSION",
    "ELSEWHERE",
    "SHARED_FROM_BYTES",
    "MappedCall",
    "SharedCall",
    "aligned",
    "batch_bytes",
    "bound_shape",
    "left_bytes",
    "placed_outputs",
    "stand_in_shape",
]

SHARED_FROM_BYTES: Final = 64 * 1024
"""Tensors of at least this size go into a segment; smaller tensors are faster through Triton."""
ALIGNMENT: Final = 64
"""Alignment of every tensor in a segment."""
STAND_IN_BYTES: Final = 256
"""The most bytes per row of a placeholder."""
ANSWER_HEAD_BYTES: Final = 4096
"""Bytes reserved for the JSON object, its length and the offset at which the outputs end."""
ASSUMED_DIMENSION: Final = 64
"""The assumed size of a dimension that varies, and the assumed bytes of a ``BYTES`` element."""

ELSEWHERE: Final = "headwater:elsewhere"
"""Stands for the path of a segment on the replica's machine, which the replica's port has yet to create."""

_ANSWER: Final = struct.Struct("<IQ")
_Placed = dict[str, tuple[int, list[int]]]
_placed_decoder = msgspec.json.Decoder(_Placed)


class SharedCall(msgspec.Struct):
    """The location of a call's large tensors."""

    path: str
    """The segment's path in its owner's ``/proc`` folder; on another machine the path of a file, or `ELSEWHERE`."""
    size_bytes: int
    inputs: _Placed
    """Offset and shape (with the batch axis) of each input, by name."""
    answer_at: int
    """The offset at which the answer begins."""


class MappedCall:
    """A call's segment in the replica. It is mapped only during the call, because its owner reuses it.

    Raises:
        OSError: the segment can't be opened: the gateway runs as another user, or in another process namespace.
    """

    def __init__(self, shared: SharedCall) -> None:
        fd = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # MAP_POPULATE maps all pages at once: page faults during the copy would cost more than the copy itself.
            self._map = mmap.mmap(fd, shared.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(fd)
        self.inputs = shared.inputs
        self._answer_at = shared.answer_at

    def input(self, spec: TensorSpec) -> Array:
        """A read-only view of an input, valid until the call is answered."""
        offset, shape = self.inputs[spec.name]
        array: Array = np.ndarray(shape, DATATYPES[spec.datatype].numpy, self._map, offset)
        array.flags.writeable = False
        return array

    def leave(self, outputs: Mapping[str, Array]) -> set[str]:
        """Write large outputs into the segment, as far as they fit. Returns the names of the written outputs."""
        at = self._answer_at
        offset = end = at + ANSWER_HEAD_BYTES
        placed: _Placed = {}
        for name, array in outputs.items():
            if array.dtype.hasobject or array.nbytes < SHARED_FROM_BYTES or offset + array.nbytes > len(self._map):
                continue
            np.copyto(np.ndarray(array.shape, array.dtype, self._map, offset), array)
            placed[name] = (offset, list(array.shape))
            end = offset + array.nbytes
            offset = aligned(end)
        if placed:
            text = msgspec.json.encode(placed)
            if len(text) > ANSWER_HEAD_BYTES - _ANSWER.size:
                return set()
            self._map[at : at + _ANSWER.size + len(text)] = _ANSWER.pack(len(text), end) + text
        return set(placed)


def bound_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The row shape bound to Triton: the declared shape if a placeholder of that shape is small enough, otherwise
    dimensions of any size. The gateway and the runner check tensors against the declared shape."""
    fixed = math.prod(dim for dim in spec.shape if dim > 0)
    if fixed * DATATYPES[spec.datatype].size_bytes <= STAND_IN_BYTES:
        return tuple(spec.shape)
    return (-1,) * len(spec.shape)


def stand_in_shape(spec: TensorSpec, rows: int) -> list[int]:
    """The shape, batch axis first, of a large tensor's placeholder."""
    return [rows, *(1 if dim < 0 else dim for dim in bound_shape(spec))]


def aligned(size_bytes: int) -> int:
    """``size_bytes``, rounded up to a multiple of `ALIGNMENT`."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def placed_outputs(segment: memoryview, answer_at: int) -> _Placed:
    """The outputs in a segment: offset and shape (with the batch axis), by name; empty if the segment holds no object.

    Raises:
        msgspec.DecodeError: the object is invalid.
    """
    length, _ = _ANSWER.unpack_from(segment, answer_at)
    if not length:
        return {}
    start = answer_at + _ANSWER.size
    return _placed_decoder.decode(segment[start : start + length])


def left_bytes(segment: memoryview, answer_at: int) -> int:
    """The size of the replica's answer in a segment: bytes from ``answer_at`` on; 0 if the segment holds no answer.

    Raises:
        ValueError: the answer would end outside of the segment.
    """
    length, end = _ANSWER.unpack_from(segment, answer_at)
    if not length:
        return 0
    if not answer_at + ANSWER_HEAD_BYTES <= end <= len(segment):
        raise ValueError(f"expected an answer between {answer_at} and {len(segment)}, got its end at {end}")
    return int(end) - answer_at


def batch_bytes(specs: Iterable[TensorSpec], rows: int) -> int:
    """Estimated size in bytes of ``rows`` rows of tensors with these specifications."""
    return rows * sum(
        (DATATYPES[spec.datatype].size_bytes or ASSUMED_DIMENSION)
        * math.prod(ASSUMED_DIMENSION if dim < 0 else dim for dim in spec.shape)
        for spec in specs
    )
