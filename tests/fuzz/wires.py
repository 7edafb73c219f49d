"""Targets: what processes of one server send to each other."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.wire import frame as frames
from headwater.wire import lm as wire
from headwater.wire.report import CallReport, decode_reports, encode_reports
from tests.fuzz.draw import Draw

__all__ = ["frame", "lm_wire", "report"]


def frame(data: bytes) -> bool:
    """A pipeline's frame: none, or one whose tensors' bytes are all within it."""
    try:
        found, views = frames.decode_frame(data)
    except ValueError:
        return False
    assert [len(one) for one in views] == [len(piece.tensors) for piece in found.pieces]
    flat = [bytes(view) for piece in views for view in piece]
    assert sum(map(len, flat)) <= len(data)
    again, copies = frames.decode_frame(frames.encode_frame(found, flat).tobytes())
    assert msgspec.to_builtins(again) == msgspec.to_builtins(found) or _has_nan(found)
    assert [bytes(view) for piece in copies for view in piece] == flat
    return True


def lm_wire(data: bytes) -> bool:
    """A language model's channel: no message and no frame, or one that is the same when it is sent again."""
    accepted = False
    try:
        message = wire.decode_message(data)
    except msgspec.MsgspecError:
        pass
    else:
        assert wire.decode_message(wire.encode(message)) == message or _has_nan(message)
        accepted = True
    try:
        step = wire.decode_frame(data)
    except msgspec.MsgspecError:
        return accepted
    assert wire.decode_frame(wire.encode(step)) == step or _has_nan(step)
    return True


def report(data: bytes) -> bool:
    """How the rows of a call fared."""
    draw = Draw(data)
    rows = draw.below(6)
    raw = draw.rest()
    try:
        found = decode_reports(raw, rows)
    except ValueError:
        return False
    assert len(found.rows) == rows
    again = decode_reports(
        encode_reports(*found[:2], is_merged=found.is_merged, held_rows=found.held_rows).tobytes(), rows
    )
    assert _as_sent(again) == _as_sent(found)
    return True


def _as_sent(found: CallReport) -> tuple[Any, ...]:
    """Without what is cut, or is no text: zeros within a message, and its end if it is long."""
    texts = [(row.status, row.message.replace("\0", "")[:400]) for row in found.rows]
    return texts, found.compute_us, found.is_merged, found.held_rows


def _has_nan(value: object) -> bool:
    value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_nan(one) for one in value)
    return value != value
