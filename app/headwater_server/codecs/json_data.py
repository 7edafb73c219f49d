"""Parses an input's ``data`` in JSON, and packs the elements into the protocol's binary form."""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES
from headwater.signature import TensorSpec
from headwater_server.codecs.faults import at, check_size, key_text, shape_text, shown
from headwater_server.codecs.wording import PARSE_ERRORS, has_array_first, has_float, kind_of, parsed
from headwater_server.errors import BadRequest

__all__ = ["JsonData", "occurrences", "tensor_bytes"]

_STRUCT_CODES: Final = {
    "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q",
    "FP32": "f", "FP64": "d",
}  # fmt: skip
_LENGTH: Final = struct.Struct("<I")
_NESTED: Final = re.compile(rb"\s*\[\s*\[")
# In a list of Python floats an element takes 32 bytes, but its text may take only two ("1,"). Longer texts are parsed
# in pieces of this many bytes, so that a body's memory stays a small multiple of its size.
_PIECE_BYTES: Final = 1 << 16
# A search through this many bytes blocks other threads for less than a millisecond.
_COUNTED_BYTES: Final = 1 << 20
_LARGEST_ELEMENT_BYTES: Final = 8
# The last double that still rounds to a finite float32.
_LARGEST_FLOAT32: Final = math.nextafter(2.0**128 - 2.0**103, 0.0)

_NUMBER: Final = re.compile(rb"[-+.0-9eE]+")
_NOT_ZERO: Final = re.compile(rb"-?[0.]*[1-9]")

_EXACT_BELOW: Final = 2.0**53
"""From this value on, a float may be a different integer than the number that was written."""


