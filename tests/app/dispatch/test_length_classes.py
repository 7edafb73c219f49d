"""Which rows may share a batch without much padding."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from headwater.datatypes import pack_bytes
from headwater_server.codecs.tensors import RawTensor
from headwater_server.dispatch.policy import length_class


def texts(*rows: bytes) -> dict[str, RawTensor]:
    return {"text": RawTensor("BYTES", (len(rows), 1), pack_bytes(list(rows)))}


def text(length: int) -> dict[str, RawTensor]:
    """A row that travels as so many bytes."""
    return {"text": RawTensor("BYTES", (1, 1), bytes(length))}


@given(
    max_padding=st.floats(0.01, 0.9),
    lengths=st.lists(st.integers(4, 100_000), min_size=2, max_size=60),
)
@example(max_padding=0.2, lengths=[4, 5, 100, 124, 125, 126])
def test_of_what_is_computed_for_a_class_no_more_is_padding(max_padding: float, lengths: list[int]) -> None:
    by_class: dict[int, list[int]] = {}
    for length in lengths:
        by_class.setdefault(length_class(text(length), max_padding), []).append(length)
    for members in by_class.values():
        computed = len(members) * max(members)
        assert (computed - sum(members)) / computed <= max_padding + 1e-9


def test_longer_rows_are_of_higher_classes() -> None:
    found = [length_class(text(length), 0.2) for length in range(4, 5000)]
    assert found == sorted(found)
    assert len(set(found)) == 33  # log(5000 / 4) / log(1 / 0.8), and those at both ends


def test_of_several_rows_the_longest_counts() -> None:
    longest = length_class(texts(b"b" * 500), 0.2)
    assert length_class(texts(b"a", b"b" * 500, b"cc"), 0.2) == longest
    assert length_class(texts(b"a", b"cc"), 0.2) < longest


def test_of_a_row_with_several_elements_and_inputs_all_count() -> None:
    pair = {"question": RawTensor("BYTES", (2, 2), pack_bytes([b"a", b"b" * 40, b"c" * 41, b""])), **texts(b"d", b"e")}
    assert length_class(pair, 0.1) == length_class(text(4 + 4 + 41 + 4 + 1), 0.1)


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": RawTensor("FP32", (3, 7), bytes(84))},
        {"text": RawTensor("BYTES", (2, 0), b"")},
        {"x": RawTensor("FP32", (3, 7), bytes(84)), "text": RawTensor("BYTES", (3, 0), b"")},
    ],
)
def test_what_does_not_vary_is_of_one_class(inputs: dict[str, RawTensor]) -> None:
    assert length_class(inputs, 0.2) == 0


def test_sizes_of_ragged_inputs_count() -> None:
    def numbers(size: int) -> dict[str, RawTensor]:
        return {"x": RawTensor("FP32", (2, size), bytes(8 * size))}

    assert length_class(numbers(100), 0.2, {"x"}) == length_class(text(100), 0.2)
    assert length_class({**numbers(60), **text(40)}, 0.2, {"x"}) == length_class(text(100), 0.2)
