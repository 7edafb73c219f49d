"""The resources that processes use, from the kernel and NVML."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["GroupUse", "ProcessUse", "group_uses", "process_use"]

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


class ProcessUse(NamedTuple):
    """One process."""

    group: int
    threads: int
    resident_bytes: int
    cpu_s: float
    started_s: float
    """In seconds since the Unix epoch."""
    open_fds: int


class GroupUse(NamedTuple):
    """All processes of a group together."""

    threads: int = 0
    resident_bytes: int = 0
    """Shared pages count for each process."""
    gpu_bytes: int | None = None
    """None: NVML is not available."""


def process_use(pid: int) -> ProcessUse | None:
    """A process's present use; None if it has ended."""
    fields = _stat(pid)
    if fields is None:
        return None
    try:
        open_fds = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it has just ended, or is another user's
        return None
    return ProcessUse(
        group=int(fields[2]),
        threads=int(fields[17]),
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        cpu_s=(int(fields[11]) + int(fields[12])) * TICK_S,
        started_s=_boot_s() + int(fields[19]) * TICK_S,
        open_fds=open_fds,
    )


def group_uses(groups: Collection[int]) -> dict[int, GroupUse]:
    """The present use of each of these groups, from one pass over all processes of the machine."""
    uses = dict.fromkeys(groups, GroupUse())
    pids: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            group = int(fields[2])
            if group in uses:
                known = uses[group]
                resident_bytes = known.resident_bytes + int(fields[21]) * PAGE_BYTES
                uses[group] = GroupUse(known.threads + int(fields[17]), resident_bytes)
                pids[int(entry)] = group
    used = _gpu_bytes()
    if used is None:
        return uses
    for group, use in uses.items():
        uses[group] = use._replace(gpu_bytes=sum(used.get(pid, 0) for pid, one in pids.items() if one == group))
    return uses


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third, the state, on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields if fields and fields[0] not in (b"Z", b"X") else None


def _boot_s() -> float:
    with open("/proc/stat", "rb") as file:
        for line in file:
            if line.startswith(b"btime "):
                return float(line.split()[1])
    return 0.0


def _gpu_bytes() -> Mapping[int, int] | None:
    """Memory on all GPUs, by process."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    nvml: Any = importlib.import_module("pynvml")
    used: dict[int, int] = {}
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
                    used[process.pid] = used.get(process.pid, 0) + (process.usedGpuMemory or 0)
        finally:
            nvml.nvmlShutdown()
        return used
    return None
