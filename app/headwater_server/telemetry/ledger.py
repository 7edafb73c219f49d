"""The counts of a server's supervisor and gateway workers, in files that each of these processes can read without
asking another process.

The folder contains

- ``worker-I.N`` for each gateway worker, with its index I and a unique number N, and ``supervisor``: files of
  `headwater_server.telemetry.store`. If a worker starts while the disk is full, its file is a link to a file in memory;
- ``ended``: the counts of ended workers and of a removed ``supervisor``, and the latest workers' names. This file is
  replaced as a whole before a worker's file is removed. A reader counts everything exactly once if it reads the
  workers' files first, then ``ended``, and ignores the files of workers that ``ended`` names;
- ``state``: the supervisor's gauges. This file is replaced as a whole, so that it has no obsolete gauges.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import operator
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from headwater_server.telemetry.catalogue import ACCEPTED, ALL_SERIES, CATALOGUE, IN_FLIGHT, OUTCOMES, REQUESTS
from headwater_server.telemetry.instruments import ACCEPTED_AT
from headwater_server.telemetry.recorder import recorder
from headwater_server.telemetry.store import SeriesKey, Snapshot, Store, read_store

__all__ = ["Counts", "Ledger", "Totals", "counts_by_deployment", "merged", "read_records", "read_totals", "together"]

logger = logging.getLogger("headwater.metrics")
_ENDED: Final = "ended"
_STATE: Final = "state"
_SUPERVISOR: Final = "supervisor"
_WORKER_PREFIX: Final = "worker-"
_NAMES_LIMIT: Final = 1000
"""The most names of ended workers in ``ended``. The latest name is the last."""

Records = dict[SeriesKey, list[int]]
Content = TypeVar("Content")


class _Ended(msgspec.Struct):
    """The content of ``ended``."""

    names: list[str] = []
    records: Records = {}


class Ledger:
    """Creates and updates the files, for the supervisor.

    Args:
        folder: the folder, which is created here. Other users must not have access to its parent.

    Raises:
        OSError: the folder can't be created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        Store.create(folder / _SUPERVISOR)
        self.store = Store(folder / _SUPERVISOR)
        """The supervisor's counts."""
        self._next = 0
        self._ended = _Ended()
        self._in_memory: dict[Path, int] = {}
        """Descriptors of the workers' files in memory, by path."""
        self._unread: list[Path] = []
        """Files of ended workers whose counts are not yet in ``ended``."""

    @property
    def is_damaged(self) -> bool:
        """Whether the supervisor's file was removed."""
        return not (self._folder / _SUPERVISOR).exists()

    def restore(self) -> None:
        """Write ``ended`` again, and ``supervisor`` if this file was removed: then the supervisor's counts so far go
        into ``ended``.

        Raises:
            OSError: a file can't be created; `is_damaged` doesn't change then.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if not self.is_damaged:
            self._replace(_ENDED, self._ended)
            return
        ended = _Ended(self._ended.names, _added_up([self._ended.records, self.store.snapshot().records]))
        self._replace(_ENDED, ended)
        Store.create(self._folder / _SUPERVISOR)
        self.store = Store(self._folder / _SUPERVISOR)
        self._ended = ended

    def add_worker(self, index: int) -> Path:
        """Create the file for a new gateway worker with this index, in memory if the disk is full.

        Raises:
            OSError: the file can't be created.
        """
        path = self._folder / f"{_WORKER_PREFIX}{index}.{self._next}"
        self._next += 1
        try:
            Store.create(path)
        except OSError as error:
            logger.warning("metrics: a worker counts in memory: %s: %s", path, error.strerror)
            self._in_memory[path] = Store.create_in_memory(path)
        return path

    def end_worker(self, path: Path) -> int:
        """Move the counts of an ended worker to ``ended``. If that is impossible now, the next call tries it again.

        Returns:
            The number of requests in flight in the workers whose counts were moved. These requests are lost.
        """
        self._unread.append(path)
        lost = 0
        try:
            while self._unread:
                booked = self._unread[0]
                try:
                    lost += self._book(booked)
                except FileNotFoundError:
                    logger.error("metrics: %s was removed, and the worker's counts with it", booked)
                del self._unread[0]
                if (fd := self._in_memory.pop(booked, None)) is not None:
                    os.close(fd)
        except OSError as error:
            logger.error("metrics: can't book the counts of an ended worker yet: %s: %s", self._unread[0], error)
        return lost

    def _book(self, path: Path) -> int:
        # A gauge is no longer valid when the process that set it has ended.
        records = {k: numbers for k, numbers in read_store(path).records.items() if ALL_SERIES[k.name].kind != "gauge"}
        lost = 0
        for key, numbers in records.items():
            if key.name == REQUESTS:
                missing = numbers[ACCEPTED_AT] - sum(numbers[:ACCEPTED_AT])
                numbers[OUTCOMES.index("lost")] += missing
                lost += missing
        ended = _Ended([*self._ended.names, path.name][-_NAMES_LIMIT:], _added_up([self._ended.records, records]))
        self._replace(_ENDED, ended)
        self._ended = ended
        path.unlink()
        return lost

    def write_state(self, values: Mapping[SeriesKey, int]) -> None:
        """Publish the supervisor's gauges in ``state``; if that is impossible, log an error."""
        try:
            self._replace(_STATE, values)
        except OSError as error:
            logger.error("metrics: can't write the state of deployments and replicas: %s", error)

    def _replace(self, name: str, content: object) -> None:
        temporary = self._folder / f"{name}.new"
        with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(msgspec.msgpack.encode(content))
        temporary.replace(self._folder / name)


