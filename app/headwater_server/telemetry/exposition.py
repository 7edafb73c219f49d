"""The answer to a scrape: Headwater's series, and the series of each replica's Triton or vLLM.

This module is imported at the first scrape, because the Prometheus client and httpx take 6 MB and a tenth of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.parser import text_string_to_metric_families

from headwater_server.process.proc import process_use
from headwater_server.telemetry.catalogue import CATALOGUE, Series
from headwater_server.telemetry.ledger import Totals
from headwater_server.telemetry.model_counts import ModelTotals

__all__ = ["ReplicaTarget", "ReplicaText", "ask_replicas", "exposition"]

logger = logging.getLogger("headwater.metrics")

_MODEL_PREFIX: Final = "headwater_model_"
"""Begins the names of models' custom metrics."""
_unlike: set[str] = set()
"""Names of models' custom metrics whose conflicting declarations have been logged."""
_LEFT_OUT: Final = ("headwater_", "http_", "process_", "python_")
"""Prefixes of series of replicas that are left out in any case: names of Headwater's own series, which a model of a
Triton repository could take, and series about a process or its HTTP server."""
_ASK_TIMEOUT_S: Final = 1.0
"""Time limit in seconds for asking all replicas together."""
_SIZE_LIMIT_BYTES: Final = 1024 * 1024
"""A longer answer of a replica counts as an error."""


class ReplicaTarget(NamedTuple):
    """A replica from which Triton's or vLLM's metrics are read."""

    deployment: str
    replica: str
    socket: Path
    """The unix socket at which the replica answers ``/metrics``."""
    prefixes: tuple[str, ...]
    """See `headwater_server.control.route_kinds`."""


class ReplicaText(NamedTuple):
    """The metrics that a replica answered with."""

    deployment: str
    replica: str
    text: str | None
    """The metrics in Prometheus' text format; None: the replica did not answer in time, or the answer was an error or
    can't be used."""
    prefixes: tuple[str, ...] = ("nv_", "vllm:")
    """Prefixes of the exposed series."""


def exposition(
    totals: Totals, replicas: Sequence[ReplicaText], accept: str, models: ModelTotals
) -> tuple[bytes, str]:  # fmt: skip
    """The answer to a scrape, and its media type.

    Args:
        totals: the counts of the server's processes.
        replicas: the metrics of the replicas' Triton or vLLM.
        accept: the request's ``Accept`` header, which may ask for OpenMetrics.
        models: the models' custom metrics.
    """
    registry = CollectorRegistry()
    registry.register(_Scrape(totals, replicas, models))
    encode: Any
    encode, media_type = choose_encoder(accept)
    # No name needs escaping, but the library's OpenMetrics encoder would replace the colon in vLLM's names.
    return encode(registry, escaping=ALLOWUTF8), media_type


@dataclass(eq=False)
class _Scrape:
    """Collects the series for a single scrape."""

    totals: Totals
    replicas: Sequence[ReplicaText]
    models: ModelTotals

    def collect(self) -> Iterator[Metric]:
        by_name: dict[str, list[tuple[tuple[str, ...], list[int]]]] = defaultdict(list)
        for key, numbers in sorted(self.totals.records.items()):
            by_name[key.name].append((key.labels, numbers))
        processes = _processes(self.totals.pids)
        for series in CATALOGUE.values():
            records = by_name[series.name]
            if series.name in processes:
                yield _family(series, processes[series.name])
            elif series.kind == "histogram":
                yield _histograms(series, records)
            else:
                yield _family(series, [(labels, numbers[0] * series.scale) for labels, numbers in records])
        yield from _replica_series(self.replicas)
        yield from _model_series(self.models)


