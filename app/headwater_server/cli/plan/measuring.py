"""Measures one size with a server under load, and the weights of a deployment's model in its own process."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import uvloop

from headwater_server.cli.bench.closed_loop import closed_loop
from headwater_server.cli.bench.job import Job, Load
from headwater_server.cli.bench.outcomes import Outcomes
from headwater_server.cli.check import model_request
from headwater_server.cli.plan.point import Point, section_of
from headwater_server.cli.plan.process_memory import ServerMemory, descendants, mark_peaks, measure_server
from headwater_server.cli.plan.server import PlanServer, serve_point
from headwater_server.cli.plan.subject import WARMUP_S, Subject
from headwater_server.config.schema import Config, Deployment
from headwater_server.errors import CommandError, StartError
from headwater_server.process.gpu import gpu_processes, gpus_used
from headwater_server.process.machine import size_text
from headwater_server.process.model_side import ModelSide, last_line

__all__ = [
    "RATE_TOLERANCE",
    "Measured",
    "Weights",
    "combined",
    "measure_point",
    "measure_server_under_load",
    "serving_fields",
    "weigh_deployment",
]

RATE_TOLERANCE: Final = 0.15
"""Relative difference of rates, predicted or of other rounds, up to which a rate holds."""
WHOLE_MACHINE: Final = 1.0
"""The memory limit of a measured server, which should refuse no size that the machine has memory for."""


@dataclass(frozen=True)
class Measured:
    """What was measured at one size. The fields are those of the JSON report."""

    point: Point
    host_bytes: int
    """The machine's memory that all processes took together, at most, under load."""
    server_bytes: int
    """Of that, the supervisor's and the gateway workers' own."""
    shared_files_bytes: int
    """Of that, pages of files, which all processes share."""
    replica_bytes: int
    """Of that, a replica's own, on average."""
    replica_starting_bytes: int
    """The maximum of a replica's own memory until it was ready, on average."""
    rate: float
    """Rows per second; for a language model, tokens per second."""
    p50_ms: float
    p99_ms: float
    connections: int
    device_bytes: int = 0
    """Memory of GPUs, of all replicas together."""
    device: str = "cpu"
    """The device that computed, such as ``cuda:0``."""
    cache_bytes: int = 0
    """Of a replica's memory, the key/value cache, as far as it was filled."""
    mean_rows: float | None = None
    """Rows in a call, on average; None for a language model."""
    generator_cpu_share: float = 0.0
    """Use of a core by the load generator: near 1, the generator limited the rate."""
    rates: tuple[float, ...] = ()
    """The rate of each round if there were several; rate and latencies are then the medians."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether a GPU computed."""
        return self.device.startswith("cuda")

    @property
    def spread(self) -> float:
        """Difference of the highest and the lowest rate, relative to the median; 0 for a single round."""
        return (max(self.rates) - min(self.rates)) / self.rate if self.rates and self.rate else 0.0

    @property
    def is_unsteady(self) -> bool:
        """Whether the rounds differ more than a rate may."""
        return self.spread > RATE_TOLERANCE

    @property
    def spread_text(self) -> str:
        """The lowest and highest rate and their difference; empty for a single round."""
        return f"{min(self.rates):.4g} to {max(self.rates):.4g} ({self.spread:.0%})" if self.rates else ""

    def text(self, unit: str) -> str:
        """The main figures in one line. ``unit`` is the rate's."""
        device = f" and {size_text(self.device_bytes)} of GPU memory" if self.device_bytes else ""
        latency = f"p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms"
        return f"{size_text(self.host_bytes)}{device}, {self.rate:.4g} {unit}, {latency}"


def combined(rounds: Sequence[Measured]) -> Measured:
    """One or more rounds at one size as one: the maximum of the memory, the medians of the rest, and all rates."""
    if len(rounds) == 1:
        return rounds[0]
    mean_rows = [one.mean_rows for one in rounds if one.mean_rows is not None]
    return replace(
        max(rounds, key=lambda one: one.host_bytes),
        device_bytes=max(one.device_bytes for one in rounds),
        rate=statistics.median(one.rate for one in rounds),
        p50_ms=statistics.median(one.p50_ms for one in rounds),
        p99_ms=statistics.median(one.p99_ms for one in rounds),
        mean_rows=statistics.median(mean_rows) if mean_rows else None,
        generator_cpu_share=max(one.generator_cpu_share for one in rounds),
        rates=tuple(one.rate for one in rounds),
    )


def measure_point(subject: Subject, point: Point) -> Measured:
    """Start a server at this size, and measure it.

    Raises:
        CommandError: the server doesn't start, or requests fail; the message has the reason.
    """
    section = section_of(subject.deployment, point, subject.cores)
    fields = serving_fields(subject.config, subject.name, section)
    return measure_server_under_load(subject, point, subject.what, fields)


