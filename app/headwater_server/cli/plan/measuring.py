"""Measures a size with a server under load, and the weights of a deployment's model in a separate process."""

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
from headwater_server.cli.model_request import model_request
from headwater_server.cli.plan.measured_server import PlanServer, serve_point
from headwater_server.cli.plan.point import Point, section_of
from headwater_server.cli.plan.process_memory import ServerMemory, descendants, mark_peaks, measure_server
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
"""Maximum relative difference of a measured rate from its prediction, or between the rates of rounds."""
WHOLE_MACHINE: Final = 1.0
"""The memory limit of a measured server: the whole machine, so that the server refuses no size for which the machine
has memory."""


@dataclass(frozen=True)
class Measured:
    """The figures measured at one size. The fields have the same names in the JSON report."""

    point: Point
    host_bytes: int
    """Memory of the machine that all processes took together: the sum of their peaks under load (`ServerMemory`)."""
    server_bytes: int
    """The part of ``host_bytes`` that belongs to no replica, but to the supervisor, its gateway workers, and the
    processes that fork replicas."""
    shared_files_bytes: int
    """The part of ``host_bytes`` that is pages of files, which all processes share."""
    replica_bytes: int
    """The part of ``host_bytes`` that belongs to a replica, averaged over replicas."""
    replica_starting_bytes: int
    """Peak of a replica's memory, without shared files, until it was ready; averaged over replicas."""
    rate: float
    """Rows per second; for a language model, tokens per second."""
    p50_ms: float
    p99_ms: float
    connections: int
    """Number of connections of the load."""
    device_bytes: int = 0
    """GPU memory of all replicas together, at the end of the load."""
    device: str = "cpu"
    """The device on which the model computed, such as ``cuda:0``; of several devices, the first by name."""
    cache_bytes: int = 0
    """The computed part of a replica's memory that is the filled key/value cache; 0 if there is none, or if its size is
    unknown."""
    mean_rows: float | None = None
    """Average number of rows in a call; None for a language model."""
    generator_cpu_share: float = 0.0
    """Fraction of a core that the load generator used; near 1, the generator limited the rate."""
    rates: tuple[float, ...] = ()
    """The rate of each round if there were several; ``rate`` and the latencies are then medians."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether the model computed on a GPU."""
        return self.device.startswith("cuda")

    @property
    def spread(self) -> float:
        """Difference between the highest and the lowest rate, relative to the median; 0 for a single round."""
        return (max(self.rates) - min(self.rates)) / self.rate if self.rates and self.rate else 0.0

    @property
    def is_unsteady(self) -> bool:
        """Whether the rates of the rounds differ by more than `RATE_TOLERANCE`."""
        return self.spread > RATE_TOLERANCE

    @property
    def spread_text(self) -> str:
        """The lowest and highest rate and their difference; empty for a single round."""
        return f"{min(self.rates):.4g} to {max(self.rates):.4g} ({self.spread:.0%})" if self.rates else ""

    def text(self, unit: str) -> str:
        """The main figures on one line. ``unit`` is the unit of the rate."""
        device = f" and {size_text(self.device_bytes)} of GPU memory" if self.device_bytes else ""
        latency = f"p50 {self.p50_ms:.1f} ms, p99 {self.p99_ms:.1f} ms"
        return f"{size_text(self.host_bytes)}{device}, {self.rate:.4g} {unit}, {latency}"


def combined(rounds: Sequence[Measured]) -> Measured:
    """Combine the rounds at one size, of which there is at least one: the memory figures of the round that took the
    most of the machine's memory, the maximum of GPU memory, the medians of rate and latencies, and the rate of each
    round."""
    if len(rounds) == 1:
        return rounds[0]
    mean_rows = [measurement.mean_rows for measurement in rounds if measurement.mean_rows is not None]
    return replace(
        max(rounds, key=lambda measurement: measurement.host_bytes),
        device_bytes=max(measurement.device_bytes for measurement in rounds),
        rate=statistics.median(measurement.rate for measurement in rounds),
        p50_ms=statistics.median(measurement.p50_ms for measurement in rounds),
        p99_ms=statistics.median(measurement.p99_ms for measurement in rounds),
        mean_rows=statistics.median(mean_rows) if mean_rows else None,
        generator_cpu_share=max(measurement.generator_cpu_share for measurement in rounds),
        rates=tuple(measurement.rate for measurement in rounds),
    )


