"""How a fused pipeline's answers travel."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.datatypes import DATATYPES, pack_bytes
from headwater.signature import TensorSpec
from headwater.wire.frame import Frame, FrameTensor, Piece, StepCount, decode_frame, encode_frame, tensor_bytes

shapes = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)
numbers = st.integers(0, 2**40)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[FrameTensor, bytes]:
    datatype = DATATYPES[draw(st.sampled_from(sorted(DATATYPES)))]
    shape = draw(shapes)
    size = math.prod(shape)
    if datatype.numpy.hasobject:
        raw = pack_bytes(draw(st.lists(st.binary(max_size=9), min_size=size, max_size=size)))
    else:
        size_bytes = size * datatype.size_bytes
        raw = draw(st.binary(min_size=size_bytes, max_size=size_bytes))
    return FrameTensor(draw(st.text(max_size=9)), datatype.name, shape, len(raw)), raw


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Piece, list[bytes]]:
    found = draw(st.lists(tensors(), max_size=3))
    failures = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4), st.text(max_size=9)), max_size=2))
    piece = Piece(
        draw(st.text(max_size=9)), draw(numbers), draw(numbers), failures, [tensor for tensor, _ in found],
        is_last=draw(st.booleans()),
    )  # fmt: skip
    return piece, [raw for _, raw in found]


counts = st.builds(StepCount, st.text(max_size=9), numbers, numbers, numbers)
frames = st.tuples(st.lists(pieces(), max_size=3), st.lists(counts, max_size=2))
Drawn = tuple[list[tuple[Piece, list[bytes]]], list[StepCount]]


def encoded(drawn: Drawn) -> tuple[Frame, bytes]:
    frame = Frame([piece for piece, _ in drawn[0]], drawn[1], held_rows=7)
    array = encode_frame(frame, [raw for _, data in drawn[0] for raw in data])
    assert array.dtype == np.uint8
    assert array.shape == (1, array.size)
    return frame, array.tobytes()


@pytest.mark.slow
@settings(deadline=None)
@given(frames)
def test_a_frame_comes_back_as_it_was(drawn: Drawn) -> None:
    frame, raw = encoded(drawn)
    decoded, data = decode_frame(raw)
    assert decoded == frame
    assert [[bytes(view) for view in views] for views in data] == [sent for _, sent in drawn[0]]


@settings(deadline=None)
@given(frames, st.data())
def test_a_frame_that_is_cut_short_is_refused(drawn: Drawn, data: st.DataObject) -> None:
    _, raw = encoded(drawn)
    with pytest.raises(ValueError, match="expected a frame"):
        decode_frame(raw[: data.draw(st.integers(0, len(raw) - 1))])


@settings(deadline=None)
@given(frames, st.binary(min_size=1, max_size=9))
def test_a_frame_with_bytes_too_many_is_refused(drawn: Drawn, more: bytes) -> None:
    _, raw = encoded(drawn)
    with pytest.raises(ValueError, match="expected a frame"):
        decode_frame(raw + more)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_garbage_is_decoded_or_refused_and_nothing_else(raw: bytes) -> None:
    try:
        decode_frame(raw)
    except ValueError:
        return
    assert len(raw) > 4


def test_tensors_of_negative_size_are_refused() -> None:
    sizes = [FrameTensor("a", "UINT8", (1,), 8), FrameTensor("b", "UINT8", (1,), -4)]
    raw = encode_frame(Frame([Piece("head", 1, 0, [], sizes)], []), [b"1234"]).tobytes()
    with pytest.raises(ValueError, match="expected a frame's head"):
        decode_frame(raw)


def test_a_head_of_another_form_is_refused() -> None:
    head = msgspec.msgpack.encode({"pieces": []})
    with pytest.raises(ValueError, match="expected a frame's head"):
        decode_frame(len(head).to_bytes(4, "little") + head)


@pytest.mark.parametrize(
    ("datatype", "array", "expected"),
    [
        ("INT16", np.array([[1, -2]], np.int16), b"\x01\x00\xfe\xff"),
        ("BF16", np.array([[0x3F80]], np.uint16), b"\x80\x3f"),
        ("BYTES", np.array([[b"ab", b""]], object), b"\x02\0\0\0ab\0\0\0\0"),
        ("FP32", np.zeros((2, 0), np.float32), b""),
        ("INT16", np.array([[1, 2], [3, 4]], np.int16).T, b"\x01\0\x03\0\x02\0\x04\0"),
    ],
    ids=["numbers", "BF16", "BYTES", "empty", "not contiguous"],
)
def test_a_tensors_bytes_are_the_protocols(datatype: str, array: np.ndarray[Any, Any], expected: bytes) -> None:
    assert tensor_bytes(TensorSpec("t", datatype, (-1,)), array) == expected
