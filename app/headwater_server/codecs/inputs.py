"""Checks a request's inputs against the model's declared inputs: shapes, and the binary tensors after the JSON."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from headwater.datatypes import DATATYPES
from headwater.signature import TensorSpec
from headwater_server.codecs.faults import at, key_text, shape_text, shown
from headwater_server.codecs.json_data import JsonData
from headwater_server.codecs.tensors import RawTensor

__all__ = ["DeclaredInput", "add_counts", "declared_input", "element_count", "take_binary"]

_LENGTH: Final = struct.Struct("<I")
_MAX_DIM: Final = 2**31 - 1
_MAX_HOLLOW: Final = 2**24
_MAX_BYTES_ELEMENTS: Final = 10**6


class DeclaredInput(NamedTuple):
    """An input that the model declares, prepared for checking requests."""

    spec: TensorSpec
    dims: tuple[int | None, ...]
    """Dimensions, batch axis first; None: the dimension varies."""
    size_bytes: int
    """Bytes of an element; 0 for ``BYTES``."""
    data: JsonData


def add_counts(inputs: dict[str, RawTensor], specs: Iterable[TensorSpec]) -> None:
    """Check the counts of ragged inputs, and add the counts that a client left out: then all rows of its request have
    the size that the tensor has.

    Args:
        inputs: a request's inputs.
        specs: the model's inputs that are `TensorSpec.counts`.

    Raises:
        BadRequest: a count is negative or larger than the tensor.
    """
    for spec in specs:
        tensor = inputs[spec.counts]
        rows, size = tensor.shape[:2]
        counts = inputs.setdefault(spec.name, RawTensor("INT32", (rows, 1), size.to_bytes(4, "little") * rows))
        for row, count in enumerate(np.frombuffer(counts.data, "<i4").tolist()):
            if not 0 <= count <= size:
                expected = f"expected 0 to {size}, the size of input {spec.counts!r}, got {count}"
                raise at("inputs", spec.name, f"row {row}: {expected}")


def declared_input(spec: TensorSpec, *, rows: bool) -> DeclaredInput:
    """Prepare the checks of an input. `JsonData` describes ``rows``."""
    dims = (None, *(None if dim < 0 else dim for dim in spec.shape))
    return DeclaredInput(spec, dims, DATATYPES[spec.datatype].size_bytes, JsonData(spec, rows=rows))


def element_count(shape: list[int], declared: DeclaredInput, index: int | None) -> int:
    """Check a shape against an input's declaration. Returns the number of elements.

    Args:
        shape: the shape that the client sent, batch axis first.
        declared: the input.
        index: the input's index in the request, for messages; None: the data are a single row under the input's name.

    Raises:
        BadRequest: the shape doesn't fit the declaration, has too many ``BYTES`` elements, or has no elements but
            large dimensions.
    """
    dims = declared.dims
    if len(shape) == len(dims):
        count = 1
        for dim, fixed in zip(shape, dims, strict=True):
            if dim != fixed and (fixed is not None or not 0 <= dim <= _MAX_DIM):
                break
            count *= dim
        else:
            if count == 0:
                _check_hollow(shape, declared, index)
            elif count > _MAX_BYTES_ELEMENTS and not declared.size_bytes:
                path, name = _named(declared, index)
                raise at(path, name, f"expected at most {_MAX_BYTES_ELEMENTS} BYTES elements in a request, got {count}")
            return count
    path, name = _named(declared, index)
    if index is None:
        expected = ", ".join(map(str, declared.spec.shape))
        raise at(path, name, f"expected a row of shape [{expected}], got a row of shape {shape_text(shape[1:])}")
    expected = ", ".join(["rows", *map(str, declared.spec.shape)])
    for axis, dim in enumerate(shape):
        if dim < 0:
            raise at(f"{path}[{axis}]", name, f"expected [{expected}] with dimensions of 0 or more, got {shown(dim)}")
        if dim > _MAX_DIM:
            raise at(f"{path}[{axis}]", name, f"expected a dimension of at most {_MAX_DIM}, got {shown(dim)}")
    hint = "; the batch axis comes first" if len(shape) == len(dims) - 1 else ""
    raise at(path, name, f"expected [{expected}], got {shape_text(shape)}{hint}")


def _named(declared: DeclaredInput, index: int | None) -> tuple[str, str | None]:
    if index is None:
        return key_text(declared.spec.name), None
    return f"inputs[{index}].shape", declared.spec.name


def _check_hollow(shape: list[int], declared: DeclaredInput, index: int | None) -> None:
    """Limit the dimensions of a tensor without elements. The tensor itself takes no memory, but a callable may allocate
    memory by its dimensions.

    Raises:
        BadRequest: the product of the non-zero dimensions is over `_MAX_HOLLOW`.
    """
    if math.prod(dim for dim in shape if dim) > _MAX_HOLLOW:
        path, name = _named(declared, index)
        expected = f"expected non-zero dimensions with a product of at most {_MAX_HOLLOW}"
        raise at(path, name, f"{expected}, got {shape_text(shape)}")


def take_binary(
    body: bytes, offset: int, size: int, spec: TensorSpec, shape: Sequence[int], count: int, index: int
) -> memoryview:
    """Take an input's binary data from a body, and check them against the input's datatype.

    Args:
        body: the whole body.
        offset: the offset in ``body`` at which the tensor begins.
        size: the input's ``binary_data_size``, not negative.
        spec: the declared input.
        shape: the request's shape, already checked against the declared shape.
        count: the number of elements of that shape.
        index: the input's index in the request, for messages.

    Returns:
        A view of ``body``: nothing is copied.

    Raises:
        BadRequest: the size contradicts the shape or the body, or the bytes contradict the datatype.
    """
    datatype = DATATYPES[spec.datatype]
    fault = ""
    if datatype.size_bytes and size != count * datatype.size_bytes:
        expected = f"{count * datatype.size_bytes} bytes for {datatype.name} of shape {shape_text(shape)}"
        fault = f"expected {expected}, got {size}"
    elif size > len(body) - offset:
        fault = (
            f"expected {size} bytes after the JSON, got {len(body) - offset}; compare the header "
            "Inference-Header-Content-Length, which says how many bytes of the body are JSON (without it: all)"
        )
    if fault:
        raise at(f"inputs[{index}].parameters.binary_data_size", spec.name, fault)
    data = memoryview(body)[offset : offset + size]
    if datatype.name == "BYTES":
        fault = _bytes_fault(data, shape, count)
    elif datatype.name == "BOOL" and size:
        values = np.frombuffer(data, np.uint8)
        if values.max() > 1:
            place = int((values > 1).argmax())
            fault = f"expected bytes of 0 or 1 for BOOL, got {int(values[place])} as element {place} of the binary data"
    if fault:
        raise at(f"inputs[{index}]", spec.name, fault)
    return data


def _bytes_fault(data: memoryview, shape: Sequence[int], count: int) -> str:
    """The first fault in the lengths of ``BYTES`` elements, for a message; empty if all lengths are correct. The
    elements are not copied."""
    offset, end, got = 0, len(data), 0
    length_at = _LENGTH.unpack_from
    while offset < end and got < count:
        rest_bytes = end - offset - 4
        if rest_bytes < 0:
            return f"expected a 4-byte length before element {got} of the binary data, got {rest_bytes + 4} bytes"
        (length,) = length_at(data, offset)
        if length > rest_bytes:
            return f"expected {length} bytes in element {got} of the binary data, as its length says, got {rest_bytes}"
        offset += 4 + length
        got += 1
    if offset == end and got == count:
        return ""
    more = f"more: {end - offset} bytes are left" if offset < end else str(got)
    return f"expected {count} elements (shape {shape_text(shape)}) in the binary data, got {more}"