def _family(series: Series, values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    family = kind(series.name, series.help, labels=series.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _histograms(series: Series, records: Iterable[tuple[Sequence[str], list[int]]]) -> Metric:
    family = HistogramMetricFamily(series.name, series.help, labels=series.labels)
    bounds = [str(float(f"{bound * series.scale:.10g}")) for bound in series.bounds]
    for labels, numbers in records:
        buckets = []
        count = 0
        for bound, number in zip([*bounds, "+Inf"], numbers, strict=False):
            count += number
            buckets.append((bound, count))
        family.add_metric(labels, buckets, numbers[-1] * series.scale)
    return family


def _processes(pids: Mapping[str, int]) -> dict[str, list[tuple[Sequence[str], float]]]:
    values: dict[str, list[tuple[Sequence[str], float]]] = {
        name: [] for name, series in CATALOGUE.items() if series.labels == ("process",)
    }
    for name, pid in sorted(pids.items()):
        if (use := process_use(pid)) is not None:
            values["process_resident_memory_bytes"].append(((name,), use.resident_bytes))
            values["process_cpu_seconds"].append(((name,), use.cpu_s))
            values["process_open_fds"].append(((name,), use.open_fds))
            values["process_threads"].append(((name,), use.threads))
            values["process_start_time_seconds"].append(((name,), use.started_s))
    return values


def _replica_series(replicas: Iterable[ReplicaText]) -> Iterator[Metric]:
    """The series of the replicas' Triton or vLLM whose names begin with the replica's prefixes, without `_LEFT_OUT`:
    names are kept, labels ``deployment`` and ``replica`` are added."""
    metrics: dict[str, Metric] = {}
    for deployment, replica, text, prefixes in replicas:
        with contextlib.suppress(ValueError):  # truncated or malformed: the series before the fault are kept
            for family in text_string_to_metric_families(text or ""):
                # vLLM's `_created` values, the time at which a series began, would be exposed as separate series.
                is_wanted = family.name.startswith(prefixes) and not family.name.startswith(_LEFT_OUT)
                if not is_wanted or family.name.endswith("_created"):
                    continue
                # Triton's counters lack the suffix `_total` that the type requires, and the parser adds it.
                is_plain = family.type == "counter" and f"\n{family.name}_total" not in (text or "")
                kind = "unknown" if is_plain else family.type
                metric = metrics.setdefault(family.name, Metric(family.name, family.documentation, kind))
                for sample in family.samples:
                    labels = {**sample.labels, "deployment": deployment, "replica": replica}
                    metric.add_sample(family.name if is_plain else sample.name, labels, sample.value)
    yield from metrics.values()


def _model_series(models: ModelTotals) -> Iterator[Metric]:
    """The models' custom metrics. Deployments may declare a name differently: series that a scrape can't hold beside
    the first are left out, and the name is logged once."""
    for name, group in itertools.groupby(sorted(models.records), key=lambda series: series.name):
        metric: Metric | None = None
        seen = set()
        for series in group:
            full, numbers = f"{_MODEL_PREFIX}{name}", models.records[series]
            metric = metric or Metric(full, models.helps[name], series.type)
            labels = {"deployment": series.deployment, **dict(series.labels)}
            if metric.type != series.type or (series.deployment, series.labels) in seen:
                if name not in _unlike:
                    _unlike.add(name)
                    text = "metrics: %r of %s contradicts an earlier declaration, and is left out; rename it"
                    logger.error(text, name, series.deployment)
                continue
            seen.add((series.deployment, series.labels))
            if series.type == "histogram":
                counts = list(itertools.accumulate(numbers[:-1]))
                for bound, count in zip([*map(str, series.bounds), "+Inf"], counts, strict=True):
                    metric.add_sample(f"{full}_bucket", {**labels, "le": bound}, count)
                metric.add_sample(f"{full}_count", labels, counts[-1])
                metric.add_sample(f"{full}_sum", labels, numbers[-1])
            else:
                metric.add_sample(f"{full}_total" if series.type == "counter" else full, labels, numbers[0])
        if metric is not None:
            yield metric


async def ask_replicas(targets: Sequence[ReplicaTarget], timeout_s: float = _ASK_TIMEOUT_S) -> list[ReplicaText]:
    """Ask all replicas for their metrics at once, for at most ``timeout_s`` together. A replica that is suspended or
    ending may not answer in time. Returns a `ReplicaText` for each target, in the same order."""
    if not targets:
        return []
    clients = await asyncio.to_thread(_clients, targets)
    tasks = [asyncio.create_task(_ask(client)) for client in clients]
    try:
        await asyncio.wait(tasks, timeout=timeout_s)
    finally:
        for task in tasks:
            task.cancel()
    texts = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        ReplicaText(target.deployment, target.replica, text if isinstance(text, str) else None, target.prefixes)
        for target, text in zip(targets, texts, strict=True)
    ]


def _clients(targets: Sequence[ReplicaTarget]) -> list[httpx.AsyncClient]:
    """Create a client for each target. The first call is slow, and so must not run in the event loop's thread."""
    return [
        httpx.AsyncClient(
            base_url="http://replica",
            transport=httpx.AsyncHTTPTransport(verify=False, uds=str(target.socket)),
            trust_env=False,
        )
        for target in targets
    ]


async def _ask(client: httpx.AsyncClient) -> str:
    """Read the metrics of a replica.

    Raises:
        httpx.HTTPError: the replica can't be reached, or answers with an error.
        ValueError: the answer is too long, or not UTF-8.
    """
    async with client, client.stream("GET", "/metrics") as response:
        response.raise_for_status()
        text = bytearray()
        async for part in response.aiter_bytes():
            text += part
            if len(text) > _SIZE_LIMIT_BYTES:
                raise ValueError(f"expected at most {_SIZE_LIMIT_BYTES} bytes, got more")
        return text.decode()
