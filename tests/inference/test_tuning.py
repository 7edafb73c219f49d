"""Settings of the process: what the allocator keeps."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAPPED = """
import ctypes, sys
from inference.tuning import keep_freed_memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]

library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.mallinfo2.restype = Info
keep_freed_memory(*map(int, sys.argv[1:]))
before = library.mallinfo2().hblks
taken = library.malloc(ctypes.c_size_t(12 << 20))
print(library.mallinfo2().hblks - before)
"""
"""Says whether 12 MiB are allocated apart, and therefore given back to the kernel when they are freed."""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(("arguments", "apart"), [([], 1), ([64 << 20, 32 << 20], 0)])
def test_memory_from_a_size_on_is_allocated_apart(arguments: list[int], apart: int) -> None:
    command = [sys.executable, "-c", MAPPED, *map(str, arguments)]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) == apart
