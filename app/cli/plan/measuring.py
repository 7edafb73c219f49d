"""Measures one size: runs a server under load, and weighs a deployment's model in a process of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import uvloop

from app.cli.bench.closed_loop import closed_loop
from app.cli.bench.job import Job, Load
from app.cli.bench.outcomes import Outcomes
from app.cli.plan.memory_model import MeasuredMemory
from app.cli.plan.point import Point, section_of
from app.cli.plan.process_memory import ServerMemory, descendants, mark_peaks, measure_server
from app.cli.plan.server import PlanServer, serve_point
from app.cli.plan.subject import WARMUP_S, Subject
from app.config.schema import Deployment
from app.errors import CommandError, StartError
from app.process.gpu import gpus_used
from app.process.machine import HOST, measure_groups_by_place
from app.process.model_side import ModelSide, last_line

__all__ = ["Measured", "Weights", "measure_point", "measure_server_under_load", "weigh_deployment"]

WHOLE_MACHINE: Final = 1.0
"""What a size takes is measured, so the server itself should refuse none that the machine has room for."""


@dataclass(frozen=True)
class Measured:
    """At one size."""

    point: Point
    memory: MeasuredMemory
    host: int
    """Bytes of the machine's memory, all of it, the most under load."""
    device: int
    """Bytes of GPUs' memory."""
    device_name: str
    """Where it computed: ``cpu``, ``cuda:0``."""
    rate: float
    """Rows per second; of a language model tokens per second."""
    p50_ms: float
    p99_ms: float
    connections: int
    mean_rows: float
    """Of a call."""
    load_share: float
    """Of a core that the load's generator took: near 1 the rate is its own."""
    rates: tuple[float, ...] = ()
    """Of each round, if there were several; rate and latencies are the medians then."""

    @property
    def spread(self) -> float:
        """How far the rates of the rounds are apart, relative to their median; 0 with one round only."""
        return (max(self.rates) - min(self.rates)) / self.rate if self.rates and self.rate else 0.0


def measure_point(subject: Subject, point: Point) -> Measured:
    """Start a server at this size, and measure it.

    Raises:
        CommandError: it doesn't start, or requests fail; says why.
    """
    section = section_of(subject.deployment, point, subject.cores)
    fields = {**subject.server, "deployments": {subject.name: section}}
    if not isinstance(fields.get("server.memory_limit"), int):
        fields["server.memory_limit"] = WHOLE_MACHINE
    return measure_server_under_load(subject, point, subject.what, fields)


def measure_server_under_load(subject: Subject, point: Point, what: str, fields: Mapping[str, Any]) -> Measured:
    """Start a server of any configuration that serves the subject at this size, and measure it.

    Raises:
        CommandError: as `measure_point`.
    """
    before = sum(gpus_used().values())
    with serve_point(what, fields, subject.deployment.load_timeout_s + 60) as server:
        started = measure_server(server.pid, server.runtime_dir)
        mark_peaks(descendants(server.pid))
        connections = subject.connections(point)
        job = Job(subject.target(server.url), Load(connections), subject.seconds, WARMUP_S)
        outcomes = uvloop.run(closed_loop(job))
        memory = measure_server(server.pid, server.runtime_dir)
        device = _device_bytes(server, before)
        mean_rows = _mean_rows(subject, server)
        device_name = _device_name(subject, server)
    _check(outcomes, memory, point)
    replicas = len(memory.replicas)
    found = MeasuredMemory(
        server=memory.server,
        files=memory.files,
        replica=sum(memory.replicas) / replicas,
        starting=sum(started.replicas) / max(1, len(started.replicas)),
        device=device / replicas,
        cache=subject.filled_cache(point.rows),
    )
    rate = outcomes.tokens_per_s if subject.is_language_model else outcomes.requests_per_s
    return Measured(
        point, found, memory.host, device, device_name, rate, outcomes.latency_ms(50), outcomes.latency_ms(99),
        connections, mean_rows, outcomes.cpu_share,
    )  # fmt: skip


def _check(outcomes: Outcomes, memory: ServerMemory, point: Point) -> None:
    """See that the figures are of this size.

    Raises:
        CommandError: they are not.
    """
    if outcomes.ended:
        raise CommandError(f"the load ended early: {outcomes.ended}")
    if outcomes.errors:
        fault, count = outcomes.errors.most_common(1)[0]
        raise CommandError(f"{outcomes.failures} of {outcomes.requests} requests failed, {count} of them so: {fault}")
    if not outcomes.answers:
        raise CommandError("no request was answered; give each size more time with --seconds")
    if len(memory.replicas) != point.replicas:
        raise CommandError(f"{len(memory.replicas)} of {point.replicas} replicas were left at the end of the load")


def _mean_rows(subject: Subject, server: PlanServer) -> float:
    """Rows of a call, on average, as the worker that answers saw them; NaN where it has no such figure."""
    if subject.is_language_model:
        return float("nan")
    told = server.get(f"/v2/models/{subject.name}/stats")["model_stats"][0]
    return int(told["inference_count"]) / max(1, int(told["execution_count"]))


def _device_name(subject: Subject, server: PlanServer) -> str:
    for model in server.get("/v2/repository/index"):
        if model["name"] == subject.name:
            return str((model.get("devices") or ["cpu"])[0])
    return "cpu"


def _device_bytes(server: PlanServer, before: int) -> int:
    """Of all GPUs, by process where NVML can tell; otherwise by how much more is used than before."""
    groups = set()
    for pid in descendants(server.pid):
        with contextlib.suppress(ProcessLookupError):  # it has ended
            groups.add(os.getpgid(pid))
    found = measure_groups_by_place(groups)
    told = sum(count for places in found.values() for place, count in places.items() if place != HOST)
    return told or max(0, sum(gpus_used().values()) - before)


class Weights(NamedTuple):
    """Of one replica."""

    bytes: int | None
    """None: unknown."""
    how: str
    """How they were weighed, or why not."""


def weigh_deployment(name: str, deployment: Deployment, path: Sequence[str]) -> Weights:
    """Load a deployment's model, and say how much of the replica's memory is weights.

    Args:
        name: the deployment's.
        deployment: a model, a language model or a fused pipeline.
        path: folders that come first on ``sys.path``; the first is the working folder.
    """
    request = {
        "name": name,
        "model": deployment.model or "",
        "options": deployment.options,
        "pipeline": deployment.pipeline.spec() if deployment.pipeline is not None else None,
        "device": deployment.placements[0],
        "path": path,
        "working_dir": path[0],
    }
    try:
        with ModelSide(deployment.environment, deployment.python) as side:
            status, output, errors = side.run("inference.replica.weigh", msgspec.json.encode(request))
    except StartError as error:
        return Weights(None, str(error))
    try:
        told = msgspec.json.decode(output)
        return Weights(int(told["bytes"]), str(told["how"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        how = "it took too long" if status is None else last_line(errors)
        return Weights(None, f"loading it in a process of its own failed: {how}")
