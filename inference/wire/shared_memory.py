"""Large tensors of one call, left in memory that the gateway and the replica share.

The way through Triton copies a tensor some six times in each direction. A large one goes past it: the gateway writes it
into a segment of its own, an anonymous file (``memfd_create``) which the replica opens under ``/proc``, and through
Triton goes a placeholder. The answer's large tensors may be left in the same segment, behind the inputs.

Nothing of it has to be swept: the file ends with the last process that has it open. ``/dev/shm`` isn't used, so that
its size, 64 MB in a container, is no limit.

In a segment stand, from ``answer_at`` on: the length (little-endian uint32) of a JSON object
``{"output": [offset, [shape]]}``, 0 if there is none; the object; from `ANSWER_HEAD_BYTES` further on, the outputs.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np

from inference.datatypes import DATATYPES
from inference.signature import TensorSpec
from inference.wire.arrays import Array

__all__ = [
    "ALIGNMENT",
    "ANSWER_HEAD_BYTES",
    "SHARED_FROM_BYTES",
    "MappedCall",
    "SharedCall",
    "aligned",
    "bound_shape",
    "placed_outputs",
    "stand_in_shape",
]

SHARED_FROM_BYTES: Final = 64 * 1024
"""A tensor from here on is left in a segment; a smaller one is faster on the way that all take."""
ALIGNMENT: Final = 64
"""Of every tensor in a segment."""
STAND_IN_BYTES: Final = 256
"""What may travel of a row that is left in a segment."""
ANSWER_HEAD_BYTES: Final = 4096
"""Room for the JSON of what an answer left."""

_LENGTH: Final = struct.Struct("<I")
_Placed = dict[str, tuple[int, list[int]]]
_placed_decoder = msgspec.json.Decoder(_Placed)


class SharedCall(msgspec.Struct):
    """Where a call's large tensors are."""

    path: str
    """Of the segment, as its owner's ``/proc`` names it."""
    size_bytes: int
    inputs: _Placed
    """By name: offset, and shape with the batch axis."""
    answer_at: int
    """From here on outputs may be left."""


class MappedCall:
    """A call's segment in the replica; mapped for the time of the call only, since its owner uses it for others.

    Args:
        shared: says where.

    Raises:
        OSError: it can't be opened: the gateway runs as another user, or in another process namespace.
    """

    def __init__(self, shared: SharedCall) -> None:
        fd = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # All its pages at once: one after the other costs more than the copying.
            self._map = mmap.mmap(fd, shared.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(fd)
        self.inputs = shared.inputs
        self._answer_at = shared.answer_at

    def input(self, spec: TensorSpec) -> Array:
        """A view of an input. What it shows changes once the call is answered."""
        offset, shape = self.inputs[spec.name]
        array: Array = np.ndarray(shape, DATATYPES[spec.datatype].numpy, self._map, offset)
        array.flags.writeable = False
        return array

    def leave(self, outputs: Mapping[str, Array]) -> set[str]:
        """Leave those outputs in the segment that are large and that there is room for. Returns their names."""
        at = self._answer_at
        offset = at + ANSWER_HEAD_BYTES
        placed: _Placed = {}
        for name, array in outputs.items():
            if array.dtype.hasobject or array.nbytes < SHARED_FROM_BYTES or offset + array.nbytes > len(self._map):
                continue
            np.copyto(np.ndarray(array.shape, array.dtype, self._map, offset), array)
            placed[name] = (offset, list(array.shape))
            offset += aligned(array.nbytes)
        if placed:
            text = msgspec.json.encode(placed)
            if len(text) > ANSWER_HEAD_BYTES - _LENGTH.size:
                return set()
            self._map[at : at + _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text
        return set(placed)


def bound_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape of a row under which Triton knows a tensor: as declared, if what stands in for a large one can have it,
    and any otherwise. The gateway and the runner check the declared one."""
    fixed = math.prod(dim for dim in spec.shape if dim > 0)
    if fixed * DATATYPES[spec.datatype].size_bytes <= STAND_IN_BYTES:
        return tuple(spec.shape)
    return (-1,) * len(spec.shape)


def stand_in_shape(spec: TensorSpec, rows: int) -> list[int]:
    """The shape, batch axis first, of what travels in the place of a large tensor."""
    return [rows, *(1 if dim < 0 else dim for dim in bound_shape(spec))]


def aligned(size_bytes: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def placed_outputs(segment: memoryview, answer_at: int) -> _Placed:
    """What a replica left in a segment: by name the offset, and the shape with the batch axis.

    Raises:
        msgspec.DecodeError: what is there is no such thing.
    """
    (length,) = _LENGTH.unpack_from(segment, answer_at)
    if not length:
        return {}
    start = answer_at + _LENGTH.size
    return _placed_decoder.decode(segment[start : start + length])
