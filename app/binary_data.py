"""An input's bytes that follow the JSON: Triton's binary tensor data extension."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from app.json_faults import at, shape_text
from inference.datatypes import DATATYPES
from inference.signature import TensorSpec

__all__ = ["take_binary"]

_LENGTH: Final = struct.Struct("<I")


def take_binary(
    body: bytes, offset: int, size: int, spec: TensorSpec, shape: Sequence[int], count: int, index: int
) -> memoryview:
    """An input's bytes, checked as far as its datatype lets bytes be wrong.

    Args:
        body: the whole body.
        offset: where the tensor begins in it.
        size: its ``binary_data_size``, not negative.
        spec: the declared input.
        shape: the request's shape, already checked against the declared one.
        count: its number of elements.
        index: the input's place in the request, for messages.

    Returns:
        A view of ``body``: nothing is copied.

    Raises:
        BadRequest: the size contradicts the shape or the body, or the bytes their datatype.
    """
    datatype = DATATYPES[spec.datatype]
    path = f"inputs[{index}].parameters.binary_data_size"
    if datatype.size_bytes and size != count * datatype.size_bytes:
        raise at(
            path,
            spec.name,
            f"expected {count * datatype.size_bytes} bytes for {datatype.name} of shape {shape_text(shape)}, "
            f"got {size}",
        )
    if size > len(body) - offset:
        raise at(
            path,
            spec.name,
            f"expected {size} bytes after the JSON, got {len(body) - offset}; compare the header "
            "Inference-Header-Content-Length, which says how many bytes of the body are JSON (all, without it)",
        )
    data = memoryview(body)[offset : offset + size]
    if datatype.name == "BYTES":
        _check_bytes(data, spec.name, shape, count, index)
    elif datatype.name == "BOOL" and size:
        values = np.frombuffer(data, np.uint8)
        if values.max() > 1:
            place = int((values > 1).argmax())
            raise at(
                f"inputs[{index}]",
                spec.name,
                f"expected bytes of 0 or 1 for BOOL, got {int(values[place])} as element {place} of the binary data",
            )
    return data


def _check_bytes(data: memoryview, name: str, shape: Sequence[int], count: int, index: int) -> None:
    """Check that the lengths before the elements add up, without copying any."""
    path = f"inputs[{index}]"
    offset, end, got = 0, len(data), 0
    length_at = _LENGTH.unpack_from
    while offset < end:
        if got == count:
            raise at(
                path,
                name,
                f"expected {count} elements (shape {shape_text(shape)}) in the binary data, got more: "
                f"{end - offset} bytes are left",
            )
        left = end - offset - 4
        if left < 0:
            raise at(
                path, name, f"expected a 4-byte length before element {got} of the binary data, got {left + 4} bytes"
            )
        (length,) = length_at(data, offset)
        if length > left:
            raise at(
                path,
                name,
                f"expected {length} bytes in element {got} of the binary data, as its length says, got {left}",
            )
        offset += 4 + length
        got += 1
    if got != count:
        raise at(path, name, f"expected {count} elements (shape {shape_text(shape)}) in the binary data, got {got}")
