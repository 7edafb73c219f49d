"""Tests and measures Headwater on an NVIDIA GPU: ``make -C benchmarks gpu``, or ``python -m benchmarks.gpu``.

``[--only a,b] [--again] [--within S] [--out FOLDER] [--device cuda:0] [--cpu] [--smoke]``; see docs/gpu.md. What is
found goes to gpu.json and, made from that, gpu.md in the folder, after each part; another run goes on where the last
one ended. Exit status: 0 if all parts passed, 1 if one did not, 2 for wrong options, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.gpu.machine import look
from benchmarks.gpu.part import PARTS
from benchmarks.gpu.record import Report, read, write
from benchmarks.gpu.report import markdown
from benchmarks.gpu.runner import Runner, part_command
from benchmarks.smoke import parse_with_smoke
from headwater_server.process.gpu import gpu_capacities

RESULTS: Final = Path(__file__).parents[1] / "results"
NO_GPU: Final = 3
SMOKE_PARTS: Final = "d"


def main() -> None:
    """Run it."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description="Prove and measure Headwater on an NVIDIA GPU.")
    parts = "; ".join(f"{name}: {title}" for name, (_, title) in PARTS.items())
    parser.add_argument("--only", default=",".join(PARTS), help=f"the parts to run, such as a,b. {parts}")
    parser.add_argument("--again", action="store_true", help="forget what is known of these parts, and run them anew")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="end after so many seconds")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results/gpu, or gpu-cpu")
    parser.add_argument("--device", default="cuda:0", help="the GPU; default: cuda:0")
    parser.add_argument("--cpu", action="store_true", help="run everything on the CPU instead, with tiny sizes")
    options = parse_with_smoke(parser, cpu=True, only=SMOKE_PARTS)
    wanted = [name for name in options.only.split(",") if name]
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    device = "cpu" if options.cpu else options.device
    if not options.cpu and not gpu_capacities():
        _refuse("NVML finds no NVIDIA GPU on this machine")
    machine = look(device)
    if not options.cpu and "gpu" not in machine:
        torch = machine["packages"].get("torch")
        _refuse(f"torch {torch} cannot use this machine's GPU (it is built for CUDA {machine['cuda']})")
    with contextlib.ExitStack() as stack:
        folder = options.out or RESULTS / ("gpu-cpu" if options.cpu else "gpu")
        if options.smoke:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hw-gpu-")))
        folder.mkdir(parents=True, exist_ok=True)
        until_s = began_s + options.within
        sys.exit(run(wanted, folder, Report(device, options.cpu, machine), until_s, is_anew=options.again))


def run(wanted: list[str], folder: Path, fresh: Report, until_s: float, *, is_anew: bool) -> int:
    """Run the parts until a time of `time.monotonic`. Returns the exit status."""
    path = folder / "gpu.json"
    report = _known(path, fresh)
    if is_anew:
        report.parts = {name: part for name, part in report.parts.items() if name not in wanted}
    runner = Runner(report, path, part_command(fresh.device, is_tiny=fresh.is_tiny))
    print(f"{_name(fresh.machine)}, torch {fresh.machine['packages'].get('torch')}, commit {fresh.machine['commit']}")
    ordered = [name for name in PARTS if name in wanted]
    for name in ordered:
        if _has_ended(report, name):
            print(f"{name}: {report.parts[name].status} before; --again runs it anew", flush=True)
    # Then once more what a part had no time for.
    for name in [*ordered, *ordered]:
        if _has_ended(report, name):
            continue
        if (left_s := until_s - time.monotonic()) <= 0:
            print(f"{name}: no time is left; another run goes on here", flush=True)
            break
        print(f"{name}: {PARTS[name][1]}", flush=True)
        try:
            part = runner.run(name, left_s)
        finally:
            (folder / "gpu.md").write_text(markdown(report))
        missed = [goal.name for step in part.steps.values() for goal in step.goals if not goal.is_met]
        told = f"; missed: {', '.join(missed)}" if missed and not fresh.is_tiny else ""
        print(f"{name}: {part.status}, {part.took_s:.0f} s{told}", flush=True)
    print(f"{path}\n{folder / 'gpu.md'}")
    statuses = {name: report.parts[name].status if name in report.parts else "not run" for name in wanted}
    bad = [f"{name} {status}" for name, status in statuses.items() if status != "passed"]
    if bad:
        print(f"not passed: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


def _known(path: Path, fresh: Report) -> Report:
    """What an earlier run on this machine found.

    Raises:
        SystemExit: the file is of another machine, or none of ours.
    """
    if not path.exists():
        write(path, fresh)
        return fresh
    try:
        report = read(path, Report)
    except msgspec.MsgspecError as error:
        raise SystemExit(f"{path}: expected a report of ours, got {error}; name another --out") from None
    if (report.device, _name(report.machine)) != (fresh.device, _name(fresh.machine)):
        was, now = f"{_name(report.machine)} ({report.device})", f"{_name(fresh.machine)} ({fresh.device})"
        raise SystemExit(f"{path}: expected a report of {now}, got one of {was}; name another --out")
    report.machine = fresh.machine
    return report


def _has_ended(report: Report, name: str) -> bool:
    return name in report.parts and report.parts[name].status != "unfinished"


def _name(machine: dict[str, Any]) -> str:
    return str(machine.get("gpu", {}).get("name", "CPU"))


def _refuse(why: str) -> None:
    print(f"{why}; `make -C benchmarks gpu ARGS=--cpu` runs every part on the CPU, with tiny sizes", file=sys.stderr)
    sys.exit(NO_GPU)


if __name__ == "__main__":
    main()
