"""Requests, answers and tensors in the gateway. A tensor is raw bytes with a shape: it is cut and joined undecoded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from headwater.datatypes import DATATYPES, pack_bytes, unpack_bytes
from headwater.model import Scalar
from headwater.signature import COUNT, TensorSpec
from headwater_server.errors import CallableFailed, DeadlineExceeded, HeadwaterError, QueueFull, Unavailable

__all__ = [
    "Answer",
    "HeadAnswer",
    "InferRequest",
    "OutputWish",
    "Outputs",
    "RawTensor",
    "SlicedRagged",
    "SlicedTensor",
    "element_count",
    "elements_of",
    "join_rows",
    "longest_row",
    "ragged_of",
    "repeated",
    "resized",
    "sliced_outputs",
]


class RawTensor(msgspec.Struct, gc=False):
    """A tensor's bytes in the protocol's binary form: little-endian, C order; ``BYTES`` elements length-prefixed."""

    datatype: str
    shape: tuple[int, ...]
    """Batch axis first."""
    data: bytes | memoryview


class OutputWish(NamedTuple):
    """An output that a request asks for, and whether its data are binary or JSON."""

    name: str
    binary: bool


class InferRequest(msgspec.Struct, gc=False):
    """An inference request, checked against the model's signature."""

    id: str
    inputs: dict[str, RawTensor]
    """The inputs by name, without optional inputs that the client left out."""
    rows: int
    """Size of the batch axis, the same in all inputs; may be 0."""
    outputs: Sequence[OutputWish]
    """The requested outputs, in the request's order. If the request named no outputs: all declared outputs, or, of a
    pipeline, all outputs of ``heads``."""
    batch_parameters: dict[str, Scalar]
    """Declared parameters per batch, with defaults filled in."""
    row_parameters: dict[str, Scalar]
    """Declared parameters per row, with defaults filled in; the same value for all rows of this request. If the model
    takes undeclared parameters, they are JSON in the value of `headwater.signature.REQUEST`."""
    heads: tuple[str, ...] = ()
    """A pipeline's requested heads, in the signature's order, never empty; always empty for other models."""
    priority: int = 0
    """1 is the most urgent; 0: the default."""
    timeout_us: int = 0
    """The time limit that the client sent, in microseconds; 0: the client sent no limit. After a wait for an identical
    request: the time that is left."""
    cancel_id: str = ""
    """The id by which a client may cancel the request (`headwater_server.security.key_check.owned_id`); empty: the
    request can't be cancelled by an id."""
    is_bare: bool = False
    """Whether the inputs are a single row without the batch axis; the outputs then have no batch axis either."""
    sequence_id: int | str = 0
    """The sequence that the request belongs to, of a model with states; 0: it belongs to none."""
    starts_sequence: bool = False
    ends_sequence: bool = False
    owner: str = ""
    """The name of the API key that was sent with the request; empty: the request came without a key, or is a copy."""
    answer_headers: dict[str, str] = {}
    """Headers of the answer that the model has set, once the request is answered."""
    is_copy: bool = False
    """Whether the request is a shadow copy (`headwater_server.dispatch.shadow`), for which no client waits. Copies are
    dropped before any client's request."""


Outputs = dict[str, RawTensor]


class HeadAnswer(msgspec.Struct):
    """A result for a request, from a head of a pipeline or from a plain model (then ``head`` is empty)."""

    head: str
    outputs: Outputs = {}
    """The requested outputs that the head computes; empty if the head failed."""
    error: HeadwaterError | None = None
    took_ms: float = 0.0
    """Milliseconds from the request's acceptance to this result."""

    @property
    def status(self) -> str:
        """``ok``; or, by the kind of ``error``: ``timeout`` (the deadline passed), ``unavailable`` (no replica, a lost
        replica or a full queue), or ``failed``."""
        if self.error is None:
            return "ok"
        if isinstance(self.error, DeadlineExceeded):
            return "timeout"
        return "unavailable" if isinstance(self.error, (Unavailable, QueueFull)) else "failed"


class Answer(msgspec.Struct):
    """The whole answer to a request."""

    outputs: Outputs
    """The requested outputs, without the outputs of omitted heads."""
    omitted: Sequence[HeadAnswer] = ()
    """Heads that failed and have ``on_error: omit``."""
    cache: Literal["", "hit", "miss", "shared"] = ""
    """For a deployment with a cache: the answer was in the cache (``hit``), was computed (``miss``), or was computed
    for an identical request (``shared``). Empty: the deployment has no cache, or the request has no rows."""


def resized(tensor: RawTensor, size: int, fill: bytes = b"\0") -> RawTensor:
    """A tensor whose second axis has another size: cut, or filled up with ``fill``, the bytes of an element, or one for
    all its bytes; a ``BYTES`` tensor is filled up with empty elements."""
    rows, old_size, *rest = tensor.shape
    if size == old_size:
        return tensor
    shape = (rows, size, *rest)
    if tensor.datatype == "BYTES":
        elements, width = unpack_bytes(tensor.data), old_size * math.prod(rest)
        kept, filled = min(size, old_size) * math.prod(rest), max(0, size - old_size) * math.prod(rest)
        starts = range(0, rows * width, width) if width else [0] * rows
        whole = [piece for start in starts for piece in (*elements[start : start + kept], *[b""] * filled)]
        return RawTensor(tensor.datatype, shape, pack_bytes(whole))
    element_bytes = DATATYPES[tensor.datatype].size_bytes * math.prod(rest)
    row_bytes, kept_bytes = old_size * element_bytes, min(size, old_size) * element_bytes
    fill *= (size * element_bytes - kept_bytes) // len(fill)
    pieces: list[bytes | memoryview] = []
    for row in range(rows):
        pieces += (tensor.data[row * row_bytes : row * row_bytes + kept_bytes], fill)
    return RawTensor(tensor.datatype, shape, b"".join(pieces))


