"""A model's counts in a file that other processes can read at any time, and that outlives the process that counts.

The file is an array of slots of 8 bytes, mapped into memory. Slot 0 holds the number of used slots (int64). Records
follow. Each record consists of

    the record's length in slots and the key's length in bytes (int64); the key, padded to whole slots; float64 numbers

A key is JSON. The first record's key is the deployment's name, a text. A record of a `Declaration` has an object as its
key, and no numbers. A record of a series has an array, the metric's name and the label values. Records are appended and
never moved, and a record is readable as soon as slot 0 covers it, so a killed process leaves no half-written record.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

__all__ = ["SIZE_SLOTS", "CountsFile", "Declaration", "FileCounts", "Kind", "decode_counts", "used_bytes"]

SLOT_BYTES: Final = 8
SIZE_SLOTS: Final = 1024 * 1024
"""Size of the mapping. Only used pages take memory and disk space."""
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


class Declaration(msgspec.Struct, frozen=True):
    """A declared metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    """The names of the labels, sorted."""
    bounds: tuple[float, ...] = ()
    """A histogram's inclusive upper bounds; the last bucket has no bound."""

    @property
    def numbers(self) -> int:
        """The number of a series' numbers: a value; or the values in each bucket, not added up, and their sum."""
        return len(self.bounds) + 2 if self.kind == "histogram" else 1


class FileCounts(NamedTuple):
    """The content of a file."""

    deployment: str
    series: list[tuple[Declaration, tuple[str, ...], list[float]]]
    """The declaration, label values and numbers of each series."""


class CountsFile:
    """A file that is written.

    Args:
        path: the file, which is created here; None: the counts are in the process's private memory.
        deployment: the deployment's name.

    Raises:
        OSError: the file can't be created, or the disk is full.
    """

    def __init__(self, path: Path | None, deployment: str = "") -> None:
        self._fd = -1
        if path is not None:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, SIZE_SLOTS * SLOT_BYTES)
            os.posix_fallocate(self._fd, 0, SLOT_BYTES)
        memory = memoryview(mmap.mmap(self._fd, SIZE_SLOTS * SLOT_BYTES))
        self._slots = memory.cast("q")
        self.numbers = memory.cast("d")
        """The slots as numbers."""
        self._slots[0] = 1
        self.append(deployment, 0)

    def append(self, key: object, numbers: int) -> int | None:
        """Append a record with zeros. Returns the slot of its first number; None: there is no space."""
        raw = msgspec.json.encode(key)
        key_slots = -(-len(raw) // SLOT_BYTES)
        begin = self._slots[0]
        first = begin + 2 + key_slots
        end = first + numbers
        try:
            if end > SIZE_SLOTS:
                return None
            if self._fd >= 0:  # to write to a page for which a full disk has no space would kill the process
                os.posix_fallocate(self._fd, begin * SLOT_BYTES, (end - begin) * SLOT_BYTES)
        except OSError:
            return None
        self._slots[begin] = 2 + key_slots + numbers
        self._slots[begin + 1] = len(raw)
        self._slots[begin + 2 : first] = memoryview(raw.ljust(key_slots * SLOT_BYTES)).cast("q")
        self._slots[0] = end
        return first


def used_bytes(path: Path) -> bytes:
    """The used part of a file, even while another process counts in it; empty if the file has no content yet.

    Raises:
        OSError: the file doesn't exist (FileNotFoundError), or can't be read.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return bytes(memory[: memory.cast("q")[0] * SLOT_BYTES])


def decode_counts(raw: bytes) -> FileCounts:
    """Decode a file's used part."""
    slots, numbers = memoryview(raw).cast("q"), memoryview(raw).cast("d")
    deployment = ""
    declared: dict[str, Declaration] = {}
    series: list[tuple[Declaration, tuple[str, ...], list[float]]] = []
    at = 1
    while at < len(slots):
        begin = (at + 2) * SLOT_BYTES
        key = raw[begin : begin + slots[at + 1]]
        if key.startswith(b"["):
            name, *values = msgspec.json.decode(key, type=list[str])
            declaration = declared[name]
            end = at + slots[at]
            series.append((declaration, tuple(values), list(numbers[end - declaration.numbers : end])))
        elif key.startswith(b"{"):
            declaration = msgspec.json.decode(key, type=Declaration)
            declared[declaration.name] = declaration
        else:
            deployment = msgspec.json.decode(key, type=str)
        at += slots[at]
    return FileCounts(deployment, series)
