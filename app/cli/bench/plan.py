"""What a bench measures: its options, and the requests for each load."""

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
"""The modes of the command line, and the kinds of `app.cli.bench.target` that they stand for."""
REFUSALS: Final = (400, 401, 403, 404, 405, 413, 415, 422)
"""Statuses due to the request itself: another try would get the same."""


@dataclass(frozen=True)
class Point:
    """One load on one selection of heads; measured once in each repeat."""

    load: Load
    heads: tuple[str, ...] | None
    """The heads to ask for; None: the request names none, and gets all."""
    target: Target

    @property
    def selection(self) -> str:
        """The heads in words."""
        return "" if self.heads is None else ",".join(self.heads)

    def __str__(self) -> str:
        return f"{self.load}, heads {self.selection}" if self.heads is not None else str(self.load)


@dataclass(frozen=True)
class Plan:
    """The options of a bench."""

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
    """Selections of heads, each measured under every load."""
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
        """The limits for single requests."""
        return request_limits(self.slo)

    @property
    def run_limits(self) -> dict[str, float]:
        """The limits for a run, by percentile, in milliseconds."""
        return {OF_RUNS[name]: value for name, value in self.slo.items() if name in OF_RUNS}

    @property
    def run_s(self) -> float:
        """The length of one run, warm-up included."""
        return self.warmup_s + self.seconds

    def job(self, point: Point, repeat: int) -> Job:
        """The job for one run. An open loop's schedule differs between repeats, but not between runs of the bench."""
        return Job(
            point.target, point.load, self.seconds, self.warmup_s, self.arrivals, self.max_connections,
            seed=self.wishes.seed + 1000 * repeat, limits=self.limits,
        )  # fmt: skip


def points_of(plan: Plan, server: ServerClient, model: str) -> list[Point]:
    """The points to measure, with their requests.

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
    """Send one request for each selection before any load.

    Other errors, such as a 500, are left for the load to count.

    Raises:
        CommandError: the server refuses the request itself, or can't be reached.
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
                f"{target.path}: the server refuses the request: {fault}; provide a valid one with --input FILE.json"
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
                expected = f"one of the heads {', '.join(known)}" if known else f"no --heads, since {model} has none"
                raise CommandError(f"--heads: expected {expected}, got {head!r}")
    if plan.input is not None:
        return read_bodies(plan.input, plan.kind, model)
    if plan.kind == "infer":
        assert metadata is not None
        return infer_bodies(metadata, heads, plan.wishes)
    return stream_bodies(plan.kind, metadata, model, heads, plan.wishes)
