"""The hidden output in which a replica reports the outcome of each row of a batch.

An exception of a callable must not reach Triton, where it would fail the whole batch. Every bound model that doesn't
answer in frames (`headwater.wire.frame`) therefore has an additional output, `REPORT`: ``UINT8 [rows, width]``. The
bytes of a row are

- a `Status` (1 byte);
- the microseconds that the callable took (little-endian uint32, the same in all rows of a call);
- `CallReport.held_rows` (little-endian uint16, the same in all rows of a call);
- UTF-8 text, padded with zeros. In a failed row it is the error's message; the JSON of an `OutputMismatch` may follow
  after a zero. In a row that succeeded it is empty, or the JSON of a `RowNote`.

Triton may merge waiting calls, which may then share an execution of the callable. In all calls of an execution except
the first, the high bit of the first byte is set, so that the gateway counts the execution only once.

A request's hidden parameter `HEADWATER` is the JSON of a `CallNote`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headwater.errors import CLIENT_STATUSES, OutputMismatch
from headwater.wire.parcel import ChannelNote
from headwater.wire.shared_memory import SharedCall

__all__ = [
    "CLIENT_FAULTS",
    "HEADWATER",
    "OF_VALUES",
    "REPORT",
    "CallNote",
    "CallReport",
    "RowNote",
    "RowReport",
    "Status",
    "decode_reports",
    "encode_reports",
    "placeholder_shape",
]

REPORT: Final = "headwater_report"
HEADWATER: Final = "headwater"
MAX_MESSAGE_BYTES: Final = 2000

_HEAD = struct.Struct("<BIH")
_MERGED: Final = 0x80


class Status(enum.IntEnum):
    """A row's outcome."""

    OK = 0
    RAISED = 1
    """The callable raised, or its call failed for a reason without a status here."""
    BAD_OUTPUT = 2
    """The callable's outputs are not as declared."""
    BAD_INPUT = 3
    """The callable raised `headwater.BadInput`, or the request contradicts the signature: the client's fault."""
    BROKEN = 4
    """The replica can't continue, because its device is unusable (a poisoned CUDA context) or the model raised a
    `ReplicaError`. It ends and is replaced."""
    UNSHARED = 5
    """The replica can't open the call's shared memory (`headwater.wire.shared_memory`); nothing was computed."""
    OUT_OF_MEMORY = 6
    """The device's memory is too small for the row, even in a batch by itself, or for a batch that can't be split."""
    # As `BAD_INPUT`, with another HTTP status.
    NOT_FOUND = 7
    CONFLICT = 8
    GONE = 9
    TOO_LARGE = 10
    UNSUPPORTED = 11
    UNPROCESSABLE = 12


CLIENT_FAULTS: Final = dict(
    zip(
        CLIENT_STATUSES,
        (
            Status.BAD_INPUT, Status.NOT_FOUND, Status.CONFLICT, Status.GONE, Status.TOO_LARGE, Status.UNSUPPORTED,
            Status.UNPROCESSABLE,
        ),
        strict=True,
    )
)  # fmt: skip
"""Outcomes that are the client's fault, by the HTTP status of the answer."""
OF_VALUES: Final = frozenset({Status.RAISED, Status.BAD_OUTPUT, *CLIENT_FAULTS.values()})
"""Outcomes that other values of the inputs may change."""


class RowNote(msgspec.Struct, omit_defaults=True):
    """What the report of a row that succeeded says."""

    shapes: dict[str, tuple[int, ...]] = {}
    """The shapes of the call's outputs without elements, which are sent as placeholders (see `placeholder_shape`)."""
    headers: dict[str, str] = {}
    """Headers of the answer that the model has set."""


class RowReport(NamedTuple):
    """One row's report."""

    status: Status
    message: str = ""
    """Why the row failed; for a row that succeeded, empty or the JSON of a `RowNote`."""
    mismatch: OutputMismatch | None = None
    """The output at fault, if the row failed because the output doesn't match its declaration."""


class CallReport(NamedTuple):
    """The outcome of one call."""

    rows: list[RowReport]
    compute_us: int
    """Microseconds that the rows' execution took, retries included."""
    is_merged: bool
    """Whether the microseconds are those of an earlier call too, because both calls shared an execution."""
    held_rows: int
    """Number of rows, of all gateway workers, that the replica's instances were computing when this call's rows were
    ready; at most 65,535. 0 if the call was refused. Rows that waited in Triton's queue are not counted, because the
    replica doesn't know of them."""