def measure_point(subject: Subject, point: Point) -> Measured:
    """Start a server at this size, and measure it under load.

    Raises:
        CommandError: the server doesn't start, or requests fail; the message has the reason.
    """
    section = section_of(subject.deployment, point, subject.cores)
    fields = serving_fields(subject.config, subject.name, section)
    return measure_server_under_load(subject, point, subject.what, fields)


def serving_fields(config: Config, name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, by dotted path, with which a configuration serves only this deployment, with this section. The memory
    limit is `WHOLE_MACHINE`, unless the configuration sets it in bytes."""
    server = config.server.model_dump(mode="json", exclude_unset=True)
    fields = {f"server.{field}": value for field, value in server.items()}
    fields["deployments"] = {name: section}
    if not isinstance(fields.get("server.memory_limit"), int):
        fields["server.memory_limit"] = WHOLE_MACHINE
    return fields


def measure_server_under_load(subject: Subject, point: Point, source: str, fields: Mapping[str, Any]) -> Measured:
    """Start a server of a configuration that serves the subject at this size, and measure it under load.

    Args:
        subject: the deployment and the load.
        point: the size at which ``source`` and ``fields`` serve it.
        source: the configuration, as for ``headwater serve``.
        fields: fields that override the configuration, by dotted path.

    Raises:
        CommandError: the server doesn't start, or requests fail; the message has the reason.
    """
    used_before = sum(gpus_used().values())
    with serve_point(source, fields, subject.deployment.load_timeout_s + 60) as server:
        started = measure_server(server.pid, server.runtime_dir)
        mark_peaks(descendants(server.pid))
        connections = subject.connections(point)
        job = Job(subject.target(server.url), Load(connections), subject.seconds, WARMUP_S)
        outcomes = uvloop.run(closed_loop(job))
        memory = measure_server(server.pid, server.runtime_dir)
        device_bytes = _device_bytes(server, used_before)
        mean_rows = None if subject.takes_text else _mean_rows(subject, server)
        device = _device(subject, server)
    _check(outcomes, memory, point)
    return Measured(
        point,
        host_bytes=memory.host,
        server_bytes=memory.server,
        shared_files_bytes=memory.files,
        replica_bytes=round(sum(memory.replicas) / len(memory.replicas)),
        replica_starting_bytes=round(sum(started.replicas) / max(1, len(started.replicas))),
        rate=outcomes.tokens_per_s if subject.takes_text else outcomes.requests_per_s,
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
    """Raises CommandError if requests failed or replicas were lost under load: such figures don't describe this
    size."""
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
    """Average number of rows in a call; without metrics, in calls of the worker that answers."""
    stats = server.get(f"/v2/models/{subject.name}/stats")["model_stats"][0]
    return int(stats["inference_count"]) / max(1, int(stats["execution_count"]))


def _device(subject: Subject, server: PlanServer) -> str:
    index = server.get("/v2/repository/index")
    devices = next((model.get("devices") for model in index if model["name"] == subject.name), None)
    return str((devices or ["cpu"])[0])


def _device_bytes(server: PlanServer, used_before: int) -> int:
    """GPU memory of the server's processes. If NVML doesn't report processes, the growth of the used memory of all
    GPUs."""
    pids = descendants(server.pid)
    used = sum(processes.get(pid, 0) for processes in (gpu_processes() or {}).values() for pid in pids)
    return used or max(0, sum(gpus_used().values()) - used_before)


@dataclass(frozen=True)
class Weights:
    """The weights of one replica."""

    bytes: int | None
    """Size in bytes; None if unknown."""
    how: str
    """How the weights were measured, or why their size is unknown."""


def weigh_deployment(name: str, deployment: Deployment, path: Sequence[str]) -> Weights:
    """Load a model, a language model or a fused pipeline in a process, and measure the size of its weights. If
    that fails, `Weights.how` says why.

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
    how = "the process took too long" if status is None else last_line(errors)
    return Weights(None, f"loading the model in a separate process failed: {how}")
