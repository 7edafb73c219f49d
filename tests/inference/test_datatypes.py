"""Datatypes, row reports and warm-up rows, as they travel."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from headwater.datatypes import DATATYPES, bf16_to_float32, float32_to_bf16, pack_bytes, unpack_bytes
from headwater.errors import DeclarationError
from headwater.signature import TensorSpec
from headwater.wire.example_rows import batch_sizes, example_rows
from headwater.wire.report import (
    MAX_MESSAGE_BYTES,
    RowReport,
    Status,
    decode_reports,
    encode_reports,
    placeholder_shape,
)


@given(st.lists(st.binary(max_size=50), max_size=20))
def test_bytes_elements_survive(elements: list[bytes]) -> None:
    assert unpack_bytes(pack_bytes(elements)) == elements


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x05\0\0\0abc", "element 0: its length says 5 bytes, 3 are left"),
        (pack_bytes([b"a"]) + b"\x01", "element 1: 1 bytes left where its 4-byte length should be"),
    ],
)
def test_lengths_that_lie_are_named(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack_bytes(raw)


@given(hnp.arrays(np.uint16, 20))
def test_every_bfloat16_survives_the_way_through_float32(bits: Any) -> None:
    back = float32_to_bf16(bf16_to_float32(bits))
    is_nan = np.isnan(bf16_to_float32(bits))
    assert (back[~is_nan] == bits[~is_nan]).all()
    assert np.isnan(bf16_to_float32(back[is_nan])).all()


@pytest.mark.heavy
@settings(deadline=None)  # torch is imported in the first example
@given(hnp.arrays(np.float32, 50, elements=st.floats(width=32)))
def test_float32_rounds_to_bfloat16_as_torch_does(values: Any) -> None:
    import torch

    ours = bf16_to_float32(float32_to_bf16(values))
    theirs = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(ours, theirs)


def test_every_fixed_size_is_numpys_own() -> None:
    for row in DATATYPES.values():
        assert row.size_bytes == (0 if row.name == "BYTES" else row.numpy.itemsize)


@given(
    st.lists(
        st.tuples(st.sampled_from(Status), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=40)),
        min_size=1,
        max_size=9,
    ),
    st.integers(0, 2**33),
    st.booleans(),
    st.integers(0, 2**17),
)
def test_row_reports_survive(
    rows: list[tuple[Status, str]], compute_us: int, is_merged: bool, held_rows: int
) -> None:  # fmt: skip
    reports = [RowReport(status, text) for status, text in rows]
    raw = encode_reports(reports, compute_us, is_merged=is_merged, held_rows=held_rows).tobytes()
    expected = reports, min(compute_us, 2**32 - 1), is_merged, min(held_rows, 2**16 - 1)
    assert decode_reports(raw, len(reports)) == expected


def test_a_long_message_is_cut_between_characters() -> None:
    ((report,), *_) = decode_reports(encode_reports([RowReport(Status.RAISED, "é" * 5000)], 0).tobytes(), 1)
    assert report.message == "é" * (MAX_MESSAGE_BYTES // 2) + " [cut]"


@pytest.mark.parametrize(("raw", "rows"), [(b"", 1), (b"123456", 4), (b"x", 1), (b"", 0)])
def test_what_is_no_report_is_refused(raw: bytes, rows: int) -> None:
    with pytest.raises(ValueError, match="expected reports of"):
        decode_reports(raw, rows)


def test_a_placeholder_is_small_whatever_varies() -> None:
    assert placeholder_shape(3, (-1, 4, -1)) == [3, 1, 4, 1]


def test_warm_up_has_every_power_of_two_and_the_largest() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(8) == [1, 2, 4, 8]
    assert batch_sizes(12) == [1, 2, 4, 8, 12]


def test_an_example_is_repeated_for_each_row() -> None:
    data, shape = example_rows(TensorSpec("x", "INT16", (-1,)), [1, 2], 3)
    assert (np.frombuffer(data, "<i2").tolist(), shape) == ([1, 2] * 3, [3, 2])
    data, shape = example_rows(TensorSpec("t", "BYTES", (1,)), ["hé"], 2)
    assert (unpack_bytes(data), shape) == (["hé".encode()] * 2, [2, 1])


@pytest.mark.parametrize("value", [[1, 2], [[1], [2]], "text", [[1, 2], [3]]])
def test_an_example_that_does_not_fit_is_named(value: Any) -> None:
    with pytest.raises(DeclarationError, match=r"example, input 'x': expected FP32 \[3\]"):
        example_rows(TensorSpec("x", "FP32", (3,)), value, 1)
