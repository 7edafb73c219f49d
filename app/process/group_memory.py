"""The memory of process groups, from the kernel and NVML."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Collection
from typing import Any, Final, NamedTuple

__all__ = ["NOTHING", "GroupMemory", "group_members", "measure_groups"]

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class GroupMemory(NamedTuple):
    """The memory of some process groups together."""

    host_bytes: int
    """Resident memory, summed over the processes; shared pages count for each."""
    gpu_bytes: int | None
    """None: NVML is not available (it needs the package nvidia-ml-py and a driver)."""


NOTHING: Final = GroupMemory(0, None)


def group_members(groups: Collection[int]) -> list[int]:
    """The processes of these groups that have not ended."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if int(fields[2]) in groups and fields[0] not in (b"Z", b"X"):
                    found.append(int(entry))
    return found


def measure_groups(groups: Collection[int]) -> GroupMemory:
    """Measure the present memory of these groups' processes."""
    pids = group_members(groups)
    resident = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm", "rb") as file:
            resident += int(file.read().split()[1]) * PAGE_BYTES
    return GroupMemory(resident, _gpu_bytes(set(pids)))


def _gpu_bytes(pids: Collection[int]) -> int | None:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        used = 0
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                if process.pid in pids:
                    used += process.usedGpuMemory or 0
        return used
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
