"""What an error of torch or ONNX Runtime says of the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headwater.runtime.device import breaks_device, free_memory, is_out_of_memory, streams_of

pytestmark = pytest.mark.heavy
MEMORY = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB",
    "torch.OutOfMemoryError: HIP out of memory",
    "AcceleratorError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "RuntimeException: [ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Status Message: bfc_arena.cc:376 "
    "onnxruntime::BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 8388608000",
    "RuntimeException: [ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Available memory of 1024 is smaller than requested "
    "bytes of 2048",
    "Fail: [ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory ; GPU=0",
    "RuntimeError: CUDA driver error: out of memory",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    "RuntimeError: cuFFT error: CUFFT_ALLOC_FAILED",
    "RuntimeError: cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
]
POISONED = [
    "AcceleratorError: CUDA error: device-side assert triggered",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "RuntimeError: CUDA driver error: device-side assert triggered",
    "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "RuntimeError: cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.",
    "Fail: [ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered ; GPU=0",
]
OTHERS = ["ValueError: the queue ran out of memory slots", "MemoryError", "RuntimeError: shapes differ"]


@pytest.mark.parametrize("reason", MEMORY)
def test_a_lack_of_memory_leaves_the_device_usable(reason: str) -> None:
    assert is_out_of_memory(reason)
    assert not breaks_device(reason, "cpu")


@pytest.mark.parametrize("reason", POISONED)
def test_a_poisoned_context_is_no_lack_of_memory(reason: str) -> None:
    assert breaks_device(reason, "cpu")
    assert not is_out_of_memory(reason)


@pytest.mark.parametrize("reason", OTHERS)
def test_what_only_sounds_like_it_is_neither(reason: str) -> None:
    assert not is_out_of_memory(reason)
    assert not breaks_device(reason, "cpu")


def test_torch_says_it_so_on_the_cpu() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    assert is_out_of_memory(f"RuntimeError: {raised.value}")


@pytest.mark.parametrize(("is_used", "emptied"), [(True, 1), (False, 0)])
def test_what_torch_keeps_is_given_back_once_it_uses_the_gpu(
    monkeypatch: pytest.MonkeyPatch, is_used: bool, emptied: int
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_used)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    free_memory()
    assert len(calls) == emptied


@pytest.mark.parametrize(("works", "breaks"), [(True, False), (False, True)])
def test_whether_an_error_of_cuda_has_poisoned_the_context_shows_in_a_trial(
    monkeypatch: pytest.MonkeyPatch, works: bool, breaks: bool
) -> None:
    def zeros(*args: Any, **rest: Any) -> Any:
        assert rest["device"] == "cuda:1"
        if not works:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return torch.ones(1)

    synchronized: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert breaks_device("RuntimeError: CUDA error: invalid configuration argument", "cuda:1") is breaks
    assert synchronized == ["cuda:1"]


def test_a_trial_that_lacks_memory_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*args: Any, **rest: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "zeros", zeros)
    assert not breaks_device("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", "cuda:0")


def test_each_of_several_threads_on_a_gpu_has_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    synchronized: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: [device])

    @contextlib.contextmanager
    def within(stream: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "stream", within)
    one, other = streams_of("cuda:1", 2)
    for stream in (one, other, one):
        with stream():
            pass
    assert used == [["cuda:1"]] * 3
    assert used[0] is used[2] is not used[1]
    assert synchronized == ["cuda:1"]


@pytest.mark.parametrize(("device", "count"), [("cuda:0", 1), ("cpu", 2)])
def test_otherwise_there_are_no_streams(device: str, count: int) -> None:
    assert streams_of(device, count) == [contextlib.nullcontext] * count
