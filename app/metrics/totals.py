"""Everything that all processes counted, read from their files: nobody is asked, so nobody can be waited for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from app.metrics.catalogue import ACCEPTED, CATALOGUE, IN_FLIGHT, OUTCOMES, REQUESTS
from app.metrics.instruments import ACCEPTED_AT
from app.metrics.ledger import ENDED, STATE, SUPERVISOR, WORKER_PREFIX, Ended, StateGauges, add_up, read_message
from app.metrics.store import Key, Snapshot, read_store

__all__ = ["Totals", "merged", "read_totals"]


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


def _is_largest(key: Key) -> bool:
    return key.name != REQUESTS and CATALOGUE[key.name].merge == "max"
