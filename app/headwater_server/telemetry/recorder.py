"""The process's recorder of metrics, with a meter for each deployment.

A gateway worker and the supervisor give the recorder a file when they start (`use`); until then, without metrics, and
in tests, the recorder counts in memory. Objects that count often keep a reference to their meter.

A request is accepted as soon as its deployment is known (`accept`), and then ends with exactly one outcome (`leave`),
so that accepted = sum over all outcomes + in flight, for every deployment and route. A request that is refused earlier,
such as for its method, its API key or an unknown model, counts only in `headwater_http_requests_total`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, Final, get_args

from headwater.wire.frame import CacheCount, StepCount
from headwater_server.control.load import Tally
from headwater_server.errors import Cancelled, HeadwaterError
from headwater_server.telemetry.catalogue import (
    ALL_SERIES,
    OUTCOMES,
    REQUESTS,
    VERSION_TIMES,
    Outcome,
    Phase,
    Route,
    ShadowDrop,
)
from headwater_server.telemetry.instruments import Counter, Gauge, Histogram, Requests, Statistics
from headwater_server.telemetry.store import SeriesKey, Store

__all__ = [
    "PHASE_SECONDS", "CacheMeter", "DeploymentMeter", "LanguageModelMeter", "Recorder", "ShadowMeter", "accept",
    "leave", "note_error", "outcome_of", "recorder", "use",
]  # fmt: skip

PHASE_SECONDS: Final = "headwater_request_phase_seconds"
"""The series of the time that answered requests spend in each `Phase`."""
FAILURES: Final[tuple[Outcome, ...]] = ("timeout", "failed", "unavailable", "lost")
"""Outcomes that count as failures of a version."""
ABORTED: Final = 499
"""The status that is recorded for an answer if the client disconnected before its end."""
_BY_STATUS: Final[dict[int, Outcome]] = {429: "shed", ABORTED: "cancelled", 503: "unavailable", 504: "timeout"}


def outcome_of(error: HeadwaterError) -> Outcome:
    """The outcome of a request that ended with an error: ``cancelled`` for `Cancelled`, else by the error's status."""
    return "cancelled" if isinstance(error, Cancelled) else _outcome_of_status(error.status)


def _outcome_of_status(status: int) -> Outcome:
    if status < 400:
        return "ok"
    return _BY_STATUS.get(status) or ("client_error" if status < 500 else "failed")


