"""What counts: each knows its slots. To count costs a tenth of a microsecond, in a histogram a quarter."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from app.metrics.catalogue import CATALOGUE, OUTCOMES, REQUESTS, Outcome
from app.metrics.store import Key, Store

__all__ = ["ACCEPTED_AT", "Counter", "Gauge", "Histogram", "Histograms", "Requests"]

_OUTCOME_AT: Final = {outcome: index for index, outcome in enumerate(OUTCOMES)}
ACCEPTED_AT: Final = len(OUTCOMES)
"""Where a record of `Requests` says how many were accepted: behind those that have ended, because it is read behind
them, and so never says fewer."""


class Counter:
    """Goes up. Nothing but this one process counts in these slots, and there in one thread."""

    __slots__ = ("_at", "_slots")

    def __init__(self, store: Store, name: str, *labels: str) -> None:
        self._slots = store.slots
        self._at = store.record(Key(name, labels), 1)

    def add(self, amount: int = 1) -> None:
        """Count."""
        self._slots[self._at] += amount


class Gauge:
    """What is, now."""

    __slots__ = ("_at", "_slots")

    def __init__(self, store: Store, name: str, *labels: str) -> None:
        self._slots = store.slots
        self._at = store.record(Key(name, labels), 1)

    def set(self, value: int) -> None:
        """Say it."""
        self._slots[self._at] = value


class Histogram:
    """Numbers by size: a count for each bucket, the one without bound among them, and behind them the sum."""

    __slots__ = ("_at", "_bounds", "_slots", "_sum_at")

    def __init__(self, store: Store, name: str, *labels: str) -> None:
        self._bounds = CATALOGUE[name].bounds
        self._slots = store.slots
        self._at = store.record(Key(name, labels), len(self._bounds) + 2)
        self._sum_at = self._at + len(self._bounds) + 1

    def observe(self, value: int) -> None:
        """Count a number."""
        slots = self._slots
        slots[self._at + bisect_left(self._bounds, value)] += 1
        slots[self._sum_at] += value

    def observe_times(self, value: int, times: int) -> None:
        """Count the same number several times."""
        slots = self._slots
        slots[self._at + bisect_left(self._bounds, value)] += times
        slots[self._sum_at] += value * times


class Histograms:
    """Several with the same buckets, in which each request counts one number each: one call for all of them."""

    __slots__ = ("_at", "_bounds", "_slots", "_sum_at")

    def __init__(self, store: Store, name: str, *labels: tuple[str, ...]) -> None:
        self._bounds = CATALOGUE[name].bounds
        self._slots = store.slots
        self._sum_at = len(self._bounds) + 1
        self._at = [store.record(Key(name, one), len(self._bounds) + 2) for one in labels]

    def observe(self, *values: int) -> None:
        """Count a number in each of the first of them."""
        slots, bounds, sum_at = self._slots, self._bounds, self._sum_at
        for at, value in zip(self._at, values, strict=False):
            slots[at + bisect_left(bounds, value)] += 1
            slots[at + sum_at] += value


class Requests:
    """Requests for one deployment over one route: those accepted, and those that have ended, by outcome."""

    __slots__ = ("_at", "_slots", "seconds")

    def __init__(self, store: Store, deployment: str, route: str) -> None:
        self._slots = store.slots
        self._at = store.record(Key(REQUESTS, (deployment, route)), len(OUTCOMES) + 1)
        self.seconds = Histogram(store, "headwater_request_seconds", deployment, route)

    def accept(self) -> None:
        """One has come."""
        self._slots[self._at + ACCEPTED_AT] += 1

    def end(self, outcome: Outcome, took_ns: int) -> None:
        """One of them has ended."""
        self._slots[self._at + _OUTCOME_AT[outcome]] += 1
        if outcome == "ok":
            self.seconds.observe(took_ns)
