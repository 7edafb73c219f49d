"""The supervisor's side: the files that processes count in, what those that ended counted, and what it sees itself.

In the folder lie

- ``worker-I.N``, one for each gateway worker, by its place and a number that no other ever had, and ``supervisor``:
  `app.metrics.store` files;
- ``ended``: what the workers that ended counted, and which these are; replaced as a whole, and only then is a
  worker's file removed. Who reads the workers' files first and this one behind them, and leaves out of the former those
  that it names, counts everything once, whenever that is;
- ``state``: gauges of what the supervisor sees, replaced as a whole: what is gone leaves nothing behind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from app.metrics.catalogue import ALL_SERIES, OUTCOMES, REQUESTS
from app.metrics.instruments import ACCEPTED_AT
from app.metrics.store import Key, Store, read_store

__all__ = ["ENDED", "STATE", "SUPERVISOR", "WORKER_PREFIX", "Ended", "Ledger", "StateGauges", "add_up", "read_message"]

logger = logging.getLogger("headwater.metrics")

ENDED: Final = "ended"
STATE: Final = "state"
SUPERVISOR: Final = "supervisor"
WORKER_PREFIX: Final = "worker-"
NAMES_LIMIT: Final = 1000
"""How many of the workers that ended last are named."""
_LOST_AT: Final = OUTCOMES.index("lost")


class Ended(msgspec.Struct, frozen=True):
    """What is in ``ended``."""

    names: list[str] = []
    records: list[tuple[Key, list[int]]] = []


class StateGauges(msgspec.Struct, frozen=True):
    """What is in ``state``."""

    values: list[tuple[Key, int]] = []


def add_up(totals: dict[Key, list[int]], records: Mapping[Key, list[int]]) -> None:
    """Add records to totals."""
    for key, numbers in records.items():
        known = totals.get(key)
        totals[key] = list(numbers) if known is None else [a + b for a, b in zip(known, numbers, strict=True)]


def read_message(path: Path, kind: type[Any]) -> Any:
    """What a file that is replaced as a whole says; what its type has by default, if it isn't there."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()


class Ledger:
    """Has the files.

    Args:
        folder: to be made; nobody else may look into its parent.

    Raises:
        OSError: it can't be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700)
        Store.create(folder / SUPERVISOR)
        self.store = Store(folder / SUPERVISOR)
        """Where the supervisor counts."""
        self._next = 0
        self._names: list[str] = []
        self._totals: dict[Key, list[int]] = {}
        self._unread: list[Path] = []
        """Of workers that ended: files that the disk had no room to book."""

    def add_worker(self, index: int) -> Path:
        """Make the file for another gateway worker, in this place.

        Raises:
            OSError: it can't be made.
        """
        path = self._folder / f"{WORKER_PREFIX}{index}.{self._next}"
        self._next += 1
        Store.create(path)
        return path

    def end_worker(self, path: Path) -> int:
        """Book what a worker counted that has ended. Returns how many requests were lost with it."""
        self._unread.append(path)
        lost = 0
        while self._unread:
            path = self._unread[0]
            try:
                lost += self._book(path)
            except OSError as error:
                logger.error("metrics: what a worker counted can't be booked yet: %s: %s", path, error)
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
        """Say what the supervisor sees."""
        try:
            self._replace(STATE, StateGauges(list(values.items())))
        except OSError as error:
            logger.error("metrics: the state of deployments and replicas can't be written: %s", error)

    def _replace(self, name: str, message: msgspec.Struct) -> None:
        temporary = self._folder / f"{name}.new"
        with open(temporary, "wb", opener=_private) as file:
            file.write(msgspec.msgpack.encode(message))
        temporary.replace(self._folder / name)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _is_kept(key: Key) -> bool:
    """Whether it still holds when who counted it has ended."""
    return key.name == REQUESTS or ALL_SERIES[key.name].kind != "gauge"
