"""What glibc's allocator does with memory that was freed."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

__all__ = ["keep_freed_memory"]

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
