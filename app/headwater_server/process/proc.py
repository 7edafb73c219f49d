"""Threads, memory, CPU time and GPU use of processes and process groups."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import psutil

from headwater_server.process.gpu import gpu_processes, gpu_utilization

__all__ = ["GroupUse", "ProcessUse", "group_members", "group_uses", "members", "process_use", "working_folder"]


class ProcessUse(NamedTuple):
    """Resources that one process uses."""

    threads: int
    resident_bytes: int
    cpu_s: float
    """CPU time since its start, of user and system."""
    started_s: float
    """Start time in seconds of the Unix epoch."""
    open_fds: int


@dataclass(frozen=True)
class GroupUse:
    """Resources that all processes of one or several groups use together."""

    threads: int = 0
    resident_bytes: int = 0
    """Sum over the processes; memory that several processes share counts for each of them."""
    gpu_bytes: int | None = None
    """GPU memory in bytes; None if NVML fails."""
    gpu_utilization: float = 0
    """The fraction of the last `UTILIZATION_S` in which a kernel of these processes ran, summed over processes and
    GPUs; 0 if unknown."""

    def __add__(self, other: GroupUse) -> GroupUse:
        """The sum of both. If the GPU memory of either is unknown, the other value is the sum."""
        gpu_sizes = [count for count in (self.gpu_bytes, other.gpu_bytes) if count is not None]
        total = sum(gpu_sizes) if gpu_sizes else None
        return GroupUse(
            self.threads + other.threads,
            self.resident_bytes + other.resident_bytes,
            total,
            self.gpu_utilization + other.gpu_utilization,
        )


UTILIZATION_S: Final = 5.0
"""Seconds before now in which `group_uses` measures the use of GPUs."""
_ENDED: Final = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
"""States of a process that has ended; the kernel reports "dead" for a moment before the process disappears."""


def process_use(pid: int) -> ProcessUse | None:
    """The resources that a process uses now; None if it has ended, or belongs to another user."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() in _ENDED:
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
    """The resources that the processes of each of these groups use now."""
    on_gpus = gpu_processes()
    busy = gpu_utilization(UTILIZATION_S) if on_gpus else {}
    uses = dict.fromkeys(groups, GroupUse(gpu_bytes=None if on_gpus is None else 0))
    for process, group in members(groups):
        with contextlib.suppress(psutil.Error), process.oneshot():
            gpu_bytes = sum(used.get(process.pid, 0) for used in (on_gpus or {}).values())
            uses[group] += GroupUse(
                process.num_threads(),
                process.memory_info().rss,
                gpu_bytes if on_gpus else None,
                busy.get(process.pid, 0),
            )
    return uses


def members(groups: Collection[int]) -> Iterator[tuple[psutil.Process, int]]:
    """The processes of these groups that have not ended, and the group of each."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            group = os.getpgid(pid)
            if group in groups:
                process = psutil.Process(pid)
                if process.status() not in _ENDED:
                    yield process, group


def working_folder() -> str:
    """This process's working folder. If the folder was removed, its former path, at which another folder may exist
    now."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
