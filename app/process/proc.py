"""What processes and process groups have of the machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import psutil

from app.process.gpu import gpu_processes

__all__ = [
    "NOTHING",
    "GroupMemory",
    "GroupUse",
    "ProcessUse",
    "group_members",
    "group_uses",
    "measure_groups",
    "members",
    "process_use",
]


class ProcessUse(NamedTuple):
    """One process."""

    threads: int
    resident_bytes: int
    cpu_s: float
    started_s: float
    """In seconds of the Unix epoch."""
    open_fds: int


class GroupUse(NamedTuple):
    """All processes of a group together."""

    threads: int = 0
    resident_bytes: int = 0
    """What several of them share counts for each."""
    gpu_bytes: int | None = None
    """None: NVML is not there to tell."""


class GroupMemory(NamedTuple):
    """Of some process groups together."""

    host_bytes: int
    """Resident memory, summed over the processes: what several of them share counts for each."""
    gpu_bytes: int | None
    """None: NVML is not there to tell."""


NOTHING: Final = GroupMemory(0, None)


def process_use(pid: int) -> ProcessUse | None:
    """What a process has now; None if it has ended, or is another user's."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            cpu = process.cpu_times()
            return ProcessUse(
                threads=process.num_threads(),
                resident_bytes=process.memory_info().rss,
                cpu_s=cpu.user + cpu.system,
                started_s=process.create_time(),
                open_fds=process.num_fds(),
            )
    except psutil.Error:
        return None


def group_members(groups: Collection[int]) -> list[int]:
    """The processes of these groups that have not ended."""
    return [process.pid for process, _ in members(groups)]


def group_uses(groups: Collection[int]) -> dict[int, GroupUse]:
    """What the processes of each of these groups have now."""
    on_gpus = _gpu_bytes()
    uses = dict.fromkeys(groups, GroupUse(gpu_bytes=None if on_gpus is None else 0))
    for process, group in members(groups):
        with contextlib.suppress(psutil.Error), process.oneshot():
            threads, resident_bytes, gpu_bytes = uses[group]
            uses[group] = GroupUse(
                threads + process.num_threads(),
                resident_bytes + process.memory_info().rss,
                None if on_gpus is None else (gpu_bytes or 0) + on_gpus.get(process.pid, 0),
            )
    return uses


def measure_groups(groups: Collection[int]) -> GroupMemory:
    """Measure what the processes of these groups have now, all together."""
    uses = group_uses(groups).values()
    on_gpus = [use.gpu_bytes for use in uses if use.gpu_bytes is not None]
    return GroupMemory(sum(use.resident_bytes for use in uses), sum(on_gpus) if on_gpus else None)


def members(groups: Collection[int]) -> Iterator[tuple[psutil.Process, int]]:
    """The processes of these groups that have not ended, and the group of each."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            group = os.getpgid(pid)
            if group in groups:
                process = psutil.Process(pid)
                # Dead: the kernel shows a process so for a moment while it goes.
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    yield process, group


def _gpu_bytes() -> dict[int, int] | None:
    """What each process has of all GPUs' memory together."""
    found = gpu_processes()
    if found is None:
        return None
    used: dict[int, int] = {}
    for processes in found.values():
        for pid, used_bytes in processes.items():
            used[pid] = used.get(pid, 0) + used_bytes
    return used
