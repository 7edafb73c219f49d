"""The machine's CPUs and memory, and the memory of process groups by place: the machine's memory, or a GPU's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import psutil

from headwater_server.process.gpu import gpu_processes
from headwater_server.process.proc import members

__all__ = ["HOST", "cpu_count", "host_capacity", "measure_groups_by_place", "size_text"]

HOST: Final = "the machine"
"""The place in which every replica takes memory, even a replica on a GPU."""


def size_text(count: int) -> str:
    """A number of bytes as text, in MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:.0f} MiB"


UNLIMITED_BYTES: Final = 1 << 60
"""Value above which a limit of cgroup v1 means "no limit"."""


def cpu_count(root: Path = Path("/")) -> int:
    """The number of CPUs that this process may run on, or its cgroups' quota of CPU time, rounded up, whichever is
    less.

    A quota of 1.5 CPUs counts as 2: a single thread could not use it up. ``root`` is the folder with ``proc`` and
    ``sys``.
    """
    counts = [len(os.sched_getaffinity(0))]
    for file in _cgroup_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max"
            numbers = file.read_text().split()
            if file.name != "cpu.max":
                numbers.append(file.with_name("cpu.cfs_period_us").read_text())
            quota_us, period_us = map(int, numbers)
            if quota_us > 0:  # -1 in v1: no quota
                counts.append(-(-quota_us // period_us))
    return min(counts)


def host_capacity(root: Path = Path("/")) -> int | None:
    """The machine's memory or the limit of this process's cgroups in bytes, whichever is less; None if unknown.

    ``root`` is the folder with ``proc`` and ``sys``.
    """
    capacities = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        capacities.append(1024 * int(next(line for line in lines if line.startswith("MemTotal:")).split()[1]))
    for file in _cgroup_files(root, "memory", "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # the file is missing, or says "max"
            limit = int(file.read_text())
            if limit < UNLIMITED_BYTES:
                capacities.append(limit)
    return min(capacities, default=None)


def _cgroup_files(root: Path, controller: str, name_v2: str, name_v1: str) -> Iterator[Path]:
    """Files that may have a limit of this process's cgroups, v2 or v1, the innermost cgroup first."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            folder, name = root / "sys/fs/cgroup", name_v2
        elif controller in controllers.split(","):
            folder, name = root / "sys/fs/cgroup" / controller, name_v1
        else:
            continue
        group = Path(path.lstrip("/"))
        # In a container the path may be the host's: then only the limit of the mount itself is found.
        for inner in (group, *group.parents):
            yield folder / inner / name


def measure_groups_by_place(groups: Collection[int]) -> dict[int, dict[str, int]]:
    """The memory of each of these process groups in bytes, by place (`HOST` or a GPU's name). A group without processes
    has 0 in `HOST`.

    The machine's memory is the proportional set size (PSS), in which each shared page counts once over all processes.
    Where the kernel doesn't report the PSS, it is the resident set size.
    """
    sizes: dict[int, dict[str, int]] = {group: {HOST: 0} for group in groups}
    group_of: dict[int, int] = {}
    for process, group in members(groups):
        with contextlib.suppress(psutil.Error):  # the process has just ended
            sizes[group][HOST] += _host_bytes(process)
        group_of[process.pid] = group
    for name, processes in (gpu_processes() or {}).items():
        for pid, used_bytes in processes.items():
            if pid in group_of and used_bytes:
                has = sizes[group_of[pid]]
                has[name] = has.get(name, 0) + used_bytes
    return sizes


def _host_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.AccessDenied):
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.rss))  # a kernel may be built without PSS
    return int(process.memory_info().rss)
