"""All metrics series that Headwater defines: their meaning, kind and labels.

The number of values of each label is bounded: deployments, heads, steps, outputs, versions, replicas, processes and
numbers of rows follow from the configuration and the models, and all other values come from fixed lists. No value that
a client sends becomes a label. `docs/metrics.md` has the series as a table.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

__all__ = [
    "ACCEPTED", "ALL_SERIES", "CATALOGUE", "IN_FLIGHT", "OUTCOMES", "REQUESTS", "REQUEST_SECONDS", "VERSION_TIMES",
    "Outcome", "Phase", "Route", "ShadowDrop",
]  # fmt: skip

Route = Literal[
    "infer", "generate", "generate_stream", "chat", "completions", "responses", "embeddings", "rerank", "classify",
    "transcriptions", "tokenize", "detokenize", "messages", "count_tokens",
]  # fmt: skip
"""The kind of a request to a deployment, as a label."""
Phase = Literal["queue", "batch_wait", "transport", "compute", "serialise"]
"""The parts of a request's time: waiting for a replica; waiting for more rows while a replica is free; the way to the
callable and back; the callable; and decoding and encoding bodies."""
ShadowDrop = Literal["in_flight", "bytes", "load", "unavailable", "signature", "stream", "ended"]
"""Why a request was not copied to a shadow, or its copy was dropped."""
Outcome = Literal["ok", "client_error", "shed", "cancelled", "timeout", "failed", "unavailable", "lost"]
"""How a request ends. Only the supervisor counts requests as ``lost``: requests that a gateway worker had when it
ended. ``shed``: refused with status 429."""
OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)

REQUESTS: Final = "headwater_requests"
ACCEPTED: Final = "headwater_requests_accepted"
IN_FLIGHT: Final = "headwater_requests_in_flight"
REQUEST_SECONDS: Final = "headwater_request_seconds"
VERSION_TIMES: Final = "headwater_version_times"

_NS: Final = 1e-9
# Steps of 1, 2.5 and 5 in each power of ten, from a quarter of a millisecond to 10 s; then 30 s and a minute.
_TIMES_MS: Final = (0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000, 60_000)
# Eight bounds for each factor of two, from an eighth of a millisecond to 131 s.
_FINE_TIMES_NS: Final = tuple(round(125_000 * 2 ** (step / 8)) for step in range(161))
_TIMES_NS: Final = tuple(round(ms * 1_000_000) for ms in _TIMES_MS)
# In millionths: zero, for equal numbers, and powers of ten from a millionth to a thousand.
_DIFFERENCES: Final = (0, *(10**power for power in range(10)))
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Series(NamedTuple):
    """A series. Its numbers are stored as integers, such as nanoseconds, rows or tokens; see ``scale``."""

    name: str
    """The name; of a counter, without the suffix ``_total`` that ``/metrics`` adds."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ("deployment",)
    scale: float = 1.0
    """Factor from stored integers to the unit of ``/metrics``, such as seconds."""
    bounds: tuple[int, ...] = ()
    """A histogram's inclusive upper bounds, as stored integers. The last bucket has no bound."""
    merge: Literal["sum", "max"] = "sum"
    """How the values of several processes are combined."""


def _counter(name: str, help: str, *labels: str, scale: float = 1.0) -> Series:
    return Series(name, "counter", help, ("deployment", *labels), scale)


def _gauge(name: str, help: str, *labels: str, merge: Literal["sum", "max"] = "sum") -> Series:
    return Series(name, "gauge", help, ("deployment", *labels), merge=merge)


