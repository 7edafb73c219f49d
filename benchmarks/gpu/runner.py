"""Runs the parts one after the other, each in processes of its own with a time limit, and keeps what they found."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import psutil

from benchmarks.fanout_servers import tree
from benchmarks.gpu.record import BROKEN_DEVICE, Part, Report, read, write

__all__ = ["LIMIT_S", "Command", "Runner", "part_command"]

LIMIT_S: Final = 240.0
"""For one part."""
LEAST_S: Final = 20.0
"""With less time no process is started."""
END_TIMEOUT_S: Final = 30.0
"""For the servers of a part that is interrupted."""
ROOT: Final = Path(__file__).parents[2]

Command = Callable[[str, Path, float], Sequence[str]]
"""Called with a part's name, its file and its time in seconds: the command that runs it."""


class Runner:
    """Runs parts.

    Args:
        report: what is known so far; whatever ends is added to it, and written.
        path: where to write it.
        command: runs a part.
        limit_s: for one part.
    """

    def __init__(self, report: Report, path: Path, command: Command, limit_s: float = LIMIT_S) -> None:
        self._report = report
        self._path = path
        self._command = command
        self._limit_s = limit_s

    def run(self, name: str, within_s: float = float("inf")) -> Part:
        """Run a part, or what is left of it.

        A step that its process did not survive is a failure, and the steps after it get a new process. So is a step at
        which the part's time was over; if ``within_s`` ended it, the step is run again by the next call.

        Args:
            name: the part's.
            within_s: how much time there is besides the part's limit.

        Raises:
            KeyboardInterrupt: Ctrl-C; what had ended is written.
        """
        began_s = time.monotonic()
        limit_s = min(self._limit_s, within_s)
        part = self._report.parts.setdefault(name, Part())
        part.error, part.is_whole = "", False
        before_s = part.took_s
        with tempfile.TemporaryDirectory(prefix="hw-gpu-") as folder:
            path, log = Path(folder, "part.json"), Path(folder, "log")
            write(path, part)

            def keep(status: int | None) -> None:
                nonlocal part
                part = self._report.parts[name] = read(path, Part)
                part.took_s = before_s + time.monotonic() - began_s
                if status is None and limit_s < self._limit_s:
                    _drop_running(part)
                else:
                    self._settle(part, status, log)
                write(path, part)
                write(self._path, self._report)

            while (left_s := limit_s - (time.monotonic() - began_s)) > min(LEAST_S, limit_s / 2):
                try:
                    status = self._run_once(self._command(name, path, left_s), log, left_s)
                except KeyboardInterrupt:
                    part = self._report.parts[name] = read(path, Part)
                    _drop_running(part)
                    write(self._path, self._report)
                    raise
                steps = len(part.steps)
                keep(status)
                if not status or part.error or len(part.steps) == steps:
                    break
        return part

    def _run_once(self, command: Sequence[str], log: Path, limit_s: float) -> int | None:
        """The exit status of a process; None: its time was over."""
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=output, start_new_session=True
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)

    def _settle(self, part: Part, status: int | None, log: Path) -> None:
        """Note what became of a step that was running when the process ended, and why it ended."""
        if status is None:
            why = f"the part's time, {self._limit_s:g} s, was over"
        else:
            why = f"its process ended with status {status}; it said:\n{log.read_text(errors='replace')[-3000:]}"
        running = [step for step in part.steps.values() if step.took_s is None]
        for step in running:
            step.took_s, step.error = 0, why
        if not running and status not in (0, None, BROKEN_DEVICE):
            part.error = why


def _drop_running(part: Part) -> None:
    """Forget the step that was running; the next run begins it anew."""
    part.steps = {name: step for name, step in part.steps.items() if step.took_s is not None}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part's process, if it has not ended, and its servers: first as Ctrl-C does."""
    if process.poll() is not None:
        return
    family = [psutil.Process(pid) for pid in tree(process.pid) if psutil.pid_exists(pid)]
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    for one in family:  # a test's server outlives its pytest
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def part_command(device: str, *, is_tiny: bool) -> Command:
    """What runs a part of `benchmarks.gpu.part`."""

    def command(name: str, path: Path, limit_s: float) -> Sequence[str]:
        tiny = ["tiny"] if is_tiny else []
        return [sys.executable, "-m", "benchmarks.gpu.part", name, str(path), f"{limit_s:.1f}", device, *tiny]

    return command
