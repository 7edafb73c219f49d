"""The counts of all processes of a server, kept in files that any process can read without asking another.

The folder contains

- ``worker-I.N``, one for each gateway worker, by its index and a unique number, and ``supervisor``:
  `app.telemetry.store` files;
- ``ended``: the counts of workers that ended, and their names. It is replaced as a whole before a worker's file is
  removed. A reader counts everything exactly once if it reads the workers' files first, then this one, and leaves out
  the workers that it names;
- ``state``: gauges of what the supervisor sees, replaced as a whole, so that nothing obsolete remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from app.telemetry.catalogue import ACCEPTED, ALL_SERIES, CATALOGUE, IN_FLIGHT, OUTCOMES, REQUESTS
from app.telemetry.instruments import ACCEPTED_AT
from app.telemetry.recorder import recorder
from app.telemetry.store import Key, Snapshot, Store, read_store

__all__ = [
    "ENDED",
    "STATE",
    "SUPERVISOR",
    "WORKER_PREFIX",
    "Counts",
    "Ended",
    "Ledger",
    "StateGauges",
    "Totals",
    "add_up",
    "counts_by_deployment",
    "merged",
    "read_message",
    "read_records",
    "read_totals",
]

logger = logging.getLogger("headwater.metrics")
ENDED: Final = "ended"
STATE: Final = "state"
SUPERVISOR: Final = "supervisor"
WORKER_PREFIX: Final = "worker-"
NAMES_LIMIT: Final = 1000
"""How many ended workers ``ended`` names, latest last."""
_LOST_AT: Final = OUTCOMES.index("lost")


class Ended(msgspec.Struct, frozen=True):
    """The content of ``ended``."""

    names: list[str] = []
    records: list[tuple[Key, list[int]]] = []


class StateGauges(msgspec.Struct, frozen=True):
    """The content of ``state``."""

    values: list[tuple[Key, int]] = []


def add_up(totals: dict[Key, list[int]], records: Mapping[Key, list[int]]) -> None:
    """Add records to totals."""
    for key, numbers in records.items():
        known = totals.get(key)
        totals[key] = list(numbers) if known is None else [a + b for a, b in zip(known, numbers, strict=True)]


def read_message(path: Path, kind: type[Any]) -> Any:
    """The content of a file that is replaced as a whole; the type's defaults if it doesn't exist."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()


class Ledger:
    """The supervisor's side of the files.

    Args:
        folder: created here; its parent must be closed to other users.

    Raises:
        OSError: the folder can't be created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        Store.create(folder / SUPERVISOR)
        self.store = Store(folder / SUPERVISOR)
        """The supervisor's own counts."""
        self._next = 0
        self._names: list[str] = []
        self._totals: dict[Key, list[int]] = {}
        self._unread: list[Path] = []
        """Files of ended workers that could not be booked because the disk was full."""

    def add_worker(self, index: int) -> Path:
        """Create the file for a new gateway worker with this index.

        Raises:
            OSError: the file can't be created.
        """
        path = self._folder / f"{WORKER_PREFIX}{index}.{self._next}"
        self._next += 1
        Store.create(path)
        return path

    def end_worker(self, path: Path) -> int:
        """Book the counts of a worker that has ended. Returns the number of requests lost with it."""
        self._unread.append(path)
        lost = 0
        while self._unread:
            path = self._unread[0]
            try:
                lost += self._book(path)
            except OSError as error:
                logger.error("metrics: can't book the counts of an ended worker yet: %s: %s", path, error)
                break
            self._unread.pop(0)
        return lost

    def _book(self, path: Path) -> int:
        records = {key: numbers for key, numbers in read_store(path).records.items() if _is_kept(key)}
        lost = 0
        for key, numbers in records.items():
            if key.name == REQUESTS:
                missing = numbers[ACCEPTED_AT] - sum(numbers[:ACCEPTED_AT])
                numbers[_LOST_AT] += missing
                lost += missing
        totals = dict(self._totals)
        add_up(totals, records)
        names = [*self._names, path.name][-NAMES_LIMIT:]
        self._replace(ENDED, Ended(names, list(totals.items())))
        self._names, self._totals = names, totals
        path.unlink()
        return lost

    def write_state(self, values: Mapping[Key, int]) -> None:
        """Publish what the supervisor sees."""
        try:
            self._replace(STATE, StateGauges(list(values.items())))
        except OSError as error:
            logger.error("metrics: can't write the state of deployments and replicas: %s", error)

    def _replace(self, name: str, message: msgspec.Struct) -> None:
        temporary = self._folder / f"{name}.new"
        with open(temporary, "wb", opener=_private) as file:
            file.write(msgspec.msgpack.encode(message))
        temporary.replace(self._folder / name)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_kept(key: Key) -> bool:
    """Whether a record remains valid when the process that counted it has ended."""
    return key.name == REQUESTS or ALL_SERIES[key.name].kind != "gauge"


