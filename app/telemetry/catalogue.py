"""Every series that a server exposes under its own name: what it means, how it is counted, and which labels it has.

Each set of labels is bounded: deployments, replicas that are there and heads are the configuration's, and the rest is
listed here. Nothing that a client sends is a label. `docs/metrics.md` has the same as a table.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

__all__ = [
    "ACCEPTED",
    "ALL_SERIES",
    "CATALOGUE",
    "IN_FLIGHT",
    "OUTCOMES",
    "PHASES",
    "REQUESTS",
    "ROUTES",
    "STATISTICS",
    "Outcome",
    "Phase",
    "Route",
    "Series",
]

Route = Literal["infer", "generate", "generate_stream", "chat", "completions", "embeddings"]
ROUTES: Final[tuple[Route, ...]] = ("infer", "generate", "generate_stream", "chat", "completions", "embeddings")

Outcome = Literal["ok", "client_error", "shed", "cancelled", "timeout", "failed", "unavailable", "lost"]
OUTCOMES: Final[tuple[Outcome, ...]] = (
    "ok",
    "client_error",
    "shed",
    "cancelled",
    "timeout",
    "failed",
    "unavailable",
    "lost",
)
"""How a request ends; `lost`, with its gateway worker, is booked by the supervisor."""

Phase = Literal["queue", "batch_wait", "transport", "compute", "serialise"]
PHASES: Final[tuple[Phase, ...]] = ("queue", "batch_wait", "transport", "compute", "serialise")

REQUESTS: Final = "headwater_requests"
ACCEPTED: Final = "headwater_requests_accepted"
IN_FLIGHT: Final = "headwater_requests_in_flight"

_NS: Final = 1e-9
_MS: Final = 1_000_000

# 1 : 2.5 : 5, from a quarter of a millisecond to a minute.
_TIMES_NS: Final = tuple(
    round(ms * _MS)
    for ms in (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
)
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Series(NamedTuple):
    """One series. What is counted in slots is whole numbers: nanoseconds, rows, tokens."""

    name: str
    """Without the ``_total`` that counters end in when they are exposed."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("deployment",)
    scale: float = 1.0
    """What a count of one stands for in the base unit."""
    bounds: tuple[int, ...] = ()
    """Of a histogram: its buckets' upper bounds, inclusive, without the last, which has none."""
    merge: Literal["sum", "max"] = "sum"
    """Of a gauge: what several workers say of it together."""


def _time(name: str, help: str, *labels: str) -> Series:
    return Series(name, "histogram", help, ("deployment", *labels), _NS, _TIMES_NS)


