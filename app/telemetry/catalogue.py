"""Every series that a server exposes under its own name: its meaning, kind and labels.

Each label's values are bounded: deployments, heads and replicas come from the configuration, all others are listed
here. Nothing that a client sends becomes a label. `docs/metrics.md` has the same as a table.
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
"""How a request ends; the supervisor books `lost` for requests whose gateway worker ended."""

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
    """One series. Slots hold integers: nanoseconds, rows, tokens."""

    name: str
    """Without the suffix ``_total`` of exposed counters."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("deployment",)
    scale: float = 1.0
    """The value of one count in the base unit."""
    bounds: tuple[int, ...] = ()
    """A histogram's inclusive upper bounds; the last bucket has none."""
    merge: Literal["sum", "max"] = "sum"
    """How the values of several workers are combined."""


def _time(name: str, help: str, *labels: str) -> Series:
    return Series(name, "histogram", help, ("deployment", *labels), _NS, _TIMES_NS)


CATALOGUE: Final[dict[str, Series]] = {
    series.name: series
    for series in (
        # Requests
        Series(
            "headwater_http_requests",
            "counter",
            "All HTTP requests, by route and class of status.",
            ("route", "status"),
        ),
        Series(
            ACCEPTED,
            "counter",
            "Requests whose deployment is known; each ends with exactly one outcome.",
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
            "Accepted requests that have not ended.",
            ("deployment", "route"),
        ),
        _time(
            "headwater_request_seconds",
            "From a request's head to the end of its answer, for requests with outcome ok.",
            "route",
        ),
        _time(
            "headwater_request_phase_seconds",
            "Where answered requests spent their time, by phase.",
            "phase",
        ),
        Series(
            "headwater_rows",
            "counter",
            "Rows of answered requests.",
        ),
        # Batches
        Series(
            "headwater_batch_rows",
            "histogram",
            "Rows of a call to a replica.",
            ("deployment",),
            bounds=_ROWS,
        ),
        Series(
            "headwater_batch_capacity_rows",
            "counter",
            "Rows that calls to replicas could have held: max_batch_size per call.",
        ),
        Series(
            "headwater_compute_seconds",
            "counter",
            "Time spent in callables, each call once.",
            scale=_NS,
        ),
        Series("headwater_queue_rows", "gauge", "Rows waiting for a replica."),
        Series("headwater_retries", "counter", "Requests retried on another replica."),
        Series(
            "headwater_quarantined",
            "counter",
            "Requests refused because the same request had taken two replicas down.",
        ),
        # Heads
        _time("headwater_head_seconds", "From a request's acceptance to a head's last result.", "head"),
        Series(
            "headwater_head_results",
            "counter",
            "Final results of requested heads, by outcome.",
            ("deployment", "head", "outcome"),
        ),
        # Language models
        _time("headwater_time_to_first_token_seconds", "From a request's acceptance to its first token."),
        _time("headwater_inter_token_seconds", "From one token of a sequence to the next."),
        Series("headwater_prompt_tokens", "counter", "Prompt tokens, counted at a sequence's first token."),
        Series("headwater_generated_tokens", "counter", "Tokens that engines generated."),
        Series("headwater_contract_violations", "counter", "Tokens and frames that an engine sent out of sequence."),
        Series("headwater_active_sequences", "gauge", "Sequences being computed by engines.", merge="max"),
        Series("headwater_waiting_sequences", "gauge", "Sequences waiting in engines.", merge="max"),
        Series("headwater_cache_used_tokens", "gauge", "Tokens reserved in the engines' caches.", merge="max"),
        Series("headwater_cache_limit_tokens", "gauge", "Capacity of the engines' caches in tokens.", merge="max"),
        # Deployments and replicas, counted by the supervisor
        Series(
            "headwater_deployment_state",
            "gauge",
            "1 for the deployment's current state, 0 for the others.",
            ("deployment", "state"),
        ),
        Series(
            "headwater_deployment_state_transitions",
            "counter",
            "Changes of a deployment's state.",
            ("deployment", "from", "to"),
        ),
        Series("headwater_replicas_ready", "gauge", "Replicas that accept requests."),
        Series("headwater_replicas_wanted", "gauge", "Replicas that the deployment should have."),
        Series(
            "headwater_replica_restarts",
            "counter",
            "Replicas that ended by themselves and are replaced.",
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
            "GPU memory of a replica's processes, where NVML is available.",
            ("deployment", "replica"),
        ),
        Series("headwater_worker_restarts", "counter", "Gateway workers started to replace one that ended.", ()),
        # Processes, and the scrape itself
        Series("headwater_scrape_errors", "counter", "Replicas whose own metrics could not be read for a scrape."),
        Series("process_resident_memory_bytes", "gauge", "Resident memory.", ("process",)),
        Series("process_cpu_seconds", "counter", "User and system CPU time.", ("process",)),
        Series("process_open_fds", "gauge", "Open file descriptors.", ("process",)),
        Series("process_threads", "gauge", "Threads.", ("process",)),
        Series(
            "process_start_time_seconds",
            "gauge",
            "Start time, in seconds since the Unix epoch.",
            ("process",),
        ),
    )
}
"""What ``/metrics`` exposes."""

STATISTICS: Final[dict[str, Series]] = {
    series.name: series
    for series in (
        Series("headwater_failures", "counter", "Requests that failed after admission."),
        Series(
            "headwater_batches",
            "counter",
            "Calls to replicas by number of rows: their count, and nanoseconds in the callable.",
            ("deployment", "rows"),
        ),
        Series(
            "headwater_steps",
            "counter",
            "Steps of a fused pipeline: calls, retries, and their nanoseconds.",
            ("deployment", "step"),
        ),
        Series("headwater_sequences", "counter", "Sequences of answered language-model requests."),
        Series("headwater_frames", "counter", "Frames received from engines."),
    )
}
"""Series for ``/v2/models/{model}/stats`` only: one for each batch size would be too many for ``/metrics``. A record
may have several numbers."""

ALL_SERIES: Final = {**CATALOGUE, **STATISTICS}
