"""Counts of one deployment in one gateway worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference.wire.frame import StepCount

__all__ = ["Statistics"]


@dataclass(slots=True)
class Statistics:
    """Cumulative; times in nanoseconds, as Triton's statistics extension has them."""

    requests: int = 0
    """Answered with success."""
    rows: int = 0
    calls: int = 0
    """Batches computed."""
    failures: int = 0
    """Requests that ended with an error after admission."""
    shed: int = 0
    """Requests refused because the queue was full."""
    retried: int = 0
    """Parts of requests given to another replica because the first was lost."""
    quarantined: int = 0
    """Requests refused because the same took two replicas down."""
    displaced: int = 0
    """Requests that gave way to others after admission; failures, too."""
    queue_ns: int = 0
    compute_ns: int = 0
    """Of the callable, summed over requests: rows that share a call each count it whole, as in Triton."""
    call_compute_ns: int = 0
    """Of the callable, summed over calls."""

    steps: dict[str, StepCount] = field(default_factory=dict)
    """Of a fused pipeline, by step."""

    def note_step(self, count: StepCount) -> None:
        """Count what a step did."""
        known = self.steps.setdefault(count.step, StepCount(count.step, 0, 0, 0))
        known.calls += count.calls
        known.retries += count.retries
        known.compute_us += count.compute_us

    def note_request(self, rows: int, queue_ns: int, compute_ns: int) -> None:
        """Count a request that succeeded."""
        self.requests += 1
        self.rows += rows
        self.queue_ns += queue_ns
        self.compute_ns += compute_ns

    def note_call(self, rows: int, compute_ns: int) -> None:
        """Count a batch that was computed."""
        self.calls += 1
        self.call_compute_ns += compute_ns