class SlicedTensor:
    """A tensor, of at least a single row, that can be cut into rows."""

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
        """``count`` rows of the tensor from row ``start`` on; a view if the tensor's data are a memoryview, else a
        copy."""
        tensor = self._tensor
        if self._offsets:
            data = tensor.data[self._offsets[start] : self._offsets[start + count]]
        else:
            data = tensor.data[start * self._row_bytes : (start + count) * self._row_bytes]
        return RawTensor(tensor.datatype, (count, *tensor.shape[1:]), data)


class SlicedRagged(SlicedTensor):
    """A ragged output whose rows, wherever it is cut, are as long as the longest row that is left.

    Args:
        tensor: the output of at least a single row.
        counts: the rows' sizes: INT32 [rows, 1].
    """

    __slots__ = ("_counts",)

    def __init__(self, tensor: RawTensor, counts: RawTensor) -> None:
        super().__init__(tensor)
        self._counts = memoryview(bytes(counts.data)).cast("i")

    def rows(self, start: int, count: int) -> RawTensor:
        """See `SlicedTensor.rows`."""
        return resized(super().rows(start, count), max(self._counts[start : start + count]))


def sliced_outputs(specs: Iterable[TensorSpec], outputs: Mapping[str, RawTensor]) -> dict[str, SlicedTensor]:
    """Prepare a model's outputs, each of at least a single row, to be cut by rows.

    Args:
        specs: the model's outputs as declared.
        outputs: the outputs that came, by name. A ragged output without its counts is cut as others are.
    """
    return {
        spec.name: SlicedRagged(tensor, counts)
        if spec.ragged and (counts := outputs.get(COUNT.format(spec.name))) is not None
        else SlicedTensor(tensor)
        for spec in specs
        if (tensor := outputs.get(spec.name)) is not None
    }


def join_rows(name: str, parts: Sequence[RawTensor], *, is_ragged: bool = False) -> RawTensor:
    """Join the parts' rows into one tensor.

    Args:
        name: the output's name, for messages.
        parts: at least a single part.
        is_ragged: whether the parts may differ in their second dimension; all then get the largest.

    Raises:
        CallableFailed: the parts' shapes differ in more than the number of rows.
    """
    if is_ragged:
        shape = max(part.shape[1:] for part in parts)  # one with elements: without any, dimensions that vary may be 0
        whole = (
            part if part.shape[1] else RawTensor(part.datatype, (part.shape[0], 0, *shape[1:]), b"") for part in parts
        )
        parts = [resized(part, shape[0]) for part in whole]
    first = parts[0]
    for part in parts:
        if part.shape[1:] != first.shape[1:]:
            raise CallableFailed(
                f"output {name!r}: the request was larger than max_batch_size, and its parts came back with different "
                f"shapes: {list(first.shape)} and {list(part.shape)}; send fewer rows at once"
            )
    rows = sum(part.shape[0] for part in parts)
    return RawTensor(first.datatype, (rows, *first.shape[1:]), b"".join(part.data for part in parts))


def elements_of(tensor: RawTensor, counts: Sequence[int]) -> RawTensor:
    """The elements of a ragged output, one row after another, at least a single element; numbers and texts become [1].

    Args:
        tensor: the output.
        counts: the rows' sizes.
    """
    rows, size, *rest = tensor.shape
    sliced = SlicedTensor(RawTensor(tensor.datatype, (rows * size, *rest), tensor.data))
    data = b"".join(sliced.rows(row * size, count).data for row, count in enumerate(counts))
    return RawTensor(tensor.datatype, (sum(counts), *(rest or [1])), data)


def repeated(tensor: RawTensor, counts: Sequence[int]) -> RawTensor:
    """A tensor, of at least a single row, with each row as often as its count says."""
    sliced = SlicedTensor(tensor)
    data = b"".join(sliced.rows(row, 1).data for row, count in enumerate(counts) for _ in range(count))
    return RawTensor(tensor.datatype, (sum(counts), *tensor.shape[1:]), data)


def ragged_of(tensor: RawTensor, counts: Sequence[int]) -> RawTensor:
    """The ragged output with these elements, one row after another, of which each row has its count; there is at least
    a single element."""
    sliced, size = SlicedTensor(tensor), max(counts)
    starts = itertools.accumulate(counts, initial=0)
    rows = [
        resized(RawTensor(tensor.datatype, (1, count, *tensor.shape[1:]), sliced.rows(start, count).data), size)
        for start, count in zip(starts, counts, strict=False)
    ]
    return RawTensor(tensor.datatype, (len(counts), size, *tensor.shape[1:]), b"".join(row.data for row in rows))


def longest_row(tensor: RawTensor) -> int:
    """Size in bytes of the longest row of a ``BYTES`` tensor; 0 without rows."""
    offsets = _offsets(tensor.data, math.prod(tensor.shape[1:]))
    return max((end - start for start, end in itertools.pairwise(offsets)), default=0)


def element_count(data: bytes | memoryview) -> int | None:
    """The number of ``BYTES`` elements in data; None if the data end in the middle of an element."""
    offset, count = 0, 0
    while offset < len(data):
        offset += 4 + int.from_bytes(data[offset : offset + 4], "little")
        count += 1
    return count if offset == len(data) else None


def _offsets(data: bytes | memoryview, elements: int) -> list[int]:
    """The offset at which each row of a ``BYTES`` tensor starts, and the offset of the last row's end.

    Args:
        data: the tensor's bytes.
        elements: the number of elements in a row.
    """
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