class DeploymentMeter:
    """The series of a deployment that is called with tensors; see `headwater_server.telemetry.catalogue`. Times are in
    nanoseconds."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.rows = Counter(store, "headwater_rows", name)
        self.batch_rows = Histogram(store, "headwater_batch_rows", name)
        self.batch_capacity_rows = Counter(store, "headwater_batch_capacity_rows", name)
        self.compute = Counter(store, "headwater_compute_seconds", name)
        self.retries = Counter(store, "headwater_retries", name)
        self.quarantined = Counter(store, "headwater_quarantined", name)
        self.queue_rows = Gauge(store, "headwater_queue_rows", name)
        phases: tuple[Phase, ...] = ("queue", "batch_wait", "compute", "transport")
        self._phases = [Histogram(store, PHASE_SECONDS, name, phase) for phase in phases]
        self._answered: list[tuple[int, int, int, int, int]] = []
        """Answered requests that are not written yet: rows, and nanoseconds in each of these phases."""
        self.serialise = Histogram(store, PHASE_SECONDS, name, "serialise")
        """Nanoseconds for decoding a request's body and encoding its answer's body together; a single value per
        request."""
        self.failures = Counter(store, "headwater_failures", name)
        self._batches = functools.cache(lambda rows: Statistics(store, "headwater_batches", name, str(rows), numbers=2))
        self._steps = functools.cache(lambda step: Statistics(store, "headwater_steps", name, step, numbers=3))
        self._features = functools.cache(functools.partial(FeatureMeter, store, name))
        self._head_seconds = functools.cache(functools.partial(Histogram, store, "headwater_head_seconds", name))
        self._head_results = functools.cache(functools.partial(Counter, store, "headwater_head_results", name))

    def note_request(
        self, rows: int, waited_ns: int, batch_wait_ns: int, compute_ns: int, transport_ns: int | None
    ) -> None:
        """Count an answered request.

        Args:
            rows: the request's rows.
            waited_ns: time until the request's last call to a replica began.
            batch_wait_ns: the part of ``waited_ns`` spent waiting for more rows while a replica was free.
            compute_ns: time in the callable.
            transport_ns: the remaining time until the answer arrived; None: the answer is a stream, so that this time
                depends on the stream's reader.
        """
        if transport_ns is None:
            self.rows.add(rows)
            times_ns = waited_ns - batch_wait_ns, batch_wait_ns, compute_ns
            for phase, took_ns in zip(self._phases, times_ns, strict=False):
                phase.observe(took_ns)
            return
        answered = self._answered
        answered.append((rows, waited_ns - batch_wait_ns, batch_wait_ns, compute_ns, transport_ns))
        if len(answered) == 1:
            self._store.later(self._write_answered)

    def _write_answered(self) -> None:
        answered, self._answered = self._answered, []
        rows, *phases = zip(*answered, strict=True)
        self.rows.add(sum(rows))
        for phase, took_ns in zip(self._phases, phases, strict=True):
            phase.observe_all(took_ns)

    def note_call(self, rows: int, capacity_rows: int, compute_ns: int, *, is_merged: bool = False) -> None:
        """Count a call that a replica answered.

        Args:
            rows: the call's rows.
            capacity_rows: the rows that it could have held.
            compute_ns: time in the callable.
            is_merged: whether Triton merged the call with another call, which already counts the compute time.
        """
        self.batch_rows.observe(rows)
        self.batch_capacity_rows.add(capacity_rows)
        if not is_merged:
            self.compute.add(compute_ns)
            self._batches(rows).add(1, compute_ns)

    def note_step(self, count: StepCount) -> None:
        """Count a report of a replica about a step of a fused pipeline."""
        self._steps(count.step).add(count.calls, count.retries, count.compute_us * 1000)
        if count.cache is not None:
            self._features(count.step).note(count.cache)

    def note_head(self, head: str, error: HeadwaterError | None, took_ms: float) -> None:
        """Count a head's final result for a request: its error, or None and the milliseconds since the request's
        acceptance."""
        seconds = self._head_seconds(head)  # creates the series, so that a head that never succeeds has zeros
        self._head_results(head, "ok" if error is None else outcome_of(error)).add()
        if error is None:
            seconds.observe(int(took_ms * 1_000_000))

    def leave_head(self, head: str) -> None:
        """Count a head as cancelled, because no client waits for its result any more."""
        self._head_seconds(head)
        self._head_results(head, "cancelled").add()


class CacheMeter:
    """The series of a deployment with an answer cache."""

    def __init__(self, store: Store, name: str) -> None:
        self.hits, self.misses, self.shared = (
            Counter(store, "headwater_answer_cache_requests", name, result) for result in ("hit", "miss", "shared")
        )
        self.evictions = Counter(store, "headwater_answer_cache_evictions", name)
        self.size_bytes = Gauge(store, "headwater_answer_cache_bytes", name)


class FeatureMeter:
    """The series of the cache of a fused pipeline's step."""

    def __init__(self, store: Store, name: str, step: str) -> None:
        self._hits, self._misses = (
            Counter(store, "headwater_feature_cache_rows", name, step, result) for result in ("hit", "miss")
        )
        self._evictions = Counter(store, "headwater_feature_cache_evictions", name, step)
        self._size_bytes = Gauge(store, "headwater_feature_cache_bytes", name, step)

    def note(self, count: CacheCount) -> None:
        """Count a replica's report about the cache."""
        self._hits.add(count.hits)
        self._misses.add(count.misses)
        self._evictions.add(count.evictions)
        self._size_bytes.set(count.size_bytes)


class ShadowMeter:
    """The series of a shadow."""

    def __init__(self, store: Store, name: str) -> None:
        self.compared, self.failed = (
            Counter(store, "headwater_shadow_requests", name, result) for result in ("compared", "failed")
        )
        self.dropped: Callable[[ShadowDrop], Counter] = functools.cache(
            functools.partial(Counter, store, "headwater_shadow_dropped", name)
        )
        """The count of dropped copies, by reason."""
        self.rows = Counter(store, "headwater_shadow_rows", name)
        self.disagreements: Callable[[str, str], Counter] = functools.cache(
            functools.partial(Counter, store, "headwater_shadow_disagreements", name)
        )
        """The count of rows that differ, by output and kind."""
        self.difference: Callable[[str], Histogram] = functools.cache(
            functools.partial(Histogram, store, "headwater_shadow_difference", name)
        )
        """The greatest difference of each answer, by output, in millionths."""
        self.answer_seconds, self.seconds = (
            Histogram(store, "headwater_shadow_seconds", name, by) for by in ("answer", "shadow")
        )


class LanguageModelMeter:
    """The series of a language model."""

    def __init__(self, store: Store, name: str) -> None:
        self.first_token = Histogram(store, "headwater_time_to_first_token_seconds", name)
        self.inter_token = Histogram(store, "headwater_inter_token_seconds", name)
        self.prompt_tokens = Counter(store, "headwater_prompt_tokens", name)
        self.cached_prompt_tokens = Counter(store, "headwater_cached_prompt_tokens", name)
        self.generated_tokens = Counter(store, "headwater_generated_tokens", name)
        self.sequences = Counter(store, "headwater_sequences", name)
        self.frames = Counter(store, "headwater_frames", name)
        self.contract_violations = Counter(store, "headwater_contract_violations", name)
        self.active = Gauge(store, "headwater_active_sequences", name)
        self.waiting = Gauge(store, "headwater_waiting_sequences", name)
        self.cache_used = Gauge(store, "headwater_cache_used_tokens", name)
        self.cache_limit = Gauge(store, "headwater_cache_limit_tokens", name)


