"""Copies between the host and a GPU, of which there is a stand-in: its copies happen when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headwater.datatypes import float32_to_bf16
from headwater.errors import BadOutput
from headwater.signature import TensorSpec
from headwater.wire.arrays import MOST_RAGGED, argument, fetched, ragged, wire

pytestmark = pytest.mark.heavy
X = TensorSpec("x", "FP32", (3,))


class Gpu:
    """Copies in the background, as a GPU does: whoever reads before it was waited for reads something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending: list[Callable[[], object]] = []
        self.waits = 0
        empty = torch.empty

        def allocate(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> Pinned:
            assert pin_memory
            found = empty(shape, dtype=dtype).view(torch.uint8).fill_(0x77).view(dtype).as_subclass(Pinned)
            found.gpu = self
            return found

        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)

    def synchronize(self) -> None:
        self.waits += 1
        pending, self.pending = self.pending, []
        for copy in pending:
            copy()


class OnGpu(torch.Tensor):
    is_cuda = True


class Pinned(torch.Tensor):
    gpu: Gpu

    def to(self, device: str, *, non_blocking: bool) -> Any:  # type: ignore[override]
        assert (device, non_blocking) == ("cuda:0", True)
        source = self.as_subclass(torch.Tensor)
        there = torch.zeros_like(source)
        self.gpu.pending.append(lambda: there.copy_(source))
        return there.as_subclass(OnGpu)

    def copy_(self, value: Any, non_blocking: bool = False) -> Any:
        assert isinstance(value, OnGpu)
        assert non_blocking
        here, there = self.as_subclass(torch.Tensor), value.as_subclass(torch.Tensor)
        self.gpu.pending.append(lambda: here.copy_(there))
        return here


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize("rows", [None, [0, 2, 2]], ids=["all", "some"])
def test_an_input_may_be_overwritten_while_it_is_on_its_way(gpu: Gpu, rows: list[int] | None) -> None:
    array = np.arange(9, dtype=np.float32).reshape(3, 3)
    expected = array.copy() if rows is None else array[rows]
    array.flags.writeable = False
    found = argument(X, array, "torch", "cuda:0", rows)
    array.flags.writeable = True
    array[:] = -1  # the gateway reuses the segment
    assert (len(gpu.pending), gpu.waits) == (1, 0)
    gpu.synchronize()
    assert found.as_subclass(torch.Tensor).numpy().tolist() == expected.tolist()


def test_inputs_of_every_type_arrive(gpu: Gpu) -> None:
    bf16 = argument(TensorSpec("x", "BF16", (1,)), float32_to_bf16(np.array([[1.5]], np.float32)), "torch", "cuda:0")
    flags = argument(TensorSpec("x", "BOOL", (1,)), np.array([[True]]), "torch", "cuda:0")
    counts = argument(TensorSpec("x", "UINT16", (1,)), np.array([[40_000]], np.uint16), "torch", "cuda:0")
    gpu.synchronize()
    assert (bf16.dtype, bf16.float().item()) == (torch.bfloat16, 1.5)
    assert (flags.item(), counts.item()) == (True, 40_000)


def test_outputs_come_together_and_are_waited_for_once(gpu: Gpu) -> None:
    y = torch.arange(6.0).reshape(2, 3)
    outputs = {"y": y.as_subclass(OnGpu), "z": y.T.as_subclass(OnGpu), "n": np.ones(2), "c": torch.ones(2)}
    found = fetched(outputs)
    assert gpu.waits == 1
    assert found["n"] is outputs["n"]
    assert found["c"] is outputs["c"]
    assert wire(TensorSpec("y", "FP32", (3,)), found["y"], 2).tolist() == y.tolist()
    assert wire(TensorSpec("z", "FP32", (2,)), found["z"], 3).tolist() == y.T.tolist()


def test_without_anything_on_a_gpu_nothing_is_waited_for(gpu: Gpu) -> None:
    y = torch.ones(2)
    assert fetched({"y": y})["y"] is y
    assert gpu.waits == 0


BOXES = TensorSpec("boxes", "FP32", (-1, 2), ragged=True)


def test_rows_of_a_ragged_output_are_as_long_as_the_longest_and_their_sizes_are_counted() -> None:
    rows = [np.ones((2, 2), "f4"), torch.full((3, 2), 2.0), np.zeros((0, 2), "f4")]
    whole, counts = ragged(BOXES, rows, 3)
    assert whole.tolist() == [[[1, 1], [1, 1], [0, 0]], [[2, 2]] * 3, [[0, 0]] * 3]
    assert counts.tolist() == [[2], [3], [0]]
    assert counts.dtype == np.int32
    words, counts = ragged(TensorSpec("words", "BYTES", (-1,), ragged=True), (["a", b"b"], []), 2)
    assert (words.tolist(), counts.tolist()) == ([[b"a", b"b"], [b"", b""]], [[2], [0]])
    assert ragged(BOXES, [np.zeros((0, 2), "f4")] * 2, 2)[0].shape == (2, 0, 2)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ones((2, 3, 2), "f4"), "expected a list of 2 arrays, one for each row, got ndarray"),
        ([np.ones((1, 2), "f4")], "expected a list of 2 arrays, one for each row, got 1"),
        ([np.ones((1, 2), "f4"), 1.0], "output 'boxes', row 1: expected an array, got float"),
        ([np.ones((1, 2), "f4"), np.ones((3, 4), "f4")], r"expected FP32 [3, 2], got FP32 [3, 4]"),
        ([np.ones((1, 2), "f4"), np.ones((3, 2), "f8")], r"expected FP32 [3, 2], got FP64 [3, 2]"),
        ([np.zeros((0, 2), "f4"), np.zeros((MOST_RAGGED // 4 + 1, 2), "f4")], "elements in all rows, each as long as"),
    ],
)
def test_a_ragged_output_of_another_form_is_named(value: object, words: str) -> None:
    with pytest.raises(BadOutput) as caught:
        ragged(BOXES, value, 2)
    assert words in str(caught.value)


def test_rows_of_a_ragged_output_differ_in_their_first_dimension_only() -> None:
    crops = TensorSpec("crops", "UINT8", (-1, -1), ragged=True)
    with pytest.raises(BadOutput, match=r"differ in the first dimension only, got elements \[3\] and \[4\]"):
        ragged(crops, [np.ones((2, 3), "u1"), np.ones((2, 4), "u1")], 2)