class Totals(NamedTuple):
    """The counts of all files of a server together."""

    records: Records
    """The records by key. A counter or gauge of `CATALOGUE` has a single number; for the numbers of a histogram see
    `headwater_server.telemetry.instruments.Histogram`."""
    pids: dict[str, int]
    """Process ids by name: ``supervisor`` (0 if its file is missing), and ``worker-I`` for the gateway worker with
    index I."""


def read_totals(folder: Path) -> Totals:
    """Read all files of a server. The module's docstring says why everything is counted exactly once."""
    workers: dict[str, Snapshot] = {}
    # Of the workers with an index the latest is the last: its number is the highest, so its name may be longer.
    for path in sorted(folder.glob(f"{_WORKER_PREFIX}*"), key=lambda path: (len(path.name), path.name)):
        with contextlib.suppress(FileNotFoundError):  # its counts were moved to ``ended`` in the meantime
            workers[path.name] = read_store(path)
    ended = _read_message(folder / _ENDED, _Ended)
    for name in ended.names:
        workers.pop(name, None)
    try:
        supervisor = read_store(folder / _SUPERVISOR)
    except FileNotFoundError:  # a user removed the file; the supervisor creates it again
        supervisor = Snapshot(0, {})
    records = merged([*(worker.records for worker in workers.values()), ended.records, supervisor.records])
    for key, value in _read_message(folder / _STATE, dict[SeriesKey, int]).items():
        records[key] = [value]
    pids = {name.partition(".")[0]: worker.pid for name, worker in workers.items() if worker.pid}
    return Totals(records, {_SUPERVISOR: supervisor.pid, **pids})


def _read_message(path: Path, kind: type[Content]) -> Content:
    """The content of a file that is replaced as a whole; an empty value of the type if the file doesn't exist."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()


def merged(parts: Iterable[Records]) -> Records:
    """Combine the records of several processes. Records of `headwater_server.telemetry.instruments.Requests` become
    records of the catalogue's series `ACCEPTED`, `IN_FLIGHT` and `REQUESTS`."""
    totals = _added_up(parts)
    for key in [key for key in totals if key.name == REQUESTS]:
        numbers = totals.pop(key)
        accepted = numbers[ACCEPTED_AT]
        totals[SeriesKey(ACCEPTED, key.labels)] = [accepted]
        totals[SeriesKey(IN_FLIGHT, key.labels)] = [accepted - sum(numbers[:ACCEPTED_AT])]
        for outcome, count in zip(OUTCOMES, numbers, strict=False):
            totals[SeriesKey(REQUESTS, (*key.labels, outcome))] = [count]
    return totals


