"""What a machine has: its GPU and driver, versions, memory and cores.

``python -m benchmarks.gpu.machine DEVICE`` prints it as JSON, in a process of its own, since it begins a CUDA context.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from headwater_server.process.machine import host_capacity

__all__ = ["look"]

PACKAGES: Final = ("torch", "transformers", "nvidia-pytriton", "numpy", "fastapi", "uvicorn")
ROOT: Final = Path(__file__).parents[2]


def look(device: str) -> dict[str, Any]:
    """Look at this machine, from another process.

    Raises:
        RuntimeError: that process failed.
    """
    command = [sys.executable, "-m", "benchmarks.gpu.machine", device]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if ended.returncode:
        raise RuntimeError(f"benchmarks.gpu.machine ended with status {ended.returncode}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def _look(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": host_capacity(),
        "commit": _commit(),
        "packages": _versions(),
        "cuda": torch.version.cuda,
        "cuda_is_available": torch.cuda.is_available(),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(device)
        found["gpu"] = {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count,
            "capability": f"{gpu.major}.{gpu.minor}",
            **_by_nvml(str(gpu.uuid)),
        }
    return found


def _by_nvml(uuid: str) -> dict[str, Any]:
    import pynvml

    found: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        found["driver"] = pynvml.nvmlSystemGetDriverVersion()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        found["power_limit_w"] = pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000
        # A transfer at each edge of the clock.
        bits = 2 * pynvml.nvmlDeviceGetMemoryBusWidth(gpu)
        found["bytes_per_s"] = bits / 8 * 1e6 * pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_MEM)
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _commit() -> str:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


if __name__ == "__main__":
    print(json.dumps(_look(sys.argv[1])))
