"""Tensors that are cut and joined undecoded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.datatypes import pack_bytes, unpack_bytes
from headwater.signature import TensorSpec
from headwater_server.codecs.tensors import (
    RawTensor,
    elements_of,
    join_rows,
    ragged_of,
    repeated,
    resized,
    sliced_outputs,
)
from headwater_server.errors import CallableFailed

WORDS = TensorSpec("words", "BYTES", (-1, 2), ragged=True)
NUMBERS = TensorSpec("numbers", "INT16", (-1, 2), ragged=True)
COUNTS = TensorSpec("numbers_count", "INT32", (1,), counts="numbers")

Rows = list[list[list[int]]]


def raw(spec: TensorSpec, rows: Rows, size: int) -> RawTensor:
    """Rows, each filled up to ``size`` elements of two numbers, or of their texts."""
    whole = np.zeros((len(rows), size, 2), "<i2")
    for index, row in enumerate(rows):
        whole[index, : len(row)] = np.array(row, "<i2").reshape(-1, 2)
    if spec.datatype == "INT16":
        return RawTensor("INT16", whole.shape, whole.tobytes())
    return RawTensor("BYTES", whole.shape, pack_bytes([b"%d" % value if value else b"" for value in whole.ravel()]))


def rows_of(tensor: RawTensor) -> Any:
    if tensor.datatype == "INT16":
        return np.frombuffer(tensor.data, "<i2").reshape(tensor.shape).tolist()
    return np.array([int(text or 0) for text in unpack_bytes(tensor.data)]).reshape(tensor.shape).tolist()


ROWS = st.lists(st.lists(st.lists(st.integers(1, 999), min_size=2, max_size=2), max_size=4), min_size=1, max_size=6)


@pytest.mark.parametrize("spec", [NUMBERS, WORDS])
@given(rows=ROWS, spare=st.integers(0, 3), data=st.data())
def test_a_cut_ragged_output_is_as_long_as_the_longest_row_that_is_left(
    spec: TensorSpec, rows: Rows, spare: int, data: st.DataObject
) -> None:
    whole = raw(spec, rows, max(map(len, rows)) + spare)
    counts = RawTensor("INT32", (len(rows), 1), np.array([len(row) for row in rows], "<i4").tobytes())
    sliced = sliced_outputs([spec], {spec.name: whole, f"{spec.name}_count": counts})[spec.name]
    start = data.draw(st.integers(0, len(rows) - 1))
    left = rows[start : start + data.draw(st.integers(1, len(rows) - start))]
    found = sliced.rows(start, len(left))
    assert rows_of(found) == rows_of(raw(spec, left, max(map(len, left))))


@pytest.mark.parametrize("spec", [NUMBERS, WORDS])
@given(rows=ROWS, more_rows=ROWS)
def test_ragged_parts_are_joined_with_the_size_of_the_longest(spec: TensorSpec, rows: Rows, more_rows: Rows) -> None:
    parts = [raw(spec, part, max(map(len, part))) for part in (rows, more_rows)]
    both = [*rows, *more_rows]
    expected = raw(spec, both, max(map(len, both)))
    joined = join_rows(spec.name, parts, is_ragged=True)
    assert (joined.shape, rows_of(joined)) == (expected.shape, rows_of(expected))
    if parts[0].shape[1] != parts[1].shape[1]:
        with pytest.raises(CallableFailed, match="came back with different shapes"):
            join_rows(spec.name, parts)


@pytest.mark.parametrize("spec", [NUMBERS, WORDS])
@given(rows=ROWS.filter(any), spare=st.integers(0, 3))
def test_elements_of_all_rows_are_taken_and_given_back(spec: TensorSpec, rows: Rows, spare: int) -> None:
    counts = [len(row) for row in rows]
    elements = elements_of(raw(spec, rows, max(counts) + spare), counts)
    assert elements.shape == (sum(counts), 2)
    assert rows_of(elements) == [element for row in rows for element in row]
    assert rows_of(ragged_of(elements, counts)) == rows_of(raw(spec, rows, max(counts)))
    of_rows = repeated(raw(spec, [[[row, row]] for row in range(1, len(rows) + 1)], 1), counts)
    assert of_rows.shape == (sum(counts), 1, 2)
    assert rows_of(of_rows) == [[[row, row]] for row, count in enumerate(counts, 1) for _ in range(count)]


def test_numbers_and_texts_become_elements_of_one() -> None:
    numbers = elements_of(RawTensor("INT16", (2, 2), np.array([1, 0, 2, 3], "<i2").tobytes()), [1, 2])
    assert (numbers.shape, rows_of(numbers)) == ((3, 1), [[1], [2], [3]])
    words = elements_of(RawTensor("BYTES", (2, 2), pack_bytes([b"1", b"", b"2", b"3"])), [1, 2])
    assert (words.shape, unpack_bytes(words.data)) == ((3, 1), [b"1", b"2", b"3"])


def test_a_part_without_elements_is_joined_whatever_its_dimensions_are() -> None:
    parts = [RawTensor("INT16", (1, 0, 0), b""), raw(NUMBERS, [[[1, 2]]], 1), RawTensor("INT16", (2, 0, 0), b"")]
    assert rows_of(join_rows("numbers", parts, is_ragged=True)) == [[[0, 0]], [[1, 2]], [[0, 0]], [[0, 0]]]


def test_a_tensor_of_the_same_size_is_not_copied() -> None:
    tensor = raw(NUMBERS, [[[1, 2]]], 1)
    assert resized(tensor, 1) is tensor
