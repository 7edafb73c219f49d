"""How much memory the machine has, and how much of it process groups have, by place."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

import psutil

from app.process.gpu import gpu_processes
from app.process.proc import members

__all__ = ["HOST", "host_capacity", "measure_groups_by_place", "size_text"]

HOST: Final = "the machine"
"""The place where every replica takes memory, even one on a GPU."""


def size_text(count: int) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.1f} GiB" if count >= 10 * 2**30 else f"{count / 2**20:.0f} MiB"


UNLIMITED_BYTES: Final = 1 << 60
"""Cgroup v1 reports a value above this where there is no limit."""


def host_capacity(root: Path = Path("/")) -> int | None:
    """The machine's memory, or what this process's cgroup may have of it, whichever is less. None: unknown.

    ``proc`` and ``sys`` are in ``root``.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemTotal:")).split()[1]))
    for file in _cgroup_limits(root):
        with contextlib.suppress(OSError, ValueError):  # it isn't there, or "max"
            limit = int(file.read_text())
            if limit < UNLIMITED_BYTES:
                found.append(limit)
    return min(found, default=None)


def _cgroup_limits(root: Path) -> Iterator[Path]:
    """The files with the limits of this process's groups, from the innermost one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            folder, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
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
