"""The answer to a scrape: the server's own series and those of the replicas' Tritons.

Imported at the first scrape, since the Prometheus client takes memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from app.process.proc import process_use
from app.telemetry.catalogue import CATALOGUE, Series
from app.telemetry.ledger import Totals

__all__ = ["ReplicaText", "TritonAnswer", "TritonTarget", "ask_tritons", "exposition"]

OWN_PREFIX: Final = "nv_"
"""Prefix of Triton's own series."""
ASK_TIMEOUT_S: Final = 1.0
"""For all Tritons together."""
SIZE_LIMIT_BYTES: Final = 1024 * 1024


class ReplicaText(NamedTuple):
    """The metrics of one replica's Triton."""

    deployment: str
    replica: str
    text: str
    """In Prometheus' text format."""


def exposition(totals: Totals, replicas: Sequence[ReplicaText], accept: str) -> tuple[bytes, str]:
    """The answer to a scrape, and its media type.

    Args:
        totals: the server's own counts.
        replicas: the metrics of the replicas' Tritons.
        accept: the request's header; it may ask for OpenMetrics.
    """
    registry = CollectorRegistry()
    registry.register(_Scrape(totals, replicas))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type


class _Scrape:
    """A collector of one scrape."""

    def __init__(self, totals: Totals, replicas: Sequence[ReplicaText]) -> None:
        self._totals = totals
        self._replicas = replicas

    def describe(self) -> Iterable[Metric]:
        """Declare nothing: the series are known only once collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All series."""
        by_name: dict[str, list[tuple[tuple[str, ...], list[int]]]] = {}
        for key, numbers in sorted(self._totals.records.items()):
            by_name.setdefault(key.name, []).append((key.labels, numbers))
        processes = _processes(self._totals.pids)
        for series in CATALOGUE.values():
            if series.name in processes:
                yield _family(series, processes[series.name])
            elif series.kind == "histogram":
                yield _histograms(series, by_name.get(series.name, ()))
            else:
                found = by_name.get(series.name, ())
                yield _family(series, [(labels, numbers[0] * series.scale) for labels, numbers in found])
        yield from _tritons(self._replicas)


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
        use = process_use(pid)
        if use is None:
            continue
        for series, value in (
            ("process_resident_memory_bytes", use.resident_bytes),
            ("process_cpu_seconds", use.cpu_s),
            ("process_open_fds", use.open_fds),
            ("process_threads", use.threads),
            ("process_start_time_seconds", use.started_s),
        ):
            values[series].append(((name,), value))
    return values


def _tritons(replicas: Iterable[ReplicaText]) -> Iterator[Metric]:
    """Triton's own series under their own names, with the labels ``deployment`` and ``replica`` added."""
    found: dict[str, Metric] = {}
    for one in replicas:
        added = {"deployment": one.deployment, "replica": one.replica}
        with contextlib.suppress(ValueError):  # truncated or malformed: what was parsed before is kept
            for family in text_string_to_metric_families(one.text):
                if not family.name.startswith(OWN_PREFIX):
                    continue
                # Triton's counters lack the suffix `_total` that the type requires, and the parser adds it.
                is_plain = family.type == "counter" and f"\n{family.name}_total" not in one.text
                kind = "unknown" if is_plain else family.type
                known = found.setdefault(family.name, Metric(family.name, family.documentation, kind))
                for sample in family.samples:
                    name = family.name if is_plain else sample.name
                    known.add_sample(name, {**sample.labels, **added}, sample.value)
    yield from found.values()


class TritonTarget(NamedTuple):
    """A replica whose Triton is to be scraped."""

    deployment: str
    replica: str
    http_socket: str
    """Path of its Triton's HTTP socket; the one for metrics lies beside it."""


class TritonAnswer(NamedTuple):
    """The answer of one Triton."""

    target: TritonTarget
    text: str | None
    """None: no answer in time."""


async def ask_tritons(targets: Sequence[TritonTarget], timeout_s: float = ASK_TIMEOUT_S) -> list[TritonAnswer]:
    """Scrape all Tritons at once; one that is stopped or ending may not answer in time."""
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
        TritonAnswer(target, text if isinstance(text, str) else None)
        for target, text in zip(targets, texts, strict=True)
    ]


def _clients(targets: Sequence[TritonTarget]) -> list[httpx.AsyncClient]:
    """A client for each target; slow the first time, so not for the event loop."""
    return [
        httpx.AsyncClient(
            base_url="http://replica",
            transport=httpx.AsyncHTTPTransport(verify=False, uds=str(Path(target.http_socket).with_name("m"))),
            trust_env=False,
        )
        for target in targets
    ]


async def _ask(client: httpx.AsyncClient) -> str:
    """The metrics of one Triton.

    Raises:
        httpx.HTTPError: it can't be reached, or answers with an error.
        ValueError: the answer is too long, or not UTF-8.
    """
    async with client, client.stream("GET", "/metrics") as response:
        response.raise_for_status()
        text = bytearray()
        async for part in response.aiter_bytes():
            text += part
            if len(text) > SIZE_LIMIT_BYTES:
                raise ValueError(f"expected at most {SIZE_LIMIT_BYTES} bytes, got more")
        return text.decode()
