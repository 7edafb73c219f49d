"""Chooses a replica's device, and recognizes errors that make it unusable or report exhausted memory."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

from headwater.environment import check_installed
from headwater.errors import ReplicaError

__all__ = ["breaks_device", "choose_device", "free_memory", "is_out_of_memory", "streams_of"]

_OUT_OF_MEMORY: Final = re.compile(
    r"(?:\w+\.)*OutOfMemoryError\b|.*(?:"
    r"CUDA (?:(?:driver )?error: |failure 2: )?out of memory|Triton Error \[CUDA\]: out of memory|"
    r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_(?:INTERNAL_ERROR_(?:HOST|DEVICE)_)?ALLOC(?:ATION)?_FAILED|CUFFT_ALLOC_FAILED|"
    r"DefaultCPUAllocator: can't allocate memory|"
    r"Failed to allocate memory for requested buffer|Available memory of \d+ is smaller than requested bytes)",
    re.DOTALL,
)
"""The wording of torch, of CUDA's libraries and of ONNX Runtime, after the name of the exception's class."""
_CUDA_ERROR: Final = re.compile(r"CUDA (?:driver )?error|CUDA failure|Triton Error \[CUDA\]|cuDNN (?:Frontend )?error")
"""The wording of torch, of torch's compiled code, and of ONNX Runtime."""


def is_out_of_memory(reason: str) -> bool:
    """Whether an error, given as its class's name and message, says that the device's memory did not suffice for a
    call.

    The device stays usable.
    """
    return _OUT_OF_MEMORY.match(reason) is not None


def free_memory() -> None:
    """Return the GPU memory that torch keeps for reuse to the driver: allocated in other pieces it may suffice.

    The memory of a failed call becomes free only after the call's exception is freed, because its traceback holds the
    memory.
    """
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def breaks_device(reason: str, device: str) -> bool:
    """Whether a CUDA error has broken the context, so that every later call would fail too.

    Some CUDA errors (a wrong launch configuration, for example) leave the context usable; a small trial computation
    with torch shows it. Without torch, or on another device, every CUDA error except exhausted memory counts.

    Args:
        reason: the error's class name and message.
        device: the replica's device.
    """
    if not _CUDA_ERROR.search(reason) or is_out_of_memory(reason):
        return False
    torch: Any = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda"):
        return True
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).add_(1).cpu()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


def choose_device(wanted: str, uses_torch: bool) -> str:
    """Resolve ``auto``, and check that a requested GPU exists. Returns ``cpu`` or ``cuda:N``.

    Args:
        wanted: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        uses_torch: whether ``auto`` imports torch to look for a GPU; if not, ``auto`` is ``cpu``.

    Raises:
        LoadError: torch is not installed.
        ReplicaError: there is no such GPU.
    """
    if wanted == "cpu" or (wanted == "auto" and not uses_torch):
        return "cpu"
    check_installed(f"device {wanted!r}", "torch", "torch")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda:0" if count else "cpu"
    index = int(wanted.partition(":")[2] or 0)
    if index >= count:
        raise ReplicaError(f"device: expected one of {count} GPUs, got {wanted!r}; use `device: cpu` or `auto`")
    return f"cuda:{index}"


def streams_of(device: str, count: int) -> Sequence[Callable[[], AbstractContextManager[Any]]]:
    """For each of ``count`` threads a function that makes the context in which the thread computes. If several threads
    use a GPU through torch, each has a separate CUDA stream, so that the copies of a thread overlap with the
    computation of another thread. Otherwise the contexts have no effect."""
    torch: Any = sys.modules.get("torch")
    if count == 1 or torch is None or not device.startswith("cuda"):
        return [contextlib.nullcontext] * count
    torch.cuda.synchronize(device)  # wait for the weights: other streams don't wait for the stream that loaded them
    return [partial(torch.cuda.stream, torch.cuda.Stream(device)) for _ in range(count)]