def _added_up(parts: Iterable[Records]) -> Records:
    totals: Records = {}
    for records in parts:
        for key, numbers in records.items():
            combine = max if ALL_SERIES[key.name].merge == "max" else operator.add
            total = totals.get(key)
            totals[key] = numbers if total is None else [combine(a, b) for a, b in zip(total, numbers, strict=True)]
    return totals


class Counts:
    """The records of a deployment: by series, the labels after the deployment and the numbers."""

    def __init__(self) -> None:
        self._records: dict[str, list[tuple[tuple[str, ...], list[int]]]] = defaultdict(list)

    def add(self, key: SeriesKey, numbers: list[int]) -> None:
        """Add a record."""
        self._records[key.name].append((key.labels[1:], numbers))

    def include(self, counts: Counts) -> None:
        """Add the records of another deployment."""
        for name, records in counts._records.items():
            self._records[name] += records

    def _numbers(self, name: str, last: str | None) -> list[list[int]]:
        return [numbers for labels, numbers in self._records[name] if last is None or labels[-1] == last]

    def total(self, name: str, last: str | None = None) -> int:
        """The sum of a counter's or gauge's records; with ``last``, only of records with this last label."""
        return sum(numbers[0] for numbers in self._numbers(name, last))

    def sum(self, name: str, last: str | None = None) -> tuple[int, int]:
        """The number of a histogram's values, and their sum in stored units, such as nanoseconds; with ``last``, only
        of records with this last label."""
        records = self._numbers(name, last)
        return sum(sum(numbers[:-1]) for numbers in records), sum(numbers[-1] for numbers in records)

    def histogram(self, name: str) -> dict[str, Any]:
        """A histogram over all records: ``counts``, the number of values in each bucket, with the unbounded bucket at
        the end, and ``sum``, in the unit of ``/metrics``."""
        series = CATALOGUE[name]
        columns = zip([0] * (len(series.bounds) + 2), *self._numbers(name, None), strict=True)
        *counts, total = map(sum, columns)
        return {"counts": counts, "sum": total * series.scale}

    def statistics(self, name: str) -> list[tuple[str, list[int]]]:
        """The last label and the numbers of each record of a series, such as the records of
        `headwater_server.telemetry.instruments.Statistics`."""
        return [(labels[-1], numbers) for labels, numbers in self._records[name]]

    def of_replica(self, name: str, replica: str) -> int | None:
        """The value of a replica's gauge; None if it was not measured."""
        return next((numbers[0] for labels, numbers in self._records[name] if labels == (replica,)), None)


def together(parts: Iterable[Counts]) -> Counts:
    """The combined counts of several deployments, as if they were a single deployment."""
    total = Counts()
    for part in parts:
        total.include(part)
    return total


async def read_records(folder: Path | None) -> Records:
    """The counts in a server's folder; ``folder`` None: the counts of this process only."""
    if folder is None:
        return merged([recorder().store.snapshot().records])
    return (await asyncio.to_thread(read_totals, folder)).records


def counts_by_deployment(records: Mapping[SeriesKey, list[int]]) -> Mapping[str, Counts]:
    """The records by deployment; series without the label ``deployment`` are left out. A deployment without records has
    empty counts."""
    counts: dict[str, Counts] = defaultdict(Counts)
    for key, numbers in records.items():
        if ALL_SERIES[key.name].labels[:1] == ("deployment",):
            counts[key.labels[0]].add(key, numbers)
    return counts