CATALOGUE: Final[dict[str, Series]] = {
    series.name: series
    for series in (
        # Requests
        Series(
            "headwater_http_requests",
            "counter",
            "All HTTP requests, whatever they ask for, by route and class of the status.",
            ("route", "status"),
        ),
        Series(
            ACCEPTED,
            "counter",
            "Requests of which the deployment is known; each of them ends with one outcome.",
            ("deployment", "route"),
        ),
        Series(
            REQUESTS,
            "counter",
            "Requests that have ended, by outcome.",
            ("deployment", "route", "outcome"),
        ),
        Series(
            IN_FLIGHT,
            "gauge",
            "Requests that were accepted and have not ended.",
            ("deployment", "route"),
        ),
        _time("headwater_request_seconds", "From a request's head to its answer's end, if its outcome is ok.", "route"),
        _time(
            "headwater_request_phase_seconds",
            "Where requests that were answered spent their time, by phase.",
            "phase",
        ),
        Series(
            "headwater_rows",
            "counter",
            "Rows of requests that were answered.",
        ),
        # Batches
        Series(
            "headwater_batch_rows",
            "histogram",
            "Rows of a call of a replica.",
            ("deployment",),
            bounds=_ROWS,
        ),
        Series(
            "headwater_batch_capacity_rows",
            "counter",
            "Rows that the calls of replicas had room for: max_batch_size a call.",
        ),
        Series(
            "headwater_compute_seconds",
            "counter",
            "Time that callables took, each call once.",
            scale=_NS,
        ),
        Series("headwater_queue_rows", "gauge", "Rows that wait for a replica."),
        Series("headwater_retries", "counter", "Requests that were tried again on another replica."),
        Series(
            "headwater_quarantined",
            "counter",
            "Requests refused, because the same request had taken two replicas down.",
        ),
        # Heads
        _time("headwater_head_seconds", "From a request's taking in to a head's last result.", "head"),
        Series(
            "headwater_head_results",
            "counter",
            "Last results of the heads that requests wanted, by outcome.",
            ("deployment", "head", "outcome"),
        ),
        # Language models
        _time("headwater_time_to_first_token_seconds", "From a request's taking in to its first token."),
        _time("headwater_inter_token_seconds", "From one token of a sequence to the next."),
        Series("headwater_prompt_tokens", "counter", "Tokens of prompts, once a sequence has given its first token."),
        Series("headwater_generated_tokens", "counter", "Tokens that engines generated."),
        Series("headwater_contract_violations", "counter", "Tokens and frames of an engine that were not in sequence."),
        Series("headwater_active_sequences", "gauge", "Sequences that engines compute.", merge="max"),
        Series("headwater_waiting_sequences", "gauge", "Sequences that wait in engines.", merge="max"),
        Series("headwater_cache_used_tokens", "gauge", "Tokens reserved in engines' caches.", merge="max"),
        Series("headwater_cache_limit_tokens", "gauge", "Tokens that these caches hold.", merge="max"),
        # Deployments and replicas, by the supervisor
        Series(
            "headwater_deployment_state",
            "gauge",
            "1 for the state that the deployment is in, 0 for the others.",
            ("deployment", "state"),
        ),
        Series(
            "headwater_deployment_state_transitions",
            "counter",
            "Changes of a deployment's state.",
            ("deployment", "from", "to"),
        ),
        Series("headwater_replicas_ready", "gauge", "Replicas that take requests."),
        Series("headwater_replicas_wanted", "gauge", "Replicas that there should be."),
        Series(
            "headwater_replica_restarts",
            "counter",
            "Replicas that ended by themselves, and in whose place others are started.",
        ),
        Series("headwater_replica_start_failures", "counter", "Replicas that ended before they were ready."),
        Series("headwater_replica_threads", "gauge", "Threads of a replica's processes.", ("deployment", "replica")),
        Series(
            "headwater_replica_resident_memory_bytes",
            "gauge",
            "Resident memory, summed over a replica's processes.",
            ("deployment", "replica"),
        ),
        Series(
            "headwater_replica_gpu_memory_bytes",
            "gauge",
            "GPU memory of a replica's processes, where NVML tells.",
            ("deployment", "replica"),
        ),
        Series("headwater_worker_restarts", "counter", "Gateway workers started in place of one that ended.", ()),
        # Processes, and the scrape itself
        Series("headwater_scrape_errors", "counter", "Replicas whose own metrics were not had within a scrape."),
        Series("process_resident_memory_bytes", "gauge", "Resident memory.", ("process",)),
        Series("process_cpu_seconds", "counter", "User and system CPU time.", ("process",)),
        Series("process_open_fds", "gauge", "Open file descriptors.", ("process",)),
        Series("process_threads", "gauge", "Threads.", ("process",)),
        Series(
            "process_start_time_seconds",
            "gauge",
            "When it started, in seconds of the Unix epoch.",
            ("process",),
        ),
    )
}
"""What ``/metrics`` exposes."""

STATISTICS: Final[dict[str, Series]] = {
    series.name: series
    for series in (
        Series("headwater_failures", "counter", "Requests that failed after they were admitted."),
        Series(
            "headwater_batches",
            "counter",
            "Calls of replicas by their rows: how many, and nanoseconds that the callable took.",
            ("deployment", "rows"),
        ),
        Series(
            "headwater_steps",
            "counter",
            "Steps of a fused pipeline: calls, retries, and nanoseconds that they took.",
            ("deployment", "step"),
        ),
        Series("headwater_sequences", "counter", "Sequences of language models' requests that were answered."),
        Series("headwater_frames", "counter", "Packed answers that came from engines."),
    )
}
"""What only ``/v2/models/{model}/stats`` tells: sizes of batches would be too many series. A record of these may have
several numbers."""

ALL_SERIES: Final = {**CATALOGUE, **STATISTICS}