class CallNote(msgspec.Struct, omit_defaults=True):
    """Data about a call that is sent to a replica besides the tensors."""

    parameters: dict[str, str | int | float | bool] = {}
    """Values of per-batch parameters."""
    rows: dict[str, list[str | int | float | bool]] = {}
    """Values of per-row parameters: a list with a value for each row."""
    shapes: dict[str, list[int]] = {}
    """True shapes of inputs without elements, batch axis included."""
    warmup: bool = False
    """Whether this is a warm-up call, which isn't counted and doesn't use the replica's caches."""
    alone: bool = False
    """Whether the model must compute these rows separately from other calls' rows, even if Triton merges the calls."""
    heads: list[tuple[int, int]] = []
    """For a pipeline: runs of (mask of requested heads, number of rows); bit 0 stands for the signature's first head.
    Empty: every row requests all heads."""
    owners: list[tuple[str, int]] = []
    """If the signature is `by_key`, runs of (name of the API key, number of rows)."""
    patience_s: float = 0
    """For a pipeline: seconds that a head's answer may wait for the answers of the other heads, because clients can't
    use it alone. A failure is sent at once."""
    left_s: dict[str, float] = {}
    """Seconds until the deadline of each head, by head; for a plain model, by the model's name. A head without a
    deadline is absent."""
    stream: str = ""
    """The name of the stream that this call starts, by which it can be cancelled."""
    cancel: str = ""
    """The name of a stream to end; the rest of the call is then ignored, and nothing is computed."""
    channel: ChannelNote | None = None
    """The worker's channel, on which the stream's frames are sent. A call without a stream opens or updates the
    channel."""
    shared: SharedCall | None = None
    """The location of the call's large tensors, if they are in shared memory."""


def placeholder_shape(rows: int, declared: Sequence[int]) -> list[int]:
    """The shape of the placeholder that is sent for a tensor without elements, because PyTriton can't carry such a
    tensor. Dimensions that vary in the declared shape of a row become 1, regardless of their true size.
    """
    return [rows, *(1 if dim < 0 else dim for dim in declared)]


def encode_reports(
    reports: Sequence[RowReport], compute_us: int, *, is_merged: bool = False, held_rows: int = 0
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode a report for each row; the other arguments are fields of `CallReport`. Returns UINT8 [rows, width]."""
    flag = _MERGED if is_merged else 0
    compute_us = min(compute_us, 0xFFFFFFFF)
    held_rows = min(held_rows, 0xFFFF)
    encoded = {}
    for key, report in {id(report): report for report in reports}.items():  # nearly always a single report
        # A failed row's message may be cut; the JSON of a row that succeeded must stay whole.
        text = report.message.encode() if report.status is Status.OK else _failure(report)
        encoded[key] = _HEAD.pack(report.status | flag, compute_us, held_rows) + text
    width = max(map(len, encoded.values()), default=_HEAD.size)
    padded = {key: piece.ljust(width, b"\0") for key, piece in encoded.items()}
    raw = b"".join([padded[id(report)] for report in reports])
    return np.frombuffer(raw, np.uint8).reshape(len(reports), width)


def decode_reports(raw: bytes | memoryview, rows: int) -> CallReport:
    """Decode the reports of a call.

    Raises:
        ValueError: the bytes are not reports of ``rows`` rows.
    """
    width = len(raw) // rows if rows else 0
    if width < _HEAD.size or width * rows != len(raw):
        raise ValueError(f"expected reports of {rows} rows, got {len(raw)} bytes")
    raw = bytes(raw)
    is_alike = raw == raw[:width] * rows  # all rows have the same report, in nearly every call
    reports = []
    compute_us = first = held_rows = 0
    for offset in range(0, width if is_alike else len(raw), width):
        first, compute_us, held_rows = _HEAD.unpack_from(raw, offset)
        status = first & ~_MERGED
        if width == _HEAD.size:
            reports.append(RowReport(Status(status)))
            continue
        text, _, rest = raw[offset + _HEAD.size : offset + width].rstrip(b"\0").partition(b"\0")
        try:
            mismatch = msgspec.json.decode(rest, type=OutputMismatch) if rest else None
        except msgspec.DecodeError as error:
            raise ValueError(f"expected the JSON of an output: {error}") from None
        reports.append(RowReport(Status(status), text.decode("utf-8", "replace"), mismatch))
    return CallReport(reports * rows if is_alike else reports, compute_us, bool(first & _MERGED), held_rows)


def _failure(report: RowReport) -> bytes:
    text = report.message.replace("\0", "").encode("utf-8", "replace")
    if len(text) > MAX_MESSAGE_BYTES:
        text = text[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore").encode() + b" [cut]"
    return text if report.mismatch is None else text + b"\0" + msgspec.json.encode(report.mismatch)
