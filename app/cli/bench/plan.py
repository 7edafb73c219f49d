"""What a bench is to do: its options, read and checked.

From a plan to requests that the server answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import quote

from app.cli.bench.bodies import Wishes, infer_bodies, read_bodies, stream_bodies
from app.cli.bench.connection import Dialler
from app.cli.bench.events import ask
from app.cli.bench.faults import AskFailed
from app.cli.bench.load import Job, Load
from app.cli.bench.outcomes import OF_RUNS, Limits, request_limits
from app.cli.bench.target import Body, Target
from app.cli.client import Metadata, ServerClient
from app.errors import CommandError

__all__ = ["MODES", "Plan", "Point", "check_answers", "points_of"]


MODES: Final = {"infer": "infer", "stream": "generate", "chat": "chat", "completions": "completions"}
"""What the command line calls them, and the kinds of `app.cli.bench.target`."""


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


REFUSALS: Final = (400, 401, 403, 404, 405, 413, 415, 422)
"""An answer of these is about the request, and the next one would be the same."""


def points_of(plan: Plan, server: ServerClient, model: str) -> list[Point]:
    """What is to be measured, with the requests.

    Raises:
        CommandError: the plan and the model contradict each other.
    """
    metadata = None
    if plan.kind in ("infer", "generate"):
        metadata = server.metadata(model)
    elif (known := server.models()) and model not in known:
        raise CommandError(f"--model: expected one of the server's models, {', '.join(known)}, got {model!r}")
    points = []
    for heads in plan.heads:
        target = Target(
            plan.url,
            _path(plan.kind, model),
            _bodies(plan, metadata, model, heads),
            plan.kind,
            plan.key,
            plan.timeout_s,
        )
        points += [Point(load, heads, target) for load in plan.loads]
    return points


async def check_answers(points: Sequence[Point]) -> None:
    """Ask once for each selection, before any load.

    An error that load could meet as well, such as a 500, is left to the load to count.

    Raises:
        CommandError: the server refuses the request as such, or is not there.
    """
    for target in dict.fromkeys(point.target for point in points):
        dialler = Dialler(target)
        now = time.perf_counter()
        watch = asyncio.get_running_loop().call_later(target.timeout_s + 0.1, dialler.expire)
        try:
            connection = await dialler.dial()
            sample = await ask(connection, target.requests()[0], target.kind, now, now + target.timeout_s)
        except AskFailed as failed:
            raise CommandError(f"URL: {target.url}: {failed.fault}; is the server running there?") from None
        finally:
            watch.cancel()
            dialler.close()
        fault = sample.fault
        if fault is not None and (fault.status in REFUSALS or fault.kind == "bad answer"):
            raise CommandError(
                f"{target.path}: the server refuses the request: {fault}. Give one that it takes with --input FILE.json"
            )


def _path(kind: str, model: str) -> str:
    if kind == "chat":
        return "/v1/chat/completions"
    if kind == "completions":
        return "/v1/completions"
    route = "infer" if kind == "infer" else "generate_stream"
    return f"/v2/models/{quote(model, safe='')}/{route}"


def _bodies(plan: Plan, metadata: Metadata | None, model: str, heads: tuple[str, ...] | None) -> tuple[Body, ...]:
    if heads is not None and metadata is not None:
        known = [head.name for head in metadata.heads]
        for head in heads:
            if head not in known:
                told = f"one of the heads {', '.join(known)}" if known else f"no --heads, since {model} has none"
                raise CommandError(f"--heads: expected {told}, got {head!r}")
    if plan.input is not None:
        return read_bodies(plan.input, plan.kind, model)
    if plan.kind == "infer":
        assert metadata is not None
        return infer_bodies(metadata, heads, plan.wishes)
    return stream_bodies(plan.kind, metadata, model, heads, plan.wishes)