def serving_fields(config: Config, name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, by dotted path, with which a configuration serves one deployment only, of this section."""
    server = config.server.model_dump(mode="json", exclude_unset=True)
    fields = {f"server.{field}": value for field, value in server.items()}
    fields["deployments"] = {name: section}
    if not isinstance(fields.get("server.memory_limit"), int):
        fields["server.memory_limit"] = WHOLE_MACHINE
    return fields


def measure_server_under_load(subject: Subject, point: Point, what: str, fields: Mapping[str, Any]) -> Measured:
    """Start a server of any configuration that serves the subject at this size, and measure it.

    Args:
        subject: the deployment, and the load.
        point: the size at which ``what`` and ``fields`` serve it.
        what: the configuration, as for ``headwater serve``.
        fields: fields that override it, by dotted path.

    Raises:
        CommandError: as `measure_point`.
    """
    used_before = sum(gpus_used().values())
    with serve_point(what, fields, subject.deployment.load_timeout_s + 60) as server:
        started = measure_server(server.pid, server.runtime_dir)
        mark_peaks(descendants(server.pid))
        connections = subject.connections(point)
        job = Job(subject.target(server.url), Load(connections), subject.seconds, WARMUP_S)
        outcomes = uvloop.run(closed_loop(job))
        memory = measure_server(server.pid, server.runtime_dir)
        device_bytes = _device_bytes(server, used_before)
        mean_rows = None if subject.is_language_model else _mean_rows(subject, server)
        device = _device(subject, server)
    _check(outcomes, memory, point)
    return Measured(
        point,
        host_bytes=memory.host,
        server_bytes=memory.server,
        shared_files_bytes=memory.files,
        replica_bytes=round(sum(memory.replicas) / len(memory.replicas)),
        replica_starting_bytes=round(sum(started.replicas) / max(1, len(started.replicas))),
        rate=outcomes.tokens_per_s if subject.is_language_model else outcomes.requests_per_s,
        p50_ms=outcomes.latency_ms(50),
        p99_ms=outcomes.latency_ms(99),
        connections=connections,
        device_bytes=device_bytes,
        device=device,
        cache_bytes=subject.filled_cache(point.rows),
        mean_rows=mean_rows,
        generator_cpu_share=outcomes.cpu_share,
    )


def _check(outcomes: Outcomes, memory: ServerMemory, point: Point) -> None:
    """Raises CommandError if the figures are not those of this size."""
    if outcomes.ended:
        raise CommandError(f"the load ended early: {outcomes.ended}")
    if outcomes.errors:
        fault, count = outcomes.errors.most_common(1)[0]
        raise CommandError(f"{outcomes.failures} of {outcomes.requests} requests failed, {count} of them with: {fault}")
    if not outcomes.answers:
        raise CommandError("no request was answered; give each size more time with --seconds")
    if len(memory.replicas) != point.replicas:
        raise CommandError(f"{len(memory.replicas)} of {point.replicas} replicas were left at the end of the load")


def _mean_rows(subject: Subject, server: PlanServer) -> float:
    """Rows in a call, on average, according to the worker that answers."""
    stats = server.get(f"/v2/models/{subject.name}/stats")["model_stats"][0]
    return int(stats["inference_count"]) / max(1, int(stats["execution_count"]))


def _device(subject: Subject, server: PlanServer) -> str:
    index = server.get("/v2/repository/index")
    devices = next((model.get("devices") for model in index if model["name"] == subject.name), None)
    return str((devices or ["cpu"])[0])


def _device_bytes(server: PlanServer, used_before: int) -> int:
    """GPU memory of the server's processes, or the growth of all GPUs' use if NVML doesn't report processes."""
    pids = descendants(server.pid)
    used = sum(processes.get(pid, 0) for processes in (gpu_processes() or {}).values() for pid in pids)
    return used or max(0, sum(gpus_used().values()) - used_before)


@dataclass(frozen=True)
class Weights:
    """The weights of one replica."""

    bytes: int | None
    """None: unknown."""
    how: str
    """How they were measured, or why they are unknown."""


def weigh_deployment(name: str, deployment: Deployment, path: Sequence[str]) -> Weights:
    """Load a model, a language model or a fused pipeline, and measure how much of the memory is weights.

    Args:
        name: the deployment's name.
        deployment: the deployment.
        path: folders of the user's modules; the first is the working folder.
    """
    request = model_request(name, deployment, path)
    try:
        with ModelSide(deployment.environment, deployment.interpreter) as side:
            status, output, errors = side.run("headwater.replica.weigh", msgspec.json.encode(request))
    except StartError as error:
        return Weights(None, str(error))
    if output:
        return msgspec.json.decode(output[-1], type=Weights)
    how = "it took too long" if status is None else last_line(errors)
    return Weights(None, f"loading it in a process of its own failed: {how}")
