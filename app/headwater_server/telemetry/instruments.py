"""Counters, gauges and histograms, which write to records in a store.

Counters and gauges write immediately. Histograms gather values until the next turn of the event loop (`Store.later`),
because requests that share a batch end in the same turn, and it costs less to write many values together than singly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

from headwater_server.telemetry.catalogue import ALL_SERIES, OUTCOMES, REQUESTS, Outcome
from headwater_server.telemetry.store import SeriesKey, Store

__all__ = ["ACCEPTED_AT", "Counter", "Gauge", "Histogram", "Requests", "Statistics"]

_OUTCOME_AT: Final = {outcome: index for index, outcome in enumerate(OUTCOMES)}
ACCEPTED_AT: Final = len(OUTCOMES)
"""Index of the number of accepted requests in a record of `Requests`. It is behind the numbers of ended requests: a
reader reads slots in ascending order, and so never sees more ended than accepted requests."""


class _Instrument:
    """A record in a store. Never written by two processes, nor by two threads at once."""

    def __init__(self, store: Store, name: str, *labels: str, numbers: int = 1) -> None:
        self._slots = store.slots
        self._at = store.record(SeriesKey(name, labels), numbers)


class Counter(_Instrument):
    """A count that only goes up."""

    def add(self, amount: int = 1) -> None:
        """Add to the count."""
        self._slots[self._at] += amount


class Statistics(_Instrument):
    """Several counters in the same record."""

    def add(self, *amounts: int) -> None:
        """Add to each counter."""
        for at, amount in enumerate(amounts, self._at):
            self._slots[at] += amount


class Gauge(_Instrument):
    """A current value."""

    def set(self, value: int) -> None:
        """Set the value."""
        self._slots[self._at] = value


class Histogram(_Instrument):
    """A record with the number of values in each bucket (not added up over buckets; the bucket without a bound is the
    last), and the values' sum. Values are in stored units: see `headwater_server.telemetry.catalogue.Series`."""

    def __init__(self, store: Store, name: str, *labels: str) -> None:
        self._bounds = ALL_SERIES[name].bounds
        super().__init__(store, name, *labels, numbers=len(self._bounds) + 2)
        self._store = store
        self._values: list[int] = []

    def observe(self, value: int) -> None:
        """Count a value."""
        values = self._values
        values.append(value)
        if len(values) == 1:
            self._store.later(self._write)

    def observe_times(self, value: int, times: int) -> None:
        """Count the same value several times."""
        values = self._values
        is_first = not values
        values += [value] * times
        if is_first:
            self._store.later(self._write)

    def observe_all(self, values: Iterable[int]) -> None:
        """Count several values immediately. They are sorted first, so that each bucket is searched for only once."""
        slots, at, bounds = self._slots, self._at, self._bounds
        values = sorted(values)
        start = 0
        while start < len(values):
            bucket = bisect_left(bounds, values[start])
            end = bisect_right(values, bounds[bucket], start) if bucket < len(bounds) else len(values)
            slots[at + bucket] += end - start
            start = end
        slots[at + len(bounds) + 1] += sum(values)

    def _write(self) -> None:
        values, self._values = self._values, []
        self.observe_all(values)


class Requests(_Instrument):
    """Counts of requests for a deployment over a route: ended requests by outcome, and accepted requests."""

    def __init__(self, store: Store, deployment: str, route: str) -> None:
        super().__init__(store, REQUESTS, deployment, route, numbers=len(OUTCOMES) + 1)
        self.deployment = deployment
        self.seconds = Histogram(store, "headwater_request_seconds", deployment, route)

    def accept(self) -> None:
        """Count an accepted request."""
        self._slots[self._at + ACCEPTED_AT] += 1

    def end(self, outcome: Outcome, took_ns: int) -> None:
        """Count the end of an accepted request. ``took_ns`` counts only if the outcome is ``ok``."""
        self._slots[self._at + _OUTCOME_AT[outcome]] += 1
        if outcome == "ok":
            self.seconds.observe(took_ns)