class Totals(NamedTuple):
    """The counts of all processes of a server."""

    records: dict[Key, list[int]]
    """Counters and gauges have one number; histograms those of `app.telemetry.instruments.Histogram`."""
    pids: dict[str, int]
    """The process ids of live processes, by name."""


def read_totals(folder: Path) -> Totals:
    """Read all files of a server; the module's docstring says why everything is counted exactly once."""
    workers: dict[str, Snapshot] = {}
    for path in sorted(folder.glob(f"{WORKER_PREFIX}*")):
        with contextlib.suppress(FileNotFoundError):  # booked in the meantime
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
    """Merge the counts of several processes into the catalogue's series."""
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
    """The counts of one deployment."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[tuple[str, ...], list[int]]]] = defaultdict(list)

    def add(self, key: Key, numbers: list[int]) -> None:
        """Add a record."""
        self._found[key.name].append((key.labels[1:], numbers))

    def total(self, name: str, last: str | None = None) -> int:
        """The sum of a counter or gauge over its other labels, optionally only those whose last label is ``last``."""
        return sum(numbers[0] for labels, numbers in self._found[name] if last is None or labels[-1] == last)

    def statistics(self, name: str) -> list[tuple[str, list[int]]]:
        """The last label and the numbers of each record."""
        return [(labels[-1], numbers) for labels, numbers in self._found[name]]

    def of_replica(self, name: str, replica: str) -> int | None:
        """A gauge of one replica; None if it was not measured."""
        return next((numbers[0] for labels, numbers in self._found[name] if labels == (replica,)), None)

    def sum(self, name: str, last: str | None = None) -> tuple[int, int]:
        """The number of a histogram's values, and their sum in counted units."""
        found = [numbers for labels, numbers in self._found[name] if last is None or labels[-1] == last]
        return sum(sum(numbers[:-1]) for numbers in found), sum(numbers[-1] for numbers in found)

    def histogram(self, name: str) -> dict[str, Any]:
        """Counts by bucket, the unbounded one last, and the sum in the base unit."""
        series = CATALOGUE[name]
        totals = [0] * (len(series.bounds) + 2)
        for _, numbers in self._found[name]:
            totals = [a + b for a, b in zip(totals, numbers, strict=True)]
        return {"counts": totals[:-1], "sum": totals[-1] * series.scale}


async def read_records(folder: Path | None) -> dict[Key, list[int]]:
    """The counts of all processes, or, without a folder, of this one."""
    if folder is None:
        return merged([recorder().store.snapshot().records])
    return (await asyncio.to_thread(read_totals, folder)).records


def counts_by_deployment(records: Mapping[Key, list[int]]) -> Mapping[str, Counts]:
    """The records by deployment; empty counts for a deployment without records."""
    found: dict[str, Counts] = defaultdict(Counts)
    for key, numbers in records.items():
        if ALL_SERIES[key.name].labels[:1] == ("deployment",):
            found[key.labels[0]].add(key, numbers)
    return found


def _is_largest(key: Key) -> bool:
    return key.name != REQUESTS and ALL_SERIES[key.name].merge == "max"
