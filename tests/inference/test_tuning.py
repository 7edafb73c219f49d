"""Settings of the process: what the allocator keeps, and how attention is computed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headwater.tuning import turn_cudnn_attention_off

MAPPED = """
import ctypes, sys
from headwater.tuning import keep_freed_memory

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


@pytest.mark.heavy
@pytest.mark.parametrize(("device", "asked"), [("cpu", []), ("cuda:0", [False])])
def test_only_on_a_gpu_is_cudnns_attention_turned_off(
    monkeypatch: pytest.MonkeyPatch, device: str, asked: list[bool]
) -> None:
    import torch

    called: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", called.append)
    turn_cudnn_attention_off(device)
    assert called == asked
