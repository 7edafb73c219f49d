"""Requests, answers and tensors as the gateway carries them: raw bytes with a shape, cut and joined undecoded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from headwater.model import Scalar
from headwater_server.errors import CallableFailed, DeadlineExceeded, HeadwaterError, QueueFull, Unavailable

__all__ = [
    "Answer",
    "HeadAnswer",
    "InferRequest",
    "OutputWish",
    "Outputs",
    "RawTensor",
    "SlicedTensor",
    "element_count",
    "join_rows",
    "longest_row",
]


class RawTensor(msgspec.Struct, gc=False):
    """A tensor's bytes in the protocol's binary form: little-endian, C order; ``BYTES`` elements length-prefixed."""

    datatype: str
    shape: tuple[int, ...]
    """Batch axis first."""
    data: bytes | memoryview


class OutputWish(NamedTuple):
    """An output that a request wants, and in which form."""

    name: str
    binary: bool


class InferRequest(msgspec.Struct, gc=False):
    """A request to infer, checked against the model's signature."""

    id: str
    inputs: dict[str, RawTensor]
    """By name; an optional input that was left out is absent."""
    rows: int
    """The batch axis, the same in all inputs; may be 0."""
    outputs: Sequence[OutputWish]
    """The wanted outputs, in the request's order; all declared ones if the request named none."""
    batch_parameters: dict[str, Scalar]
    """Declared parameters per batch, defaults filled in."""
    row_parameters: dict[str, Scalar]
    """Declared parameters per row, defaults filled in; the same value for all rows of this request."""
    heads: tuple[str, ...] = ()
    """A pipeline's wanted heads, in the signature's order, never empty; always empty for other models."""
    priority: int = 0
    """1 is the most urgent; 0: the default."""
    timeout_us: int = 0
    """The client's own deadline in microseconds; 0: none."""
    cancel_id: str = ""
    """The id by which a client may cancel the request (`headwater_server.security.key_check.owned_id`); empty: none."""
    is_bare: bool = False
    """Whether it is one row without the batch axis, and is answered without it."""
    owner: str = ""
    """The name of the API key that it came with; empty: none."""
    is_copy: bool = False
    """Whether no client waits for its answer (`headwater_server.dispatch.shadow`): it gives way to all others."""


Outputs = dict[str, RawTensor]


class HeadAnswer(msgspec.Struct):
    """One result of a request: from one head of a pipeline, or from a plain model (then the name is empty)."""

    head: str
    outputs: Outputs = {}
    """The wanted outputs that the head computes; empty if it failed."""
    error: HeadwaterError | None = None
    took_ms: float = 0.0
    """Time since the request was accepted."""

    @property
    def status(self) -> str:
        """``ok``, ``timeout``, ``unavailable`` or ``failed``."""
        if self.error is None:
            return "ok"
        if isinstance(self.error, DeadlineExceeded):
            return "timeout"
        return "unavailable" if isinstance(self.error, (Unavailable, QueueFull)) else "failed"


class Answer(msgspec.Struct):
    """The whole answer to a request."""

    outputs: Outputs
    """The wanted outputs, without those of omitted heads."""
    omitted: Sequence[HeadAnswer] = ()
    """Heads that failed and have ``on_error: omit``."""
    cache: Literal["", "hit", "miss", "shared"] = ""
    """Of a deployment that keeps answers: whether it was kept, computed, or computed for an equal request."""


class SlicedTensor:
    """A tensor ready to be cut: knows where each row's bytes begin."""

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
        """Some of the tensor's rows; a view, not a copy."""
        tensor = self._tensor
        if self._offsets:
            data = tensor.data[self._offsets[start] : self._offsets[start + count]]
        else:
            data = tensor.data[start * self._row_bytes : (start + count) * self._row_bytes]
        return RawTensor(tensor.datatype, (count, *tensor.shape[1:]), data)


def join_rows(name: str, parts: Sequence[RawTensor]) -> RawTensor:
    """Join the parts' rows into one tensor.

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
    """The number of ``BYTES`` elements in these bytes; None if they end within one."""
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
