"""Python's garbage collector in a process that has started and now serves.

What glibc's allocator does with memory that was freed.

How soon Python's threads give each other the interpreter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from typing import Final

__all__ = ["keep_freed_memory", "settle", "switch_soon"]


def settle(allocations: int | None = None) -> None:
    """What is there now stays for good: collections need not look at it any more.

    A process of ours has some hundred thousand objects from imports alone.

    Args:
        allocations: so many more objects than were freed start a collection; None: as many as before. Where cycles may
            hold large tensors it should stay.
    """
    gc.collect()
    gc.freeze()
    if allocations is not None:
        gc.set_threshold(allocations, *gc.get_threshold()[1:])


KEPT_BYTES: Final = 16 * 1024 * 1024

MAPPED_FROM_BYTES: Final = 4 * 1024 * 1024

# From malloc.h.
_TRIM_THRESHOLD: Final = -1

_MMAP_THRESHOLD: Final = -3


def keep_freed_memory() -> None:
    """Have the allocator keep some memory for what comes next, in this process.

    Otherwise it gives back to the kernel what a tensor of some 100 KB took, and takes it anew for the next one, page by
    page: that costs several times what copying the tensor does.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, MAPPED_FROM_BYTES)


SWITCH_INTERVAL_S: Final = 0.0005


def switch_soon() -> None:
    """For a replica that streams: one thread computes while others send what is there.

    Python's own 5 ms is half a step of a small language model, which would wait for it with each answer that leaves.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
