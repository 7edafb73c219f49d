"""What a test's own process counted of a deployment."""

from __future__ import annotations

from headwater_server.telemetry import recorder as recorders
from headwater_server.telemetry.ledger import Counts, counts_by_deployment, merged
from headwater_server.telemetry.store import Store

__all__ = ["count_from_zero", "counts_of", "requests_of"]


def count_from_zero() -> None:
    """Forget what tests before this one counted; to be called before what counts is made."""
    recorders.use(Store())


def counts_of(name: str) -> Counts:
    """The counts of a deployment."""
    return counts_by_deployment(merged([recorders.recorder().store.snapshot().records]))[name]


def requests_of(name: str) -> tuple[int, int, int, int]:
    """Of a deployment that is called with tensors: requests that were answered, their rows, calls, and failures."""
    counts = counts_of(name)
    calls = sum(calls for _, (calls, _) in counts.statistics("headwater_batches"))
    answered, _ = counts.sum("headwater_request_phase_seconds", "compute")
    return answered, counts.total("headwater_rows"), calls, counts.total("headwater_failures")
