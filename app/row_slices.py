"""Cutting tensors along the batch axis, and joining the pieces: by bytes, undecoded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from app.errors import CallableFailed
from app.tensors import RawTensor

__all__ = ["SlicedTensor", "element_count", "join_rows", "longest_row"]


class SlicedTensor:
    """A tensor prepared for being cut: where each row's bytes begin."""

    __slots__ = ("_offsets", "_row_bytes", "_tensor")

    def __init__(self, tensor: RawTensor) -> None:
        self._tensor = tensor
        self._offsets: list[int] = []
        self._row_bytes = 0
        if tensor.datatype == "BYTES" and len(tensor.data):
            self._offsets = _offsets(tensor.data, math.prod(tensor.shape[1:]))
        else:
            self._row_bytes = len(tensor.data) // tensor.shape[0]

    def rows(self, start: int, count: int) -> RawTensor:
        """Some of its rows; a view, not a copy."""
        tensor = self._tensor
        if self._offsets:
            data = tensor.data[self._offsets[start] : self._offsets[start + count]]
        else:
            data = tensor.data[start * self._row_bytes : (start + count) * self._row_bytes]
        return RawTensor(tensor.datatype, (count, *tensor.shape[1:]), data)


def join_rows(name: str, parts: Sequence[RawTensor]) -> RawTensor:
    """One tensor of all the parts' rows.

    Raises:
        CallableFailed: the parts differ in more than the number of rows.
    """
    first = parts[0]
    for part in parts:
        if part.shape[1:] != first.shape[1:]:
            raise CallableFailed(
                f"output {name!r}: the request was larger than max_batch_size, and its parts came back with different "
                f"shapes: {list(first.shape)} and {list(part.shape)}; send fewer rows at once"
            )
    rows = sum(part.shape[0] for part in parts)
    return RawTensor(first.datatype, (rows, *first.shape[1:]), b"".join(part.data for part in parts))


def longest_row(tensor: RawTensor) -> int:
    """Bytes of the longest row of a ``BYTES`` tensor."""
    offsets = _offsets(tensor.data, math.prod(tensor.shape[1:]))
    return max((end - start for start, end in itertools.pairwise(offsets)), default=0)


def element_count(data: bytes | memoryview) -> int | None:
    """How many ``BYTES`` elements these bytes are; None if they end within one."""
    offset, count = 0, 0
    while offset < len(data):
        offset += 4 + int.from_bytes(data[offset : offset + 4], "little")
        count += 1
    return count if offset == len(data) else None


def _offsets(data: bytes | memoryview, elements: int) -> list[int]:
    """Where each row of a ``BYTES`` tensor starts, and the end."""
    offsets = [0]
    offset, count = 0, 0
    from_bytes = int.from_bytes
    while offset < len(data):
        offset += 4 + from_bytes(data[offset : offset + 4], "little")
        count += 1
        if count == elements:
            offsets.append(offset)
            count = 0
    return offsets
