"""The hidden output by which a replica says how each row of a batch fared.

No exception of a callable reaches Triton (it would fail the whole batch), so every bound model has one more output,
`REPORT`: ``UINT8 [rows, width]``. Of each row's bytes the first is a `Status`, the next four are the microseconds that
the callable took (little-endian uint32, the same in all rows of a call), the next two the rows that the replica had
(uint16, likewise), and the rest is UTF-8 text padded with zeros: the message of a row that failed; in a row that did
not, empty, or the JSON ``{"output": shape}`` of those outputs that have no elements (they travel as placeholders, see
`placeholder_shape`).
Triton may merge calls that wait together; in all but one of them the first byte's high bit is set, so that whoever
counts what the callable did counts it once.

A request's hidden parameter `HEADWATER` is the JSON of a `CallNote`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headwater.wire.parcel import ChannelNote
from headwater.wire.shared_memory import SharedCall

__all__ = [
    "HEADWATER",
    "REPORT",
    "CallNote",
    "CallReport",
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
    """The callable raised."""
    BAD_OUTPUT = 2
    """The callable returned something other than it declared."""
    BAD_INPUT = 3
    """The callable raised `headwater.BadInput`: the client's fault."""
    BROKEN = 4
    """The replica can't go on (a CUDA context is poisoned); it ends and is replaced."""
    UNSHARED = 5
    """The replica can't open the call's shared memory (`headwater.wire.shared_memory`); nothing was computed."""
    OUT_OF_MEMORY = 6
    """The device's memory does not suffice for the row, even alone; or for a batch that can't be split."""


class RowReport(NamedTuple):
    """One row's report."""

    status: Status
    message: str = ""
    """Why the row failed; for a row that succeeded, empty or the JSON described above."""


class CallReport(NamedTuple):
    """The outcome of one call."""

    rows: list[RowReport]
    compute_us: int
    """Microseconds that the callable took."""
    is_merged: bool
    """Whether another call's report counts these microseconds too, because both were computed together."""
    held_rows: int
    """Rows of all gateway workers that the replica had when it computed these, which it counts too; at most 65,535.
    Those that waited in Triton although a batch had place for them are unknown to it."""


class CallNote(msgspec.Struct, omit_defaults=True):
    """What the gateway tells a replica about one call besides its tensors."""

    parameters: dict[str, str | int | float | bool] = {}
    """Values of per-batch parameters."""
    rows: dict[str, list[str | int | float | bool]] = {}
    """Values of per-row parameters, one for each row."""
    shapes: dict[str, list[int]] = {}
    """True shapes of inputs without elements, batch axis included."""
    warmup: bool = False
    """Whether this is a warm-up call, which is counted separately."""
    alone: bool = False
    """Whether its rows must share no call of the model with other requests' rows, even if Triton merges them."""
    heads: list[tuple[int, int]] = []
    """For a pipeline, runs of (mask of wanted heads, number of rows); bit 0 stands for the signature's first head."""
    owners: list[tuple[str, int]] = []
    """If the signature is `by_key`, runs of (name of the API key, number of rows)."""
    patience_s: float = 0
    """For a pipeline, how long a head's answer may wait for the others because clients can't use it alone; a failure
    doesn't wait."""
    left_s: dict[str, float] = {}
    """The time left until each head's deadline, or by a plain model's own name; a head that is absent has none."""
    stream: str = ""
    """The name by which a streaming request can be cancelled."""
    cancel: str = ""
    """The name of a stream to end; the rest of the call is then ignored."""
    channel: ChannelNote | None = None
    """The worker's channel, on which the stream's frames are sent; in a call without a stream, news of the channel."""
    shared: SharedCall | None = None
    """The location of the call's large tensors, if they are in shared memory."""


def placeholder_shape(rows: int, declared: Sequence[int]) -> list[int]:
    """The shape under which a tensor without elements travels (PyTriton can't carry it).

    Args:
        rows: the batch axis, at least 1.
        declared: one row's declared shape; dimensions that vary become 1, whatever their true size.
    """
    return [rows, *(1 if dim < 0 else dim for dim in declared)]


def encode_reports(
    reports: Sequence[RowReport], compute_us: int, *, is_merged: bool = False, held_rows: int = 0
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Encode one report per row (see `CallReport`). Returns UINT8 [rows, width]."""
    # Only a callable's message may be cut; the JSON of a row that succeeded must stay whole.
    texts = [report.message.encode() if report.status is Status.OK else _cut(report.message) for report in reports]
    width = _HEAD.size + max((len(text) for text in texts), default=0)
    compute_us = min(compute_us, 0xFFFFFFFF)
    held_rows = min(held_rows, 0xFFFF)
    flag = _MERGED if is_merged else 0
    raw = b"".join(
        (_HEAD.pack(report.status | flag, compute_us, held_rows) + text).ljust(width, b"\0")
        for report, text in zip(reports, texts, strict=True)
    )
    return np.frombuffer(raw, np.uint8).reshape(len(reports), width)


def decode_reports(raw: bytes | memoryview, rows: int) -> CallReport:
    """Decode what `encode_reports` wrote.

    Raises:
        ValueError: the bytes are not reports of that many rows.
    """
    width = len(raw) // rows if rows else 0
    if width < _HEAD.size or width * rows != len(raw):
        raise ValueError(f"expected reports of {rows} rows, got {len(raw)} bytes")
    raw = bytes(raw)
    is_alike = raw == raw[:width] * rows  # as in nearly every call
    reports = []
    compute_us = first = held_rows = 0
    for offset in range(0, width if is_alike else len(raw), width):
        first, compute_us, held_rows = _HEAD.unpack_from(raw, offset)
        status = first & ~_MERGED
        if width == _HEAD.size:
            reports.append(RowReport(Status(status)))
            continue
        text = raw[offset + _HEAD.size : offset + width].rstrip(b"\0")
        reports.append(RowReport(Status(status), text.decode("utf-8", "replace")))
    return CallReport(reports * rows if is_alike else reports, compute_us, bool(first & _MERGED), held_rows)


def _cut(message: str) -> bytes:
    text = message.replace("\0", "").encode("utf-8", "replace")
    if len(text) <= MAX_MESSAGE_BYTES:
        return text
    return text[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore").encode() + b" [cut]"
