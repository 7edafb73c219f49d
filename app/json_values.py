"""An output's elements in JSON, written as Triton does."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import orjson

from app.errors import CallableFailed
from app.json_faults import at, no_json_form
from app.tensors import RawTensor
from inference.datatypes import Datatype, unpack_bytes

__all__ = ["checked_size", "flat_json"]

_NUMPY: Final = orjson.OPT_SERIALIZE_NUMPY


def checked_size(name: str, tensor: RawTensor, datatype: Datatype) -> int:
    """The tensor's size in bytes, once it is known to agree with its shape and declared datatype.

    Raises:
        CallableFailed: it doesn't.
    """
    data = tensor.data
    size_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if tensor.datatype != datatype.name:
        raise CallableFailed(f"output {name!r}, datatype: expected {datatype.name}, got {tensor.datatype}")
    if datatype.size_bytes and size_bytes != (expected := math.prod(tensor.shape) * datatype.size_bytes):
        raise CallableFailed(
            f"output {name!r}: expected {expected} bytes for {datatype.name} of shape {list(tensor.shape)}, "
            f"got {size_bytes}"
        )
    return size_bytes


def flat_json(name: str, tensor: RawTensor, datatype: Datatype) -> bytes:
    """The tensor's elements as a flat JSON array.

    Raises:
        BadRequest: the datatype has no JSON form, or the bytes are no text.
        CallableFailed: the bytes contradict the shape.
    """
    if not datatype.json:
        raise no_json_form("outputs", name, datatype.name)
    if datatype.size_bytes == 0:
        return _strings(name, tensor)
    values = np.frombuffer(tensor.data, datatype.numpy)
    text = orjson.dumps(values, option=_NUMPY)
    # orjson writes null for what JSON lacks, which tells faster than np.isfinite that there is some.
    if datatype.numpy.kind == "f" and b"n" in text:
        return _not_finite(text, values)
    return text


def _not_finite(text: bytes, values: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Replace each null by the literal that Triton writes (and that Python's json reads)."""
    literals = iter(
        [
            b"NaN" if np.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
            for value in values[~np.isfinite(values)]
        ]
    )
    first, *rest = text.split(b"null")
    pieces = [first]
    for piece in rest:
        pieces += (next(literals), piece)
    return b"".join(pieces)


def _strings(name: str, tensor: RawTensor) -> bytes:
    try:
        elements = unpack_bytes(tensor.data)
    except ValueError as error:
        raise CallableFailed(f"output {name!r}, {error}") from None
    if len(elements) != math.prod(tensor.shape):
        raise CallableFailed(
            f"output {name!r}: expected {math.prod(tensor.shape)} elements for shape {list(tensor.shape)}, "
            f"got {len(elements)}"
        )
    try:
        return orjson.dumps([element.decode() for element in elements])
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise at(
            "outputs",
            name,
            f"expected UTF-8 text, to write it as JSON strings, got byte 0x{byte:02x}; ask /infer for binary "
            'data: "parameters": {"binary_data": true} on the output',
        ) from None