class JsonData:
    """Reads the ``data`` of a declared input: flat, or nested as the shape says.

    Args:
        spec: the input.
        rows: whether the data are a single row without a batch axis, in a field with the input's name (as in
            `headwater_server.codecs.generate_body`).
    """

    def __init__(self, spec: TensorSpec, *, rows: bool = False) -> None:
        self._name = spec.name
        here = "send the tensor as binary data (parameters.binary_data_size)"
        self._fix = "POST the tensor to /infer as binary data" if rows else here
        self._datatype = spec.datatype
        self._code = _STRUCT_CODES.get(spec.datatype, "")
        element: Any = {"BOOL": bool, "BYTES": str}.get(spec.datatype)
        if element is None:
            element = float if spec.datatype.startswith("FP") else int
        # The characters of elements' texts. Without these characters a text is a skeleton of brackets and commas.
        self._text = b" \t\r\n" + (b"truefals" if element is bool else b"0123456789+-.eE")
        rank = len(spec.shape) + (not rows)
        self._flat = _arrays(element, 1)
        self._nested = _arrays(element, rank)
        # Some clients write the integer 1 as 1.0: clients generated from a schema, or with a single type of numbers.
        self._flat_floats = _arrays(int | float, 1) if element is int else None
        self._nested_floats = _arrays(int | float, rank) if element is int else None
        self._has_json = DATATYPES[spec.datatype].json

    def pack(self, raw: msgspec.Raw | bytes, shape: Sequence[int], count: int, index: int | None) -> bytes:
        """Parse the text and pack the elements into bytes, in the protocol's binary form.

        Args:
            raw: the text of ``data``.
            shape: the request's shape, already checked against the declared shape.
            count: the number of elements of that shape.
            index: the input's index in the request, for messages; None: the data are in a field with the input's name.

        Raises:
            BadRequest: the datatype has no JSON form, or the elements don't fit the datatype or the shape.
        """
        if not self._has_json:
            size = f'"parameters": {{"binary_data_size": {count * DATATYPES[self._datatype].size_bytes}}}'
            fix = self._fix if index is None else f"send the bytes after the JSON and {size}"
            raise self._bad(index, "", f"expected binary data, got JSON: {self._datatype} has no JSON form; {fix}")
        text = memoryview(raw)
        if len(text) > _PIECE_BYTES:
            if self._datatype != "BYTES":
                return self._pack_in_pieces(bytes(text), shape, count, index)
            check_size(bytes(text))
        try:
            values = self._flat.decode(text)
        except PARSE_ERRORS as error:
            if has_array_first(error):
                values = self._flatten(text, shape, index)
            else:
                values = self._with_floats(text, error, index, 0)
        if len(values) != count:
            raise self._miscounted(index, shape, count, len(values))
        return self._pack(values, index, 0)

    def _pack(self, values: list[Any], index: int | None, start: int) -> bytes:
        try:
            if self._code:
                return struct.pack(f"<{len(values)}{self._code}", *values)
            if self._datatype != "BYTES":
                return bytes(values)  # BOOL and UINT8: each element is a byte
            packed = bytearray()
            for value in values:
                element = value.encode()
                packed += _LENGTH.pack(len(element))
                packed += element
            return bytes(packed)
        except UnicodeEncodeError:
            raise self._bad(index, "", f"expected Unicode text, got a lone surrogate; {self._fix}") from None
        except (struct.error, OverflowError, ValueError):
            raise self._out_of_range(values, index, start) from None

    def _pack_in_pieces(self, text: bytes, shape: Sequence[int], count: int, index: int | None) -> bytes:
        nested = _NESTED.match(text) is not None
        if nested:
            # "[1]" and "[]" have the same skeleton: for a shape without elements, the text must have no elements, and
            # for any other shape the elements are counted below.
            values_left = text.translate(None, b"[], \t\r\n") if count == 0 else b""
            if values_left or not _nested_as(text.translate(None, self._text), shape):
                raise self._nested_otherwise(index, shape)
            if count == 0:
                return b""
            text = b"[%b]" % text.translate(None, b"[]")
        if not text.lstrip().startswith(b"["):
            raise self._bad(index, "", f"expected an array of {self._elements()}, got a single value")
        # The text is known to be valid JSON, and in a flat array of numbers every comma separates two elements.
        packed = io.BytesIO()
        begin, end, got = text.index(b"[") + 1, text.rindex(b"]"), 0
        while begin < end:
            cut = text.find(b",", begin + _PIECE_BYTES, end)
            cut = end if cut < 0 else cut
            piece = b"[%b]" % text[begin:cut]
            try:
                values = self._flat.decode(piece)
            except PARSE_ERRORS as error:
                if nested and not isinstance(error, msgspec.ValidationError):
                    raise self._nested_otherwise(index, shape) from None
                values = self._with_floats(piece, error, index, got)
            packed.write(self._pack(values, index, got))
            got += len(values)
            begin = cut + 1
        if got != count:
            raise self._miscounted(index, shape, count, got)
        return packed.getvalue()

    def _with_floats(self, text: bytes | memoryview, error: Exception, index: int | None, start: int) -> list[Any]:
        """Read a flat array of integers again after an error, this time accepting floats with integral values.

        Raises:
            BadRequest: the error had another cause, or a float isn't an exact integer.
        """
        if self._flat_floats is None or not has_float(error):
            raise self._unreadable(error, index, start) from None
        try:
            values = self._flat_floats.decode(text)
        except PARSE_ERRORS as other:
            raise self._unreadable(other, index, start) from None
        return self._made_integers(values, text, index, lambda place: f"[{start + place}]")

    def _made_integers(
        self, values: list[Any], text: bytes | memoryview, index: int | None, subscript: Callable[[int], str]
    ) -> list[Any]:
        """Convert floats with integral values to integers.

        Args:
            values: the elements, which are changed in place.
            text: the JSON that the elements were read from.
            index: the input's index in the request, for messages.
            subscript: gives an element's subscript, for messages.

        Raises:
            BadRequest: a float has a fraction, or may not be exactly the number that was written.
        """
        written: list[bytes] | None = None
        for place, value in enumerate(values):
            if value.__class__ is float:
                if value == 0:  # the text may be a number that is too small for a float
                    if written is None:
                        written = _NUMBER.findall(text)
                    number = written[place]
                    if _NOT_ZERO.match(number):
                        shown = number[:40].decode()
                        raise self._bad(index, subscript(place), f"expected an integer ({self._datatype}), got {shown}")
                if not value.is_integer():
                    raise self._bad(index, subscript(place), f"expected an integer ({self._datatype}), got {value}")
                if abs(value) >= _EXACT_BELOW:
                    expected = f"expected an integer ({self._datatype}) written without a point and an exponent"
                    raise self._bad(index, subscript(place), f"{expected} where it is beyond 2^53, got {value}")
                values[place] = int(value)
        return values

    def _flatten(self, text: memoryview, shape: Sequence[int], index: int | None) -> list[Any]:
        has_floats = False
        try:
            try:
                level: list[Any] = [self._nested.decode(text)]
            except msgspec.ValidationError as error:
                if self._nested_floats is None or not has_float(error):
                    raise
                has_floats = True
                level = [self._nested_floats.decode(text)]
        except PARSE_ERRORS as error:
            raise self._unreadable(error, index, 0, f", nested as shape {shape_text(shape)} says") from None
        for axis, dim in enumerate(shape):
            for place, part in enumerate(level):
                if len(part) != dim:
                    expected = f"{dim} elements in every array along axis {axis} (shape {shape_text(shape)})"
                    raise self._bad(index, _subscript(place, shape[:axis]), f"expected {expected}, got {len(part)}")
            level = list(chain.from_iterable(level))
        return self._made_integers(level, text, index, lambda place: _subscript(place, shape)) if has_floats else level

    def _elements(self) -> str:
        number = "numbers" if self._datatype.startswith("FP") else "integers"
        return {"BOOL": "booleans", "BYTES": "strings"}.get(self._datatype, number)

    def _bad(self, index: int | None, subscript: str, message: str) -> BadRequest:
        if index is None:
            return at(f"{key_text(self._name)}{subscript}", None, message)
        return at(f"inputs[{index}].data{subscript}", self._name, message)

    def _miscounted(self, index: int | None, shape: Sequence[int], count: int, got: int) -> BadRequest:
        return self._bad(index, "", f"expected {count} elements (shape {shape_text(shape)}), got {got}")

    def _nested_otherwise(self, index: int | None, shape: Sequence[int]) -> BadRequest:
        wanted = self._elements()
        got = f"arrays nested in another way, of unequal lengths, or with an element that isn't one of {wanted}"
        return self._bad(index, "", f"expected {wanted}, flat or nested as shape {shape_text(shape)} says, got {got}")

    def _unreadable(self, error: Exception, index: int | None, start: int, hint: str = "") -> BadRequest:
        wanted = self._elements()
        if isinstance(error, UnicodeDecodeError):
            byte = error.object[error.start]
            return self._bad(index, "", f"expected JSON in UTF-8, got byte 0x{byte:02x} in a string; {self._fix}")
        if isinstance(error, RecursionError):
            return self._bad(index, "", "expected JSON, got arrays or objects nested too deeply")
        fault = parsed(error)
        subscript = fault.path
        if not isinstance(error, msgspec.ValidationError):
            return self._bad(index, f"[{start}:]", f"expected a flat array of {wanted}, got an element of another type")
        if start and subscript:
            subscript = f"[{start + int(subscript[1:-1])}]"
        if fault.is_out_of_range:
            return self._bad(index, subscript, f"expected a number in {self._datatype}'s range, got another number")
        got = fault.got
        if not subscript:
            return self._bad(index, "", f"expected an array of {wanted}, got {kind_of(got)}")
        kind = kind_of(got)
        if got == "array" and not hint:
            hint = " in a flat array"
        expected = "an integer" if wanted == "integers" else f"a {wanted[:-1]}"
        expected = "an array" if fault.expected == "array" else f"{expected} ({self._datatype})"
        return self._bad(index, subscript, f"expected {expected}{hint}, got {kind}")

    def _out_of_range(self, values: list[Any], index: int | None, start: int) -> BadRequest:
        low: int | float = -_LARGEST_FLOAT32
        high: int | float = _LARGEST_FLOAT32
        if self._datatype != "FP32":
            bounds = np.iinfo(DATATYPES[self._datatype].numpy)
            low, high = int(bounds.min), int(bounds.max)
        place = next(place for place, value in enumerate(values) if not low <= value <= high)
        message = f"expected {self._datatype}, {low} to {high}, got {shown(values[place])}, out of range"
        return self._bad(index, f"[{start + place}]", message)


