"""The memory of the machine and its GPUs, and how much of each process groups use."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from app.process.group_memory import PAGE_BYTES
from app.process.machine import HOST

__all__ = ["gpu_capacities", "gpu_name", "gpus_used", "host_capacity", "measure_groups_by_place"]

Answer = TypeVar("Answer")

UNLIMITED_BYTES: Final = 1 << 60
"""Without a limit, cgroup v1 reports a number above this."""


def host_capacity(root: Path = Path("/")) -> int | None:
    """The machine's memory or the limit of this process's cgroup, whichever is less. None: unknown.

    Args:
        root: the folder of ``proc`` and ``sys``; for tests.
    """
    found = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemTotal:")).split()[1]))
    for file in _cgroup_limits(root):
        with contextlib.suppress(OSError, ValueError):  # missing, or "max"
            limit = int(file.read_text())
            if limit < UNLIMITED_BYTES:
                found.append(limit)
    return min(found, default=None)


def _cgroup_limits(root: Path) -> Iterator[Path]:
    """The files with the limits of this process's cgroup and all its parents."""
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
        for inner in (group, *group.parents):  # in a container the path may be the host's; then only the root exists
            yield folder / inner / name


def gpu_name(device: str, visible: str | None) -> str | None:
    """The memory budget's name for a GPU; None if the device is no GPU.

    Args:
        device: as in the configuration or from a replica: ``cpu``, ``cuda``, ``cuda:N``.
        visible: the replica's ``CUDA_VISIBLE_DEVICES``.
    """
    if not device.startswith("cuda"):
        return None
    index = int(device.partition(":")[2] or 0)
    if visible is None:
        return f"GPU {index}"
    shown = [one.strip() for one in visible.split(",")]
    if index >= len(shown) or not shown[index]:
        return None
    if shown[index].isdigit():
        return f"GPU {int(shown[index])}"
    return next((name for name, uuid in _each_gpu(_uuid).items() if uuid.startswith(shown[index])), None)


def gpu_capacities() -> dict[str, int]:
    """The memory of each GPU, by name; empty if NVML is not available."""
    return _each_gpu(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total))


def gpus_used() -> dict[str, int]:
    """The used memory of each GPU, by any process."""
    return _each_gpu(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used))


def measure_groups_by_place(groups: Collection[int]) -> dict[int, dict[str, int]]:
    """The memory that each of these process groups uses on the machine and on each GPU.

    On the machine this is the proportional share (PSS), which counts pages shared by several processes once in all, or
    the resident set where the kernel doesn't report PSS.
    """
    found: dict[int, dict[str, int]] = {group: {HOST: 0} for group in groups}
    members: dict[int, int] = {}
    for pid, group in _members(groups):
        members[pid] = group
        found[group][HOST] += _host_bytes(pid)
    for name, processes in _each_gpu(lambda nvml, gpu: list(nvml.nvmlDeviceGetComputeRunningProcesses(gpu))).items():
        for process in processes:
            if process.pid in members and process.usedGpuMemory:
                has = found[members[process.pid]]
                has[name] = has.get(name, 0) + int(process.usedGpuMemory)
    return found


def _uuid(nvml: Any, gpu: Any) -> str:
    return str(nvml.nvmlDeviceGetUUID(gpu))


def _members(groups: Collection[int]) -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                group = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[2])
                if group in groups:
                    yield int(entry.name), group


def _host_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def _each_gpu(ask: Callable[[Any, Any], Answer]) -> dict[str, Answer]:
    """Ask NVML about each GPU, by name; empty if NVML is not available (it needs nvidia-ml-py and a driver)."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return {}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return {}
    try:
        count = nvml.nvmlDeviceGetCount()
        return {f"GPU {index}": ask(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)}
    except nvml.NVMLError:
        return {}
    finally:
        nvml.nvmlShutdown()
