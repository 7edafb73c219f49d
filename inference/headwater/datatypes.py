"""Triton's tensor datatypes and their wire forms.

Source: the Open Inference Protocol's table of tensor data types and Triton's binary tensor data extension.

Besides Python's standard library this module imports only numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = [
    "DATATYPES",
    "Datatype",
    "bf16_to_float32",
    "float32_to_bf16",
    "pack_bytes",
    "unpack_bytes",
]


class Datatype(NamedTuple):
    """A tensor datatype of the protocol."""

    name: str
    """Name in requests, for example ``FP32``."""
    size_bytes: int
    """Bytes per element; 0 for ``BYTES``, whose elements differ in size."""
    numpy: np.dtype[Any]
    """The numpy type of an array of this datatype. A ``BF16`` array holds bit patterns, a ``BYTES`` array holds
    objects."""
    wire: str
    """The datatype under which the tensor is bound to Triton: the datatype itself, except for ``BF16``, which numpy
    lacks."""
    config: str
    """Name in Triton's model configuration."""
    json: bool
    """Whether the protocol has a JSON form for the datatype."""


def _row(name: str, numpy: str, *, wire: str = "", config: str = "", json: bool = True) -> Datatype:
    dtype = np.dtype(numpy)
    size_bytes = 0 if dtype.hasobject else dtype.itemsize
    return Datatype(name, size_bytes, dtype, wire or name, config or f"TYPE_{name}", json)


DATATYPES: Final[dict[str, Datatype]] = {
    row.name: row
    for row in (
        _row("BOOL", "?"),
        _row("UINT8", "u1"),
        _row("UINT16", "<u2"),
        _row("UINT32", "<u4"),
        _row("UINT64", "<u8"),
        _row("INT8", "i1"),
        _row("INT16", "<i2"),
        _row("INT32", "<i4"),
        _row("INT64", "<i8"),
        _row("FP16", "<f2", json=False),
        _row("FP32", "<f4"),
        _row("FP64", "<f8"),
        _row("BF16", "<u2", wire="UINT16", json=False),
        _row("BYTES", "O", config="TYPE_STRING"),
    )
}
"""Every datatype by its protocol name."""

_LENGTH = struct.Struct("<I")


def pack_bytes(elements: Iterable[bytes]) -> bytes:
    """Encode ``BYTES`` elements as the protocol does: each is preceded by its length, a little-endian uint32."""
    parts: list[bytes] = []
    for element in elements:
        parts.append(_LENGTH.pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def unpack_bytes(raw: bytes | memoryview) -> list[bytes]:
    """Decode the bytes that `pack_bytes` wrote.

    Raises:
        ValueError: the bytes end within an element or its length; the message has the element's index.
    """
    elements: list[bytes] = []
    view = memoryview(raw)
    offset, end = 0, len(view)
    while offset < end:
        if end - offset < 4:
            raise ValueError(f"element {len(elements)}: {end - offset} bytes left where its 4-byte length should be")
        (length,) = _LENGTH.unpack_from(view, offset)
        offset += 4
        if length > end - offset:
            raise ValueError(f"element {len(elements)}: its length says {length} bytes, {end - offset} are left")
        elements.append(bytes(view[offset : offset + length]))
        offset += length
    return elements


def bf16_to_float32(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Widen bfloat16 bit patterns to float32. The conversion is exact and keeps the shape."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bf16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Round float32 to bfloat16 bit patterns, to nearest, ties to even. NaN stays NaN. The shape is kept, except that a
    scalar becomes [1]."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x0040)
    return np.where(np.isnan(values), quiet_nan, rounded).astype(np.uint16)
