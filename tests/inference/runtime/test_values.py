"""What passes from one step of a pipeline to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headwater.errors import BadOutput
from headwater.runtime.values import checked, converted, copied, joined, overlaps, rows_of, settled, version_of
from headwater.signature import TensorSpec

pytestmark = pytest.mark.heavy
FEATURES = TensorSpec("features", "FP32", (384,))
Array = np.ndarray[Any, Any]


def check(spec: TensorSpec, value: Any, rows: int = 8) -> Any:
    return checked(spec, value, rows, where="step `b`, input `features`", source="`trunk`")


def floats(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


WRONG: list[tuple[str, Any, str]] = [
    ("zero rows", floats(0, 384), "FP32 [0, 384]"),
    ("zero-size", floats(8, 0), "FP32 [8, 0]"),
    ("wrong datatype", np.zeros((8, 384)), "FP64 [8, 384]"),
    ("grown", floats(8, 385), "FP32 [8, 385]"),
    ("more rows", floats(16, 384), "FP32 [16, 384]"),
    ("rank too low", floats(8), "FP32 [8]"),
    ("rank too high", floats(8, 384, 1), "FP32 [8, 384, 1]"),
    ("no dimensions", floats(), "FP32 []"),
    ("nothing", None, "nothing"),
    ("wrong type", 3, "int"),
    ("a list of numbers", [1.0], "list"),
    ("unknown to the protocol", np.zeros((8, 384), np.complex64), "complex64 [8, 384]"),
    ("text", np.full((8, 384), "a"), "BYTES [8, 384]"),
    ("torch, zero rows", torch.zeros(0, 384), "FP32 [0, 384]"),
    ("torch, zero-size", torch.zeros(8, 0), "FP32 [8, 0]"),
    ("torch, wrong datatype", torch.zeros(8, 384, dtype=torch.bfloat16), "BF16 [8, 384]"),
    ("torch, unknown to the protocol", torch.zeros(8, 384, dtype=torch.float8_e4m3fn), "float8_e4m3fn [8, 384]"),
    ("torch, rank too low", torch.zeros(8), "FP32 [8]"),
]


@pytest.mark.parametrize(("value", "got"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_what_is_not_expected_is_refused_with_both_ends_named(value: Any, got: str) -> None:
    with pytest.raises(BadOutput) as raised:
        check(FEATURES, value)
    assert str(raised.value) == f"step `b`, input `features`: expected FP32 [8, 384], got {got} from `trunk`"


def test_elements_that_are_no_text_are_refused() -> None:
    with pytest.raises(BadOutput) as raised:
        check(TensorSpec("text", "BYTES", (1,)), [[1.5]], rows=1)
    assert str(raised.value) == "step `b`, input `features`: expected bytes or str elements, got float"


@pytest.mark.parametrize("value", [floats(8, 384), torch.zeros(8, 384)], ids=["numpy", "torch"])
def test_what_is_expected_is_not_copied(value: Any) -> None:
    assert check(FEATURES, value) is value


def test_a_dimension_that_varies_takes_any_size() -> None:
    assert check(TensorSpec("features", "FP32", (-1, 2)), floats(8, 0, 2)).shape == (8, 0, 2)


def test_other_byte_orders_become_the_machines() -> None:
    value = check(TensorSpec("features", "INT32", (1,)), np.array([[7]], ">i4"), rows=1)
    assert value.dtype == np.int32
    assert value.tolist() == [[7]]


@pytest.mark.parametrize("value", [[["a"], [b"b"]], np.array([["a"], ["b"]]), np.array([["a"], [b"b"]], object)])
def test_text_becomes_bytes_objects(value: Any) -> None:
    assert check(TensorSpec("text", "BYTES", (1,)), value, rows=2).tolist() == [[b"a"], [b"b"]]


def test_bf16_is_float32_in_numpy() -> None:
    assert check(TensorSpec("features", "BF16", (4,)), floats(8, 4)).dtype == np.float32


class TestSettled:
    def test_numpy_refuses_writes_from_then_on(self) -> None:
        value = settled(floats(2, 2))
        with pytest.raises(ValueError, match="read-only"):
            value += 1

    def test_the_producer_may_still_write_into_its_own_memory(self) -> None:
        own = floats(2, 2)
        settled(own)
        own += 1
        assert own[0, 0] == 1

    def test_torch_counts_writes_from_then_on(self) -> None:
        value = settled(torch.zeros(2, 2))
        before = version_of(value)
        value[:, 0].add_(1)
        assert version_of(value) != before

    def test_a_tensor_made_under_inference_mode_is_copied_so_that_writes_are_counted(self) -> None:
        with torch.inference_mode():
            made = torch.ones(2, 2)
        value = settled(made)
        assert not value.is_inference()
        assert not overlaps(value, made)
        assert torch.equal(value, made)
        before = version_of(value)
        with torch.inference_mode():
            value.view(-1)[0] = 5
        assert version_of(value) != before

    def test_an_ordinary_tensor_is_not_copied(self) -> None:
        made = torch.zeros(2, 2)
        assert settled(made).data_ptr() == made.data_ptr()

    def test_gradients_do_not_pass(self) -> None:
        made = torch.zeros(2, 2, requires_grad=True)
        assert not settled(made).requires_grad


def numpy_of(value: Any) -> Array:
    array: Array = value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()
    return array


DATATYPES = [
    ("BOOL", torch.bool), ("UINT8", torch.uint8), ("INT8", torch.int8), ("INT16", torch.int16),
    ("INT32", torch.int32), ("INT64", torch.int64), ("FP16", torch.float16), ("FP32", torch.float32),
    ("FP64", torch.float64), ("BF16", torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("datatype", "dtype"), DATATYPES)
class TestConverted:
    def test_from_torch_to_numpy(self, datatype: str, dtype: torch.dtype) -> None:
        value = torch.tensor([[0, 1], [1, 0]]).to(dtype)
        array = converted(TensorSpec("t", datatype, (2,)), value, "numpy", "cpu")
        assert array.dtype == numpy_of(value).dtype
        assert array.tolist() == value.tolist()
        assert not array.flags.writeable

    def test_from_numpy_to_torch(self, datatype: str, dtype: torch.dtype) -> None:
        array = settled(numpy_of(torch.tensor([[0, 1], [1, 0]]).to(dtype)))
        value = converted(TensorSpec("t", datatype, (2,)), array, "torch", "cpu")
        assert value.dtype is dtype
        assert value.tolist() == array.tolist()
        assert not overlaps(value, array)

    def test_what_is_of_that_kind_already_is_not_copied(self, datatype: str, dtype: torch.dtype) -> None:
        value = torch.zeros(2, 2, dtype=dtype)
        array = numpy_of(value)
        spec = TensorSpec("t", datatype, (2,))
        assert converted(spec, value, "torch", "cpu") is value
        assert converted(spec, array, "numpy", "cpu") is array


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_bytes_are_numpy_objects_for_every_kind(kind: Any) -> None:
    array = np.array([[b"a"]], object)
    assert converted(TensorSpec("t", "BYTES", (1,)), array, kind, "cpu") is array


@pytest.mark.parametrize("value", [np.arange(6).reshape(3, 2), torch.arange(6).reshape(3, 2)], ids=["numpy", "torch"])
class TestRows:
    def test_some_rows_have_memory_of_their_own(self, value: Any) -> None:
        some = rows_of(value, [0, 2])
        assert some.tolist() == [[0, 1], [4, 5]]
        assert not overlaps(some, value)

    def test_pieces_are_joined_in_order(self, value: Any) -> None:
        assert joined([value[:1], value[1:]]).tolist() == value.tolist()

    def test_a_copy_can_be_written_and_changes_nothing(self, value: Any) -> None:
        copy = copied(settled(value))
        copy += 1
        assert value[0, 0] == 0

    def test_a_view_overlaps(self, value: Any) -> None:
        assert overlaps(value, value[1:])
        assert not overlaps(value, copied(value))


def test_a_torch_view_of_a_numpy_array_overlaps_with_it() -> None:
    array = floats(2, 2)
    assert overlaps(torch.from_numpy(array), array[:, 1])


def test_nothing_overlaps_with_a_value_without_elements() -> None:
    assert not overlaps(floats(0, 2), floats(0, 2))
    assert not overlaps(torch.zeros(0), torch.zeros(0))