class Recorder:
    """Counts in a store. Only a single thread may use it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.deployment: Callable[[str], DeploymentMeter] = functools.cache(functools.partial(DeploymentMeter, store))
        """The meter of a deployment that is called with tensors."""
        self.cache: Callable[[str], CacheMeter] = functools.cache(functools.partial(CacheMeter, store))
        """The meter of a deployment's answer cache."""
        self.shadow: Callable[[str], ShadowMeter] = functools.cache(functools.partial(ShadowMeter, store))
        """The meter of a version that gets copies of requests."""
        self.language_model: Callable[[str], LanguageModelMeter] = functools.cache(
            functools.partial(LanguageModelMeter, store)
        )
        """The meter of a language model."""
        self.requests: Callable[[str, Route], Requests] = functools.cache(functools.partial(Requests, store))
        """The count of requests for a deployment over a route."""
        self.version_times: Callable[[str], Histogram] = functools.cache(
            functools.partial(Histogram, store, VERSION_TIMES)
        )
        """The histogram of the times of a version's answered requests."""
        self.http_requests: Callable[[str, int], Counter] = functools.cache(functools.partial(_http_requests, store))
        """The count of HTTP requests for a route's path, such as ``/v2/models/{model}``, by class of the status."""

    @property
    def folder(self) -> Path | None:
        """The folder of the server's files of counts; None: this process has no such file."""
        return None if self.store.path is None else self.store.path.parent

    def tally(self, deployment: str) -> Tally:
        """Counts of a version's requests over all routes so far, in this process: requests that were answered or
        failed, requests that failed (`FAILURES`), and the times of answered requests, which may lag behind for a turn
        of the event loop. ``deployment`` is ``NAME.VERSION``."""
        ended = failed = 0
        for route in get_args(Route):
            outcomes = dict(
                zip(OUTCOMES, self.store.numbers(SeriesKey(REQUESTS, (deployment, route)), len(OUTCOMES)), strict=True)
            )
            failed_here = sum(outcomes[outcome] for outcome in FAILURES)
            failed += failed_here
            ended += failed_here + outcomes["ok"]
        times = self.store.numbers(SeriesKey(VERSION_TIMES, (deployment,)), len(ALL_SERIES[VERSION_TIMES].bounds) + 1)
        return Tally(deployment, ended, failed, times)

    def count(self, name: str, *labels: str) -> None:
        """Add 1 to a counter that is rarely used, and so has no meter."""
        Counter(self.store, name, *labels).add()


def _http_requests(store: Store, route: str, status: int) -> Counter:
    return Counter(store, "headwater_http_requests", route, "aborted" if status == ABORTED else f"{status // 100}xx")


_current: Recorder | None = None


def recorder() -> Recorder:
    """This process's recorder. Before the first `use` it is created here, and counts in memory."""
    return _current if _current is not None else use(Store())


def use(store: Store) -> Recorder:
    """Count in this store from now on. Returns the new recorder. Meters that were returned earlier keep their store."""
    global _current
    _current = Recorder(store)
    return _current


def accept(scope: MutableMapping[str, Any], deployment: str, route: Route) -> None:
    """Count a request as accepted; `leave` then counts its end.

    Args:
        scope: the request's ASGI scope.
        deployment: a name from the routing table, never an unchecked name from the client.
        route: the request's route.
    """
    requests = recorder().requests(deployment, route)
    requests.accept()
    scope["state"]["requests"] = requests


def note_error(state: MutableMapping[str, Any], error: HeadwaterError) -> None:
    """Set a failed request's outcome, which `leave` counts even if the answer has begun with a status of success."""
    state["outcome"] = outcome_of(error)


def leave(scope: MutableMapping[str, Any], status: int, took_ns: int) -> None:
    """Count the end of a request.

    Args:
        scope: the request's ASGI scope.
        status: the answer's status; 499: the client disconnected before the end.
        took_ns: time since the request's head arrived.
    """
    state = scope["state"]
    path = getattr(scope.get("route"), "path", "unmatched")
    recorder().http_requests(path, status).add()
    requests: Requests | None = state.get("requests")
    if requests is not None:
        outcome = state.get("outcome") or _outcome_of_status(status)
        requests.end(outcome, took_ns)
        if outcome == "ok" and "version" in state:
            recorder().version_times(requests.deployment).observe(took_ns)
