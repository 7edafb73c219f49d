"""Everything that all processes counted, read from their files: nobody is asked, so nobody can be waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.metrics.catalogue import ACCEPTED, ALL_SERIES, CATALOGUE, IN_FLIGHT, OUTCOMES, REQUESTS
from app.metrics.instruments import ACCEPTED_AT
from app.metrics.ledger import ENDED, STATE, SUPERVISOR, WORKER_PREFIX, Ended, StateGauges, add_up, read_message
from app.metrics.recorder import recorder
from app.metrics.store import Key, Snapshot, read_store

__all__ = ["Counts", "Totals", "counts_by_deployment", "merged", "read_records", "read_totals"]


class Totals(NamedTuple):
    """What there is to say."""

    records: dict[Key, list[int]]
    """Counters and gauges have one number; histograms those of `app.metrics.instruments.Histogram`."""
    pids: dict[str, int]
    """Processes that count, by name."""


def read_totals(folder: Path) -> Totals:
    """Read all files of a server; see `app.metrics.ledger` for why it counts everything once."""
    workers: dict[str, Snapshot] = {}
    for path in sorted(folder.glob(f"{WORKER_PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):  # booked meanwhile
            workers[path.name] = read_store(path)
    ended = read_message(folder / ENDED, Ended)
    for name in ended.names:
        workers.pop(name, None)
    supervisor = read_store(folder / SUPERVISOR)
    records = merged([*(one.records for one in workers.values()), dict(ended.records), supervisor.records])
    for key, value in read_message(folder / STATE, StateGauges).values:
        records[key] = [value]
    pids = {name.partition(".")[0]: one.pid for name, one in workers.items() if one.pid}
    return Totals(records, {SUPERVISOR: supervisor.pid, **pids})


def merged(parts: Iterable[dict[Key, list[int]]]) -> dict[Key, list[int]]:
    """What several processes counted, in the catalogue's series."""
    totals: dict[Key, list[int]] = {}
    for records in parts:
        largest = {key: numbers for key, numbers in records.items() if _is_largest(key)}
        for key, numbers in largest.items():
            totals[key] = [max(numbers[0], totals.get(key, numbers)[0])]
        add_up(totals, {key: numbers for key, numbers in records.items() if key not in largest})
    for key in [key for key in totals if key.name == REQUESTS]:
        numbers = totals.pop(key)
        accepted = numbers[ACCEPTED_AT]
        totals[Key(ACCEPTED, key.labels)] = [accepted]
        totals[Key(IN_FLIGHT, key.labels)] = [accepted - sum(numbers[:ACCEPTED_AT])]
        for outcome, count in zip(OUTCOMES, numbers, strict=False):
            totals[Key(REQUESTS, (*key.labels, outcome))] = [count]
    return totals


class Counts:
    """What was counted of one deployment."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[tuple[str, ...], list[int]]]] = defaultdict(list)

    def add(self, key: Key, numbers: list[int]) -> None:
        """Take in a record."""
        self._found[key.name].append((key.labels[1:], numbers))

    def total(self, name: str, last: str | None = None) -> int:
        """A counter's or gauge's sum over its other labels, the last of which may be given."""
        return sum(numbers[0] for labels, numbers in self._found[name] if last is None or labels[-1] == last)

    def statistics(self, name: str) -> list[tuple[str, list[int]]]:
        """Of each record: its last label and its numbers."""
        return [(labels[-1], numbers) for labels, numbers in self._found[name]]

    def of_replica(self, name: str, replica: str) -> int | None:
        """A gauge of one replica; None if nobody measured it."""
        return next((numbers[0] for labels, numbers in self._found[name] if labels == (replica,)), None)

    def sum(self, name: str, last: str | None = None) -> tuple[int, int]:
        """How many numbers a histogram has, and their sum, as they were counted."""
        found = [numbers for labels, numbers in self._found[name] if last is None or labels[-1] == last]
        return sum(sum(numbers[:-1]) for numbers in found), sum(numbers[-1] for numbers in found)

    def histogram(self, name: str) -> dict[str, Any]:
        """Counts by bucket, the one without bound last, and the sum in the base unit."""
        series = CATALOGUE[name]
        totals = [0] * (len(series.bounds) + 2)
        for _, numbers in self._found[name]:
            totals = [a + b for a, b in zip(totals, numbers, strict=True)]
        return {"counts": totals[:-1], "sum": totals[-1] * series.scale}


async def read_records(folder: Path | None) -> dict[Key, list[int]]:
    """What all processes counted, or, without a folder, this one."""
    if folder is None:
        return merged([recorder().snapshot().records])
    return (await asyncio.to_thread(read_totals, folder)).records


def counts_by_deployment(records: Mapping[Key, list[int]]) -> Mapping[str, Counts]:
    """The records of each deployment; of one that has none, empty counts."""
    found: dict[str, Counts] = defaultdict(Counts)
    for key, numbers in records.items():
        if ALL_SERIES[key.name].labels[:1] == ("deployment",):
            found[key.labels[0]].add(key, numbers)
    return found


def _is_largest(key: Key) -> bool:
    return key.name != REQUESTS and ALL_SERIES[key.name].merge == "max"
