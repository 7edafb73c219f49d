"""Process settings for serving: the garbage collector, glibc's allocator, the thread switch interval and attention."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from typing import Final

__all__ = ["keep_freed_memory", "settle", "switch_soon", "turn_cudnn_attention_off"]

KEPT_BYTES: Final = 16 * 1024 * 1024
MAPPED_FROM_BYTES: Final = 4 * 1024 * 1024
# From malloc.h.
_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
SWITCH_INTERVAL_S: Final = 0.0005


def settle(allocations: int | None = None) -> None:
    """Exclude all present objects from future collections; imports alone leave some hundred thousand.

    Args:
        allocations: the collector's new threshold; None keeps the present threshold. A process must keep it if
            reference cycles may hold large tensors.
    """
    gc.collect()
    gc.freeze()
    if allocations is not None:
        gc.set_threshold(allocations, *gc.get_threshold()[1:])


def keep_freed_memory(kept_bytes: int = KEPT_BYTES, mapped_from_bytes: int = MAPPED_FROM_BYTES) -> None:
    """Have this process's allocator keep freed memory for reuse.

    By default it returns a tensor of some 100 KB to the kernel, and the next tensor faults the memory in again, page by
    page. This takes several times as long as copying the tensor.

    Args:
        kept_bytes: maximum of freed memory that each of the allocator's arenas keeps.
        mapped_from_bytes: allocations of at least this size are mapped separately and not kept; at most 32 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, kept_bytes)
        library.mallopt(_MMAP_THRESHOLD, mapped_from_bytes)


def switch_soon() -> None:
    """Shorten Python's thread switch interval, for a process that computes in one thread and sends in other threads.

    By default each turn of an event loop waits up to 5 ms for a thread that computes, longer than a fast model takes.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def turn_cudnn_attention_off(device: str) -> None:
    """Have torch compute attention on a GPU without cuDNN, for networks with inputs of many lengths.

    torch prefers cuDNN on some GPUs. cuDNN plans attention again for each length, which takes tens of milliseconds, and
    keeps each plan: https://github.com/huggingface/transformers/pull/48163.
    """
    if device.startswith("cuda"):
        import torch

        torch.backends.cuda.enable_cudnn_sdp(False)
