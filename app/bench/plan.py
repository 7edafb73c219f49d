"""What a bench is to do: its options, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from app.bench.bodies import Wishes
from app.bench.limits import OF_RUNS, Limits, request_limits
from app.bench.load import Job, Load
from app.bench.target import Target

__all__ = ["MODES", "Plan", "Point"]

MODES: Final = {"infer": "infer", "stream": "generate", "chat": "chat", "completions": "completions"}
"""What the command line calls them, and the kinds of `app.bench.target`."""


@dataclass(frozen=True)
class Point:
    """One load on one selection of heads; measured once in each repeat."""

    load: Load
    heads: tuple[str, ...] | None
    """Of a pipeline; None: all, unasked."""
    target: Target

    @property
    def selection(self) -> str:
        """The heads in words."""
        return "" if self.heads is None else ",".join(self.heads)

    def __str__(self) -> str:
        return f"{self.load}, heads {self.selection}" if self.heads is not None else str(self.load)


@dataclass(frozen=True)
class Plan:
    """Everything but the requests."""

    url: str
    model: str | None = None
    mode: str = "infer"
    loads: Sequence[Load] = (Load(1), Load(16))
    arrivals: str = "poisson"
    max_connections: int = 1024
    seconds: float = 5.0
    warmup_s: float = 1.0
    repeats: int = 3
    timeout_s: float = 30.0
    processes: int = 1
    input: Path | None = None
    heads: Sequence[tuple[str, ...] | None] = (None,)
    """A point for each."""
    wishes: Wishes = field(default_factory=Wishes)
    slo: dict[str, float] = field(default_factory=dict)
    """Limits by name, in milliseconds."""
    key: str = ""
    json: Path | None = None
    html: Path | None = None

    @property
    def kind(self) -> str:
        """See `MODES`."""
        return MODES[self.mode]

    @property
    def limits(self) -> Limits:
        """Those of single requests."""
        return request_limits(self.slo)

    @property
    def run_limits(self) -> dict[str, float]:
        """Those of a run's percentiles, by percentile, in milliseconds."""
        return {OF_RUNS[name]: value for name, value in self.slo.items() if name in OF_RUNS}

    @property
    def run_s(self) -> float:
        """How long one run sends."""
        return self.warmup_s + self.seconds

    def job(self, point: Point, repeat: int) -> Job:
        """One run. An open loop's times differ from repeat to repeat, and are the same whenever the bench is run."""
        return Job(
            point.target, point.load, self.seconds, self.warmup_s, self.arrivals, self.max_connections,
            seed=self.wishes.seed + 1000 * repeat, limits=self.limits,
        )  # fmt: skip
