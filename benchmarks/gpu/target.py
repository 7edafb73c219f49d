"""The device that is measured: how long calls on it take, what it does meanwhile, and what is used of its memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from benchmarks.fanout_servers import Server, replica_groups
from headwater_server.process.gpu import gpu_name, gpus_used
from headwater_server.process.machine import HOST, measure_groups_by_place

__all__ = ["MIB", "Target"]

MIB: Final = 2**20
PROFILE_ROWS: Final = 12


@dataclass(frozen=True)
class Target:
    """A GPU, or, to try everything but CUDA itself, the CPU."""

    device: str
    is_tiny: bool

    @property
    def is_gpu(self) -> bool:
        """Whether it is one."""
        return self.device.startswith("cuda")

    @property
    def slack_bytes(self) -> int:
        """What memory may differ by that nobody has taken: a CUDA context alone is some hundred MiB."""
        return (16 if self.is_gpu else 64) * MIB

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object], calls: int, *, warmups: int = 3) -> float:
        """Seconds that a call takes on the device, on average over calls that follow each other at once.

        On a GPU between two of its own events, so a call may return before its work is done.
        """
        for _ in range(warmups):
            call()
        self.synchronize()
        if not self.is_gpu:
            began_s = time.perf_counter()
            for _ in range(calls):
                call()
            return (time.perf_counter() - began_s) / calls
        cuda: Any = torch.cuda  # its events have no types
        with cuda.device(self.device):
            first, last = (cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(calls):
                call()
            last.record()
            last.synchronize()
        return float(first.elapsed_time(last)) / 1000 / calls

    def profile(self, call: Callable[[], object], calls: int = 5) -> str:
        """Where the time of some calls goes: what the device computes, what the processor does, and the part of the
        time in which the device computes. Milliseconds a call."""
        from torch.profiler import ProfilerActivity, profile

        for _ in range(2):
            call()
        self.synchronize()
        began_s = time.perf_counter()
        for _ in range(calls):
            call()
        self.synchronize()
        wall_ms = (time.perf_counter() - began_s) * 1000 / calls  # without the profiler, which slows the processor
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_gpu else [])]
        with profile(activities=activities) as profiled:
            for _ in range(calls):
                call()
            self.synchronize()
        events: Any = profiled.key_averages()

        def on_device_ms(event: Any) -> float:
            return float(event.self_device_time_total) / 1000 / calls

        def on_cpu_ms(event: Any) -> float:
            return float(event.self_cpu_time_total) / 1000 / calls

        # A kernel is an event of its own, and its operator has the same time again.
        kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
        computes_ms = sum(map(on_device_ms, kernels))
        lines = [f"a call takes {wall_ms:.3f} ms"]
        if self.is_gpu and not kernels:
            lines[0] += "; the profiler recorded nothing of the device"
        elif self.is_gpu:
            lines[0] += f", of which the device computes {computes_ms:.3f} ms ({computes_ms / wall_ms:.0%})"
        lines.append(f"{'on the device, ms':>18} {'on the processor, ms':>21} {'times':>6}  what")
        shown = sorted(kernels, key=on_device_ms)[-PROFILE_ROWS:][::-1]
        shown += sorted((event for event in events if event not in kernels), key=on_cpu_ms)[-PROFILE_ROWS:][::-1]
        for event in shown:
            times = event.count / calls
            row = f"{on_device_ms(event):>18.3f} {on_cpu_ms(event):>21.3f} {times:>6.0f}  {event.key[:70]}"
            lines.append(row)
        return "\n".join(lines)

    def used_bytes(self, server: Server | None = None) -> int:
        """What is used of the device's memory, by anyone; on a CPU what the replicas of a server have (PSS)."""
        if self.is_gpu:
            return gpus_used()[self._gpu_name]
        if server is None:
            return 0
        return sum(places[HOST] for places in measure_groups_by_place(replica_groups(server)).values())

    def budget_bytes(self, group: int) -> int:
        """What the memory budget takes a replica, a process group, to have of the device's memory."""
        return measure_groups_by_place([group])[group].get(self._gpu_name if self.is_gpu else HOST, 0)

    @property
    def _gpu_name(self) -> str:
        name = gpu_name(self.device, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if name is None:
            raise RuntimeError(f"{self.device}: expected a GPU among CUDA_VISIBLE_DEVICES, got none")
        return name
