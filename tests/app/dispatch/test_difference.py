"""How answers of two versions to one request are compared."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headwater.datatypes import DATATYPES, float32_to_bf16, pack_bytes
from headwater.signature import TensorSpec
from headwater_server.codecs.tensors import RawTensor
from headwater_server.dispatch.difference import Difference, difference

NAN, INF = math.nan, math.inf


def tensor(datatype: str, values: Any) -> RawTensor:
    if datatype == "BYTES":
        texts = np.array(values, object)
        return RawTensor("BYTES", texts.shape, pack_bytes(text.encode() for text in texts.ravel()))
    found = np.array(values, DATATYPES[datatype].numpy if datatype != "BF16" else np.float32)
    return RawTensor(datatype, found.shape, (float32_to_bf16(found) if datatype == "BF16" else found).tobytes())


def compared(one: Any, other: Any, datatype: str = "FP32", labels: Any = (), other_labels: Any = None) -> Difference:
    specs = [
        TensorSpec("y", datatype, (-1,), labels=tuple(those))
        for those in (labels, labels if other_labels is None else other_labels)
    ]
    return difference(specs[0], specs[1], tensor(datatype, one), tensor(datatype, other))


@pytest.mark.parametrize(
    ("one", "other", "greatest"),
    [
        ([[1, 2]], [[1, 2]], 0),
        ([[1, 2], [3, 4]], [[1, 2], [3, 4.5]], 0.5),
        ([[-1]], [[1]], 2),
        ([[NAN, INF, -INF]], [[NAN, INF, -INF]], 0),
        ([[NAN]], [[1]], INF),
        ([[INF]], [[-INF]], INF),
        ([[1]], [[INF]], INF),
        (np.zeros((2, 0)), np.zeros((2, 0)), 0),
    ],
)
def test_the_greatest_difference_of_two_numbers(one: Any, other: Any, greatest: float) -> None:
    assert compared(one, other) == Difference(greatest)


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_every_datatype_of_numbers(datatype: str) -> None:
    assert compared([[0, 1]], [[0, 0]], datatype) == Difference(1)


def test_integers_that_are_equal_only_as_floats_differ() -> None:
    found = compared([[2**62]], [[2**62 + 1]], "INT64").greatest
    assert found is not None
    assert 0 < found < 1e-6


def test_far_into_a_large_tensor() -> None:
    one = np.zeros((3, 100_000), np.float32)
    other = one.copy()
    other[2, 99_999] = 0.25
    assert compared(one, other) == Difference(0.25)


@given(arrays.arrays(np.float32, (3, 4), elements=st.floats(width=32)), st.data())
def test_the_order_of_the_two_does_not_matter(one: Any, data: st.DataObject) -> None:
    other = data.draw(arrays.arrays(np.float32, (3, 4), elements=st.floats(width=32)))
    labels = ("a", "b", "c", "d")
    assert compared(one, other, labels=labels) == compared(other, one, labels=labels)
    assert compared(one, one, labels=labels) == Difference(0)


def test_rows_whose_greatest_label_is_another() -> None:
    one = [[0.9, 0.1], [0.4, 0.6], [0.3, 0.7]]
    other = [[0.8, 0.2], [0.6, 0.4], [0.2, 0.8]]
    assert compared(one, other, labels=("no", "yes")).rows == 1
    assert compared(one, other).rows == 0
    assert compared([one], [other], labels=("no", "yes")).rows == 1  # one row with three places


def test_labels_in_another_order_are_the_same_labels() -> None:
    found = compared([[0.9, 0.1], [0.4, 0.6]], [[0.1, 0.9], [0.4, 0.6]], labels=("a", "b"), other_labels=("b", "a"))
    assert found.rows == 1


def test_rows_whose_texts_are_others() -> None:
    one, other = [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "e"]]
    assert compared(one, other, "BYTES") == Difference(None, 1)


def test_another_shape_or_datatype_or_no_output_at_all() -> None:
    spec = TensorSpec("y", "FP32", (-1,))
    one = tensor("FP32", [[1, 2], [3, 4]])
    for other in (tensor("FP64", [[1, 2], [3, 4]]), tensor("FP32", [[1], [3]]), None):
        assert difference(spec, spec, one, other) == Difference(None, 2, "form")
