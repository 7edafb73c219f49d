"""How many CPUs and how much memory the machine has, and how much memory process groups have, by place."""

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
"""The place where every replica takes memory, even one on a GPU."""


def size_text(count: int) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:.0f} MiB"


UNLIMITED_BYTES: Final = 1 << 60
"""Cgroup v1 reports a value above this where there is no limit."""


def cpu_count(root: Path = Path("/")) -> int:
    """The CPUs that this process may run on, or its cgroup's quota of CPU time, rounded up, whichever is less.

    A quota of 1.5 CPUs counts as 2: one thread could not use it up. ``proc`` and ``sys`` are in ``root``.
    """
    found = [len(os.sched_getaffinity(0))]
    for file in _cgroup_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):  # it isn't there, or "max"
            numbers = file.read_text().split()
            if file.name != "cpu.max":
                numbers.append(file.with_name("cpu.cfs_period_us").read_text())
            quota_us, period_us = map(int, numbers)
            if quota_us > 0:  # in v1, -1 is none
                found.append(-(-quota_us // period_us))
    return min(found)


def host_capacity(root: Path = Path("/")) -> int | None:
    """The machine's memory, or what this process's cgroup may have of it, whichever is less. None: unknown.

    ``proc`` and ``sys`` are in ``root``.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemTotal:")).split()[1]))
    for file in _cgroup_files(root, "memory", "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # it isn't there, or "max"
            limit = int(file.read_text())
            if limit < UNLIMITED_BYTES:
                found.append(limit)
    return min(found, default=None)


def _cgroup_files(root: Path, controller: str, name_v2: str, name_v1: str) -> Iterator[Path]:
    """Where a limit of this process's groups may be, from the innermost one, in cgroup v2 or v1."""
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
        for inner in (group, *group.parents):  # in a container the path may be the host's: then only the mount's own is
            yield folder / inner / name


def measure_groups_by_place(groups: Collection[int]) -> dict[int, dict[str, int]]:
    """The memory of each of these process groups, by place.

    On the machine it is the proportional share (PSS), which counts shared pages once in all, or the resident set where
    the kernel doesn't report the PSS.
    """
    found: dict[int, dict[str, int]] = {group: {HOST: 0} for group in groups}
    group_of: dict[int, int] = {}
    for process, group in members(groups):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found[group][HOST] += _host_bytes(process)
        group_of[process.pid] = group
    for name, processes in (gpu_processes() or {}).items():
        for pid, used_bytes in processes.items():
            if pid in group_of and used_bytes:
                has = found[group_of[pid]]
                has[name] = has.get(name, 0) + used_bytes
    return found


def _host_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.AccessDenied):
        memory = process.memory_full_info()
        return int(getattr(memory, "pss", memory.rss))  # a kernel may be built without it
    return int(process.memory_info().rss)