def _times(name: str, help: str, *labels: str) -> Series:
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
        _counter(ACCEPTED, "Requests whose deployment is known; each ends with exactly one outcome.", "route"),
        _counter(REQUESTS, "Requests that have ended, by outcome.", "route", "outcome"),
        _gauge(IN_FLIGHT, "Accepted requests that have not ended.", "route"),
        _times(
            REQUEST_SECONDS,
            "From a request's head to the end of its answer, for requests with outcome ok.",
            "route",
        ),
        _times("headwater_request_phase_seconds", "Where answered requests spent their time, by phase.", "phase"),
        _counter("headwater_rows", "Rows of answered requests."),
        # Batches
        Series("headwater_batch_rows", "histogram", "Rows of a call to a replica.", bounds=_ROWS),
        _counter(
            "headwater_batch_capacity_rows", "Rows that calls to replicas could have held: max_batch_size per call."
        ),
        _counter("headwater_compute_seconds", "Time spent in callables, each call once.", scale=_NS),
        _gauge("headwater_queue_rows", "Rows waiting for a replica."),
        _counter("headwater_retries", "Requests retried on another replica."),
        _counter("headwater_quarantined", "Requests refused because the same request had taken two replicas down."),
        # Caches of answers and of steps' outputs
        _counter(
            "headwater_answer_cache_requests",
            "Requests of deployments that keep answers: answered from the cache (hit), computed (miss), or answered "
            "together with an equal request (shared).",
            "result",
        ),
        _counter("headwater_answer_cache_evictions", "Kept answers that made room for others."),
        _gauge("headwater_answer_cache_bytes", "Memory of the answers that are kept."),
        _counter(
            "headwater_feature_cache_rows",
            "Rows of a step with cached outputs: found in the cache (hit), or computed (miss).",
            "step",
            "result",
        ),
        _counter("headwater_feature_cache_evictions", "Kept rows of a step that made room for others.", "step"),
        _gauge("headwater_feature_cache_bytes", "Memory of the rows that one replica keeps.", "step", merge="max"),
        # Shadows: versions that get copies of requests
        _counter(
            "headwater_shadow_requests", "Copies of requests that a shadow has ended: compared, or failed.", "result"
        ),
        _counter("headwater_shadow_dropped", "Requests that were not copied to a shadow, or not to the end.", "reason"),
        _counter("headwater_shadow_rows", "Rows of answers that were compared."),
        _counter(
            "headwater_shadow_disagreements",
            "Of these, rows whose greatest label or texts differ (value), or whose datatype or shape does (form).",
            "output",
            "kind",
        ),
        Series(
            "headwater_shadow_difference",
            "histogram",
            "The greatest absolute difference of two numbers in an output that was compared.",
            ("deployment", "output"),
            1e-6,
            _DIFFERENCES,
        ),
        _times(
            "headwater_shadow_seconds",
            "Time until the answers that were compared: of the version that answered, and of the shadow.",
            "by",
        ),
        # Heads
        _times("headwater_head_seconds", "From a request's acceptance to a head's last result.", "head"),
        _counter("headwater_head_results", "Final results of requested heads, by outcome.", "head", "outcome"),
        # Language models
        _times("headwater_time_to_first_token_seconds", "From a request's acceptance to its first token."),
        _times("headwater_inter_token_seconds", "From one token of a sequence to the next."),
        _counter("headwater_prompt_tokens", "Prompt tokens, counted at a sequence's first token."),
        _counter("headwater_cached_prompt_tokens", "Prompt tokens found in the engines' prefix caches."),
        _counter("headwater_generated_tokens", "Tokens that engines generated."),
        _counter("headwater_contract_violations", "Tokens and frames that an engine sent out of sequence."),
        _gauge("headwater_active_sequences", "Sequences being computed by engines.", merge="max"),
        _gauge("headwater_waiting_sequences", "Sequences waiting in engines.", merge="max"),
        _gauge("headwater_cache_used_tokens", "Tokens reserved in the engines' caches.", merge="max"),
        _gauge("headwater_cache_limit_tokens", "Capacity of the engines' caches in tokens.", merge="max"),
        # Deployments and replicas, measured by the supervisor
        _gauge("headwater_deployment_state", "1 for the deployment's current state, 0 for the others.", "state"),
        _counter("headwater_deployment_state_transitions", "Changes of a deployment's state.", "from", "to"),
        _counter("headwater_rollbacks", "Versions that lost their share of the requests by themselves.", "version"),
        _gauge("headwater_replicas_ready", "Replicas that accept requests."),
        _gauge("headwater_replicas_wanted", "Replicas that the deployment should have."),
        Series(
            "headwater_utilization",
            "gauge",
            "Share of the ready replicas' capacity in use over the last half second, 0 to 1.",
            scale=1e-3,
        ),
        _counter("headwater_replica_restarts", "Replicas that ended by themselves and are replaced."),
        _counter("headwater_replica_start_failures", "Replicas that ended before they were ready."),
        _gauge("headwater_replica_threads", "Threads of a replica's processes.", "replica"),
        _gauge(
            "headwater_replica_resident_memory_bytes", "Resident memory, summed over a replica's processes.", "replica"
        ),
        _gauge(
            "headwater_replica_gpu_memory_bytes",
            "GPU memory of a replica's processes, where NVML is available.",
            "replica",
        ),
        Series(
            "headwater_replica_gpu_utilization",
            "gauge",
            "Part of the last seconds in which kernels of a replica's processes ran on a GPU, where NVML tells.",
            ("deployment", "replica"),
            scale=1e-3,
        ),
        _gauge(
            "headwater_replica_batch_limit",
            "Rows or sequences computed at once after its device ran out of memory; 0: as configured.",
            "replica",
        ),
        Series("headwater_worker_restarts", "counter", "Gateway workers started to replace one that ended.", ()),
        Series(
            "headwater_log_lines_dropped",
            "counter",
            "Lines of the log dropped because standard error was not read in time.",
            (),
        ),
        # Processes, and the scrape itself
        _counter("headwater_scrape_errors", "Replicas whose own metrics could not be read for a scrape."),
        Series("process_resident_memory_bytes", "gauge", "Resident memory.", ("process",)),
        Series("process_cpu_seconds", "counter", "User and system CPU time.", ("process",)),
        Series("process_open_fds", "gauge", "Open file descriptors.", ("process",)),
        Series("process_threads", "gauge", "Threads.", ("process",)),
        Series("process_start_time_seconds", "gauge", "Start time, in seconds since the Unix epoch.", ("process",)),
    )
}
"""Headwater's series at ``/metrics``, by name."""

ALL_SERIES: Final = {
    **CATALOGUE,
    # Only for ``/v2/models/{model}/stats``: a series for each batch size would be too many for ``/metrics``. A record
    # of these series may have several numbers.
    **{
        series.name: series
        for series in (
            _counter("headwater_failures", "Requests that failed after admission."),
            _counter("headwater_batches", "Calls to replicas: their count, and nanoseconds in the callable.", "rows"),
            _counter("headwater_steps", "Steps of a fused pipeline: calls, retries, and their nanoseconds.", "step"),
            _counter("headwater_sequences", "Sequences of answered language-model requests."),
            _counter("headwater_frames", "Frames received from engines."),
            # Only for the supervisor, which compares versions.
            Series(VERSION_TIMES, "histogram", "The same as headwater_request_seconds.", bounds=_FINE_TIMES_NS),
        )
    },
}
