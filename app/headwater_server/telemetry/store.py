"""Numbers in a file that other processes can read at any time, and that outlives the process that counts.

A file is an array of int64 slots, mapped into memory: to count is to add to a slot, without a system call. Slot 0 holds
the number of used slots, slot 1 the process id. The records follow. Each record consists of

    the record's length in slots; the key's length in bytes; the key, padded to whole slots; the record's numbers

A key is the JSON of a series' name and its label values. Records are appended and never moved, and a record is readable
as soon as slot 0 covers it, so a killed process leaves no half-written record. Readers read slots in ascending order.

Frequent numbers may wait for the next turn of the event loop and are then written together (`Store.later`). If the
process is killed before that, only these numbers are lost.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["SeriesKey", "Snapshot", "Store", "read_store"]

logger = logging.getLogger("headwater.metrics")

SLOT_BYTES: Final = 8
SIZE_BYTES: Final = 32 * 1024 * 1024
"""Size of the mapping. Only used pages take memory and disk space."""
GROWTH_BYTES: Final = 64 * 1024
"""Disk space that is allocated at once, in advance: to write to a page for which a full disk has no space would kill
the process."""
_USED: Final = 0
_PID: Final = 1
_HEAD_SLOTS: Final = 2


class SeriesKey(NamedTuple):
    """The key of a record."""

    name: str
    """A series of `headwater_server.telemetry.catalogue`."""
    labels: tuple[str, ...]
    """The label values, in the catalogue's order."""


class Snapshot(NamedTuple):
    """The content of a store at a point in time."""

    pid: int
    """The process that counts; 0: no process has opened the file yet."""
    records: dict[SeriesKey, list[int]]


class Store:
    """The counts of a process.

    Args:
        path: the file, made by `create` or `create_in_memory`; None: the counts are in the process's private memory.
        call_soon: the event loop's ``call_soon``: numbers that may wait are then written once per turn of the loop.
            None: all numbers are written immediately.
    """

    def __init__(
        self, path: Path | None = None, *, call_soon: Callable[[Callable[[], None]], object] | None = None
    ) -> None:
        self.path = path
        self._fd = -1
        self._capacity = SIZE_BYTES // SLOT_BYTES
        if path is not None:
            self._fd = os.open(path, os.O_RDWR)
            weakref.finalize(self, os.close, self._fd)
            self._capacity = GROWTH_BYTES // SLOT_BYTES
        self.slots = memoryview(mmap.mmap(self._fd, SIZE_BYTES)).cast("q")
        self._records: dict[SeriesKey, int] = {}
        self._is_full = False
        self._call_soon = call_soon
        self._waiting: list[Callable[[], None]] = []
        self.slots[_PID] = os.getpid()
        self.slots[_USED] = _HEAD_SLOTS

    @staticmethod
    def create(path: Path) -> None:
        """Create an empty file.

        Raises:
            OSError: the file can't be created, or the disk is full.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _allocate(fd)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(fd)

    @staticmethod
    def create_in_memory(path: Path) -> int:
        """Create an empty file in memory, and a link to it at the path. The file needs no disk space.

        Returns:
            The file's descriptor. The link works until the descriptor is closed.

        Raises:
            OSError: the link can't be created.
        """
        fd = os.memfd_create("counts", os.MFD_CLOEXEC)
        try:
            _allocate(fd)
            path.symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
        except OSError:
            os.close(fd)
            raise
        return fd

    def record(self, key: SeriesKey, numbers: int) -> int:
        """The slot of a record's first number. A missing record is appended, with zeros.

        If the file is full, the returned slots belong to no record of the file.
        """
        slot = self._records.get(key)
        if slot is None:
            slot = self._append(key, numbers)
            if slot is None:
                return self._capacity - numbers
            self._records[key] = slot
        return slot

    def numbers(self, key: SeriesKey, count: int) -> list[int]:
        """The first ``count`` numbers of a record, without scheduled writes; zeros if the record doesn't exist."""
        at = self._records.get(key)
        return [0] * count if at is None else self.slots[at : at + count].tolist()

    def later(self, write: Callable[[], None]) -> None:
        """Schedule a write for the next turn of the event loop; without an event loop, write immediately."""
        if self._call_soon is None:
            write()
            return
        if not self._waiting:
            self._call_soon(self.write)
        self._waiting.append(write)

    def write(self) -> None:
        """Run all scheduled writes."""
        waiting, self._waiting = self._waiting, []
        for write in waiting:
            try:
                write()
            except Exception:  # the other writes must still happen
                logger.exception("metrics: some numbers can't be written")

    def _append(self, key: SeriesKey, numbers: int) -> int | None:
        """Append a record. Returns the slot of its first number; None: the file is full."""
        name = json.dumps([key.name, *key.labels], separators=(",", ":")).encode()
        name_slots = -(-len(name) // SLOT_BYTES)
        begin = self.slots[_USED]
        first = begin + 2 + name_slots
        if not self._has_capacity(first + numbers):
            return None
        self.slots[begin] = 2 + name_slots + numbers
        self.slots[begin + 1] = len(name)
        self.slots[begin + 2 : first] = memoryview(name.ljust(name_slots * SLOT_BYTES)).cast("q")
        self.slots[_USED] = first + numbers
        return first

    def _has_capacity(self, used: int) -> bool:
        """Whether ``used`` slots may be used; the file grows if necessary. Further slots behind them stay reserved for
        the numbers of records that no longer fit."""
        used += GROWTH_BYTES // SLOT_BYTES // 8
        if used <= self._capacity:
            return True
        if self._is_full:
            return False
        try:
            if used > len(self.slots):
                raise OSError("too many series")
            os.posix_fallocate(self._fd, 0, self._capacity * SLOT_BYTES + GROWTH_BYTES)
        except OSError as error:
            self._is_full = True
            logger.error("metrics: no space for new series, which are not counted: %s", error)
            return False
        self._capacity += GROWTH_BYTES // SLOT_BYTES
        return True

    def snapshot(self) -> Snapshot:
        """The current content, scheduled writes included."""
        self.write()
        return _snapshot(self.slots)


def _allocate(fd: int) -> None:
    os.ftruncate(fd, SIZE_BYTES)
    os.posix_fallocate(fd, 0, GROWTH_BYTES)


def read_store(path: Path) -> Snapshot:
    """Read a file, even while another process counts in it.

    Raises:
        OSError: the file doesn't exist (FileNotFoundError), or can't be read.
    """
    with open(path, "rb") as file:
        return _snapshot(memoryview(mmap.mmap(file.fileno(), SIZE_BYTES, access=mmap.ACCESS_READ)).cast("q"))


def _snapshot(slots: memoryview) -> Snapshot:
    with slots[: slots[_USED]] as part:
        numbers, raw = part.tolist(), part.tobytes()
    records: dict[SeriesKey, list[int]] = {}
    at = _HEAD_SLOTS
    while at < len(numbers):
        size, name_bytes = numbers[at], numbers[at + 1]
        begin = (at + 2) * SLOT_BYTES
        name, *labels = json.loads(raw[begin : begin + name_bytes])
        first = at + 2 - (-name_bytes // SLOT_BYTES)
        records[SeriesKey(name, tuple(labels))] = numbers[first : at + size]
        at += size
    return Snapshot(numbers[_PID] if numbers else 0, records)
