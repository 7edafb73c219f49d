"""What was found: figures, checks and goals, by part and step, kept in one file so that a later run can go on."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

__all__ = ["BROKEN_DEVICE", "Check", "Figure", "Goal", "Part", "Recorder", "Report", "Step", "read", "write"]

T = TypeVar("T")

BROKEN_DEVICE: Final = 75
"""Exit status of a part's process after an error that has poisoned its CUDA context: the rest needs a new process."""

Status = Literal["passed", "failed", "unfinished"]


class Figure(msgspec.Struct, frozen=True):
    """A quantity, with a value for each repeat."""

    name: str
    unit: str
    values: list[float]


class Check(msgspec.Struct, frozen=True):
    """Something that must hold."""

    text: str
    ok: bool
    detail: str = ""


class Goal(msgspec.Struct, frozen=True, omit_defaults=True):
    """A bound for the median of some values, one for each repeat."""

    name: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        """Whether the median is within the bounds."""
        median = statistics.median(self.values)
        over = self.at_least is None or median >= self.at_least
        return over and (self.at_most is None or median <= self.at_most)


class Step(msgspec.Struct):
    """What one measurement found."""

    took_s: float | None = None
    """None: it has begun and not ended."""
    figures: list[Figure] = []
    checks: list[Check] = []
    goals: list[Goal] = []
    notes: list[str] = []
    profile: str = ""
    """Where the time goes, as text."""
    error: str = ""
    """Why it failed: a traceback, or what ended its process."""

    def figure(self, name: str, unit: str, *values: float) -> None:
        """Note a quantity."""
        self.figures.append(Figure(name, unit, list(values)))

    def check(self, text: str, ok: bool, detail: str = "") -> None:
        """Note whether something holds."""
        self.checks.append(Check(text, bool(ok), detail))

    def goal(
        self, name: str, values: Sequence[float], *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Note values that have a goal."""
        self.goals.append(Goal(name, list(values), at_least, at_most))

    @property
    def has_passed(self) -> bool:
        """Whether it ended and all its checks hold. A goal that was missed is no failure, but named."""
        return self.took_s is not None and not self.error and all(check.ok for check in self.checks)


class Part(msgspec.Struct):
    """What a part found, by step."""

    steps: dict[str, Step] = {}
    left: list[str] = []
    """Steps for which no time was left."""
    error: str = ""
    """What failed between the steps."""
    took_s: float = 0
    is_whole: bool = False
    """Whether it got to its end."""

    @property
    def status(self) -> Status:
        """How it stands."""
        if self.error or any(step.took_s is not None and not step.has_passed for step in self.steps.values()):
            return "failed"
        return "passed" if self.is_whole and not self.left else "unfinished"


class Report(msgspec.Struct):
    """Everything."""

    device: str
    is_tiny: bool
    """Whether the sizes are tiny: then no figure means anything."""
    machine: dict[str, Any]
    parts: dict[str, Part] = {}


def read(path: Path, kind: type[T]) -> T:
    """Read what `write` has written.

    Raises:
        OSError, msgspec.MsgspecError: there is no such file, or it holds something else.
    """
    return msgspec.json.decode(path.read_bytes(), type=kind)


def write(path: Path, found: msgspec.Struct) -> None:
    """Write a file anew, such that whoever reads it finds the old content or the new."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    beside.replace(path)


class Recorder:
    """Runs the steps of one part in its process, and writes down each as it begins and ends.

    Args:
        path: of the part's file; steps that ended according to it are not run again.
        limit_s: how much time the part has.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path = path
        self._until_s = time.monotonic() + limit_s
        self.part = read(path, Part) if path.exists() else Part()
        self.part.left = []

    def has(self, name: str) -> bool:
        """Whether a step has ended."""
        step = self.part.steps.get(name)
        return step is not None and step.took_s is not None

    def step(self, name: str, measure: Callable[[Step], None], needs_s: float = 0) -> None:
        """Run a step, unless it has ended or too little time is left; what it raises is written down as its failure.

        Args:
            name: its name, which says what it does.
            measure: called with the step, to which it adds what it finds.
            needs_s: with less time left it isn't begun.

        Raises:
            SystemExit: the step has poisoned the CUDA context of this process.
        """
        if self.has(name):
            return
        if time.monotonic() + needs_s > self._until_s:
            self.part.left.append(name)
            self._write()
            return
        step = self.part.steps[name] = Step()
        self._write()
        began_s = time.monotonic()
        try:
            measure(step)
        except Exception:  # a measurement's boundary: the others go on
            step.error = traceback.format_exc()
        step.took_s = time.monotonic() - began_s
        self._write()
        said = "ok" if step.has_passed else "FAILED"
        print(f"  {name:<60} {step.took_s:>6.1f} s  {said}", flush=True)
        if "CUDA error" in step.error:
            raise SystemExit(BROKEN_DEVICE)

    def end(self) -> None:
        """Note that the part got to its end."""
        self.part.is_whole = True
        self._write()

    def _write(self) -> None:
        write(self._path, self.part)
