"""The plan of a bench: its options, and the requests for each load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from headwater_server.cli.bench.job import Job, Load, RequestSet
from headwater_server.cli.bench.request_bodies import Body, Wishes, infer_bodies, read_bodies, stream_bodies
from headwater_server.cli.bench.sample_connection import ConnectFailed, Dialler
from headwater_server.cli.bench.slo import request_limits
from headwater_server.cli.server_client import Metadata, ServerClient
from headwater_server.errors import CommandError

__all__ = ["LoadPlan", "LoadPoint", "check_answers", "points_of"]

REFUSALS: Final = (400, 401, 403, 404, 405, 413, 415, 422)
"""Statuses that the request itself causes: another attempt would get the same status."""


@dataclass(frozen=True)
class LoadPoint:
    """A load with a selection of heads and a constraint; measured once in each repeat."""

    load: Load
    heads: tuple[str, ...] | None
    """The heads to ask for; None: the request names no heads, and gets all heads."""
    target: RequestSet
    constraint: str | None = None
    """The constraint on the answers: ``schema`` or ``tools``; ``none`` for the same load without the constraint, for
    comparison; None if the bench constrains no answers."""

    def __str__(self) -> str:
        parts = [str(self.load)]
        if self.heads is not None:
            parts.append(f"heads {','.join(self.heads)}")
        if self.constraint is not None:
            parts.append("unconstrained" if self.constraint == "none" else self.constraint)
        return ", ".join(parts)


@dataclass(frozen=True)
class LoadPlan:
    """The options of a bench, as `headwater_server.cli.bench.bench_options` describes them."""

    url: str
    model: str | None
    """The model's name; None: the server's only model."""
    mode: str
    """A key of `headwater_server.cli.bench.job.PATHS`."""
    loads: Sequence[Load]
    arrivals: str
    max_connections: int
    seconds: float
    warmup_s: float
    repeats: int
    timeout_s: float
    processes: int
    input: Path | None
    heads: Sequence[tuple[str, ...] | None]
    """Selections of heads, each measured under every load."""
    constraints: Sequence[str | None]
    """Constraints, each measured under every load; see `LoadPoint.constraint`."""
    wishes: Wishes
    slo: dict[str, float]
    """Limits by name, in milliseconds."""
    key: str
    """An API key; empty: no key is sent."""
    json: Path | None
    html: Path | None

    @property
    def run_s(self) -> float:
        """The length of one run, warm-up included."""
        return self.warmup_s + self.seconds

    def job(self, point: LoadPoint, repeat: int) -> Job:
        """The job for one run of a point. An open loop's schedule differs between repeats, but is the same each time
        that the bench is run."""
        return Job(
            point.target, point.load, self.seconds, self.warmup_s, self.arrivals, self.max_connections,
            seed=self.wishes.seed + 1000 * repeat, limits=request_limits(self.slo),
        )  # fmt: skip


def points_of(plan: LoadPlan, server: ServerClient, model: str) -> list[LoadPoint]:
    """The points to measure, with their requests.

    Raises:
        CommandError: the plan doesn't fit the model, a file can't be read, or the server doesn't answer.
    """
    metadata = None
    if plan.mode in ("infer", "stream"):
        metadata = server.metadata(model)
    elif (names := server.models()) and model not in names:
        raise CommandError(f"--model: expected one of the server's models, {', '.join(names)}, got {model!r}")
    points = []
    for heads in plan.heads:
        targets = [
            RequestSet(
                plan.url, model, _bodies(plan, metadata, model, heads, constraint), plan.mode, plan.key, plan.timeout_s
            )
            for constraint in plan.constraints
        ]
        # A load runs with and without the constraint in succession, since these runs are compared.
        points += [
            LoadPoint(load, heads, target, constraint)
            for load in plan.loads
            for constraint, target in zip(plan.constraints, targets, strict=True)
        ]
    return points


def _bodies(
    plan: LoadPlan, metadata: Metadata | None, model: str, heads: tuple[str, ...] | None, constraint: str | None
) -> tuple[Body, ...]:
    if heads is not None and metadata is not None:
        names = [head.name for head in metadata.heads]
        for head in heads:
            if head not in names:
                expected = f"one of the heads {', '.join(names)}" if names else f"no --heads: {model} has no heads"
                raise CommandError(f"--heads: expected {expected}, got {head!r}")
    if plan.input is not None:
        return read_bodies(plan.input, plan.mode, model)
    if plan.mode == "infer" and metadata is not None:
        return infer_bodies(metadata, heads, plan.wishes)
    wishes = replace(plan.wishes, chat_fields={}) if constraint == "none" else plan.wishes
    return stream_bodies(plan.mode, metadata, model, heads, wishes)


async def check_answers(points: Sequence[LoadPoint]) -> None:
    """Send one request for each target before any load.

    Other errors, such as status 500, are ignored here: the load counts them.

    Raises:
        CommandError: the server refuses the request itself (`REFUSALS`), its answer violates the protocol, or it can't
            be reached.
    """
    for target in dict.fromkeys(point.target for point in points):
        dialler = Dialler(target.url)
        expires_s = time.perf_counter() + target.timeout_s
        watch = asyncio.get_running_loop().call_later(target.timeout_s + 0.1, dialler.expire)
        try:
            connection = await dialler.dial()
            fault = (await connection.ask(target.requests()[0], target.mode, expires_s)).fault
        except ConnectFailed as failed:
            raise CommandError(f"URL: {target.url}: {failed.fault}; is the server running there?") from None
        finally:
            watch.cancel()
            dialler.close()
        if fault is not None and (fault.status in REFUSALS or fault.kind == "bad answer"):
            raise CommandError(
                f"{target.path}: the server refuses the request: {fault}; send a valid request with --input FILE.json"
            )
