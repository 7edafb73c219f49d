"""Part f: two replicas on one device, and what ``headwater plan`` says of its memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.fanout_servers import headwater, replica_groups
from benchmarks.gpu.images import VISION, bench, vision_options
from benchmarks.gpu.record import Recorder, Step
from benchmarks.gpu.target import MIB, Target
from benchmarks.profiles import wait_for_all

__all__ = ["measure"]

BATCH: Final = 32
MEMORY_OFF_AT_MOST: Final = 0.1
PLAN_NEEDS_S: Final = 190.0
ROOT: Final = Path(__file__).parents[2]


def measure(recorder: Recorder, target: Target) -> None:
    """Run the part."""
    recorder.step("one replica, and two", partial(_two_replicas, target))
    recorder.step("headwater plan", partial(_plan, target), 0 if target.is_tiny else PLAN_NEEDS_S)


def _deployment(target: Target, **more: Any) -> dict[str, Any]:
    return {"model": VISION, "options": vision_options(target), "device": target.device, **more}


def _two_replicas(target: Target, step: Step) -> None:
    batch, seconds = (4, 0.5) if target.is_tiny else (BATCH, 3.0)
    rates = []
    for replicas in (1, 2):
        before = target.used_bytes()
        deployment = _deployment(target, replicas=replicas, batching={"max_batch_size": batch})
        with headwater({"vision": deployment}) as server:
            wait_for_all(server.url)
            step.check(f"{replicas} of {replicas} are ready", len(replica_groups(server, "vision")) == replicas)
            rates.append(batch * bench(server.url, "vision", batch, 4 * replicas, seconds))
            taken = target.used_bytes(server) - before
            kept = sum(target.budget_bytes(group) for group in replica_groups(server))
        count = "1 replica" if replicas == 1 else f"{replicas} replicas"
        step.figure(f"images, {count}", "rows/s", rates[-1])
        step.figure(f"memory, {count}", "MiB", taken / MIB)
        step.figure(f"memory, {count}, as the budget has it", "MiB", kept / MIB)
    step.figure("two replicas / one", "times", rates[1] / rates[0])


def _plan(target: Target, step: Step) -> None:
    sizes = ["1,2", "--replicas", "1"] if target.is_tiny else ["4,32", "--replicas", "1,2"]
    seconds = "0.3" if target.is_tiny else "2"
    with tempfile.TemporaryDirectory(prefix="hw-gpu-") as name:
        folder = Path(name)
        config, report = folder / "config.yaml", folder / "plan.json"
        config.write_text(yaml.safe_dump({"deployments": {"vision": _deployment(target)}}))
        load = [
            "--batch-sizes",
            *sizes,
            "--instances",
            "1",
            "--seconds",
            seconds,
            "--json",
            str(report),
        ]
        verify = ["--no-verify"] if target.is_tiny else ["--rounds", "1"]
        command = [sys.executable, "-m", "headwater_server", "plan", str(config), *load, *verify]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if not report.exists():
            raise RuntimeError(f"headwater plan ended with status {ended.returncode}: {ended.stdout}{ended.stderr}")
        told = json.loads(report.read_bytes())
    step.profile = ended.stdout + ended.stderr
    step.check("it could plan", ended.returncode in (0, 3), f"status {ended.returncode}")
    what = "device memory" if target.is_gpu else "host memory"
    for one in told["points"]:
        if one.get("error"):
            raise RuntimeError(f"headwater plan, {one['rows']} rows, {one['replicas']} replicas: {one['error']}")
        size = f"{one['rows']} rows × {one['replicas']}"
        bytes_ = one["device_bytes" if target.is_gpu else "host_bytes"]
        step.figure(f"{what}, {size}, measured", "MiB", bytes_ / MIB)
        step.figure(f"rate, {size}", told["unit"], one["rate"])
    trials = [*told["checks"], *(one for one in told["profiles"] if "comparisons" in one)]
    compared = [two for one in trials for two in one["comparisons"]]
    for name in sorted({one["what"] for one in compared}):
        errors = [abs(one["error"]) for one in compared if one["what"] == name]
        step.figure(f"{name}, predicted against measured, off by", "%", *(100 * one for one in errors))
        if name == what:
            step.goal(f"{what}, the largest error of a prediction", [max(errors)], at_most=MEMORY_OFF_AT_MOST)