def tensor_bytes(text: bytes, end: int | None = None) -> int:
    """An estimate of the most memory in bytes that decoding a text's arrays into tensors takes. Arrays of numbers are
    packed in pieces, so that only a piece's elements are objects at the same time.

    Args:
        text: the JSON; need not be valid.
        end: the offset in ``text`` at which the JSON ends; None: the text's end.
    """
    end = len(text) if end is None else min(max(end, 0), len(text))
    return occurrences(b",", text, end) * _LARGEST_ELEMENT_BYTES + 2 * end


def occurrences(byte: bytes, text: bytes, end: int) -> int:
    """The number of times that a byte occurs in ``text[:end]``. Counts in pieces, so that other threads can run in
    between."""
    if end <= _COUNTED_BYTES:
        return text.count(byte, 0, end)
    return sum(text.count(byte, start, min(start + _COUNTED_BYTES, end)) for start in range(0, end, _COUNTED_BYTES))


def _arrays(element: Any, rank: int) -> msgspec.json.Decoder[list[Any]]:
    """A decoder of arrays of elements with ``rank`` levels of nesting."""
    kind: Any = element
    for _ in range(rank):
        kind = list[kind]
    return msgspec.json.Decoder(kind)


def _subscript(place: int, shape: Sequence[int]) -> str:
    """The subscript ``[i][j]`` of an element by its place in C order."""
    indices: list[str] = []
    for dim in reversed(shape):
        place, remainder = divmod(place, dim)
        indices.append(f"[{remainder}]")
    return "".join(reversed(indices))


def _nested_as(skeleton: bytes, shape: Sequence[int]) -> bool:
    """Whether a skeleton (the brackets and commas of an array's text) is that of an array of this shape. Allocates no
    more bytes than ``skeleton`` has."""
    rank = next((axis for axis, dim in enumerate(shape) if dim == 0), len(shape) - 1)
    dims = shape[: rank + 1]  # axes after an axis of size 0 don't show in the text
    size = 0
    for dim in reversed(dims):
        size = 2 + dim * size + max(dim - 1, 0)
    if size != len(skeleton):
        return False
    expected = b""  # bytes.join isn't used, because it takes 80 bytes for each part
    for dim in reversed(dims):
        expected = b"[%b]" % ((expected + b",") * dim)[:-1]
    return expected == skeleton
