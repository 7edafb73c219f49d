"""Copies between the host and a GPU, of which there is a stand-in: its copies happen when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headwater.datatypes import float32_to_bf16
from headwater.signature import TensorSpec
from headwater.wire.arrays import argument, fetched, wire

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
