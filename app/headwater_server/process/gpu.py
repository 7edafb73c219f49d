"""The machine's GPUs, as NVML reports them. Without an NVIDIA driver the functions find no GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["gpu_capacities", "gpu_name", "gpu_processes", "gpu_utilization", "gpus_used"]

Answer = TypeVar("Answer")


def gpu_name(device: str, visible: str | None) -> str | None:
    """The name under which the memory budget knows a device (``cpu``, ``cuda``, ``cuda:N``): ``GPU`` and NVML's index.
    None if the device is no GPU, or if the GPU is not visible or unknown to NVML.

    ``visible`` is the replica's ``CUDA_VISIBLE_DEVICES``; None if it is not set.
    """
    if not device.startswith("cuda"):
        return None
    index = int(device.partition(":")[2] or 0)
    if visible is None:
        return f"GPU {index}"
    shown = [device_id.strip() for device_id in visible.split(",")]
    if index >= len(shown) or not shown[index]:
        return None
    if shown[index].isdigit():
        return f"GPU {int(shown[index])}"
    uuids = _each_gpu(lambda nvml, gpu: str(nvml.nvmlDeviceGetUUID(gpu))) or {}
    return next((name for name, uuid in uuids.items() if uuid.startswith(shown[index])), None)


def gpu_capacities() -> dict[str, int]:
    """The total memory of each GPU in bytes, by the GPU's name; empty if NVML fails."""
    return _each_gpu(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)) or {}


def gpus_used() -> dict[str, int]:
    """The used memory of each GPU in bytes, over all processes, by the GPU's name; empty if NVML fails."""
    return _each_gpu(lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used)) or {}


def gpu_processes() -> dict[str, dict[int, int]] | None:
    """GPU memory of each process in bytes, by the GPU's name and process id; None if NVML fails."""
    return _each_gpu(
        lambda nvml, gpu: {
            process.pid: process.usedGpuMemory or 0 for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
        }
    )


def gpu_utilization(seconds: float) -> dict[int, float]:
    """The fraction of the last ``seconds`` in which a kernel of a process ran, 0 to 1 per GPU: by process id, summed
    over GPUs.

    Processes without NVML samples are left out. The result is empty if NVML fails or the GPU doesn't support it.
    """
    since_us = int((time.time() - seconds) * 1e6)
    utilization: dict[int, float] = defaultdict(float)
    for samples in (_each_gpu(lambda nvml, gpu: _busy(nvml, gpu, since_us)) or {}).values():
        for pid, part in samples.items():
            utilization[pid] += part
    return dict(utilization)


def _busy(nvml: Any, gpu: Any, since_us: int) -> dict[int, float]:
    try:
        samples = nvml.nvmlDeviceGetProcessUtilization(gpu, since_us)
    except nvml.NVMLError:  # "not found" where no process has computed since then
        return {}
    percents: dict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if sample.timeStamp > since_us:  # some drivers return older samples, too
            percents[sample.pid].append(sample.smUtil)
    return {pid: sum(readings) / len(readings) / 100 for pid, readings in percents.items()}


def _each_gpu(ask: Callable[[Any, Any], Answer]) -> dict[str, Answer] | None:
    """The result of ``ask`` for each GPU, by the GPU's name; None if NVML fails, for example because no NVIDIA driver
    is installed."""
    import pynvml  # imported late: it takes memory, and gateway workers import this module without measuring GPUs

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        count = pynvml.nvmlDeviceGetCount()
        return {f"GPU {index}": ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)}
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()
