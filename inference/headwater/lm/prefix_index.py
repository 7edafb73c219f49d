"""What the rows of the slot engine's cache hold, found by the prompts that begin so."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

__all__ = ["BLOCK", "NEWEST", "Chain", "PrefixIndex", "chain_of"]

BLOCK: Final = 16
"""Tokens by which prefixes are found."""

NEWEST: Final = (3, 0)
"""Greater than the value of any row."""

Chain: TypeAlias = list[bytes]
"""A digest for each whole block of a text, of everything up to the block's end: equal digests mean equal beginnings."""


def chain_of(ids: Sequence[int], scope: str) -> Chain:
    """The chain of these tokens; those of different scopes have no digest in common.

    The digests are cryptographic, so that nobody can make a prompt that takes the keys and values of another.
    """
    digest = blake2b(scope.encode(), digest_size=16)
    digest.update(b"\0")
    data = array("q", ids)
    width = BLOCK * data.itemsize
    raw = memoryview(data).cast("B")
    found = []
    for start in range(0, len(ids) // BLOCK * width, width):
        digest.update(raw[start : start + width])
        found.append(digest.digest())
    return found


@dataclass(eq=False)
class _Row:
    """What a row holds."""

    chain: Chain
    used: int
    """When it was last of use, by the index's clock."""


class PrefixIndex:
    """The rows of a cache by what they begin with: rows of sequences that run, and rows that are kept.

    It only keeps the books; its owner copies the rows.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._holders: dict[bytes, dict[int, None]] = {}
        """The rows with each digest, the one learned last at the end."""
        self._clock = 0

    def find(self, chain: Chain) -> tuple[int, int]:
        """The row with the longest beginning of this chain, and how many blocks that is; of several, the last learned.
        Without any, the number of blocks is 0."""
        blocks = 0
        while blocks < len(chain) and chain[blocks] in self._holders:
            blocks += 1
        return (next(reversed(self._holders[chain[blocks - 1]])), blocks) if blocks else (0, 0)

    def blocks(self, row: int) -> int:
        """How many blocks a row is known to hold."""
        return len(self._rows[row].chain) if row in self._rows else 0

    def learn(self, row: int, chain: Chain) -> None:
        """Note that a row now holds this and nothing else that is known."""
        self.forget(row)
        if chain:
            self._add(row, _Row(chain, 0))
            self.touch(row)

    def touch(self, row: int) -> None:
        """Note that a row was of use."""
        self._clock += 1
        self._rows[row].used = self._clock

    def forget(self, row: int) -> None:
        """Note that a row holds nothing that is known."""
        self._take(row)

    def move(self, sources: Mapping[int, int]) -> None:
        """Note that rows were moved: the source of each target. What targets held is gone unless it was moved, too."""
        moved = {target: self._take(source) for target, source in sources.items()}
        for target, row in moved.items():
            self.forget(target)
            if row is not None:
                self._add(target, row)

    def trim(self, rows: int, length: int) -> None:
        """Note that the cache has only so many rows, of so many tokens."""
        for number, row in list(self._rows.items()):
            if number >= rows:
                self.forget(number)
            elif len(row.chain) > length // BLOCK:
                row = _Row(row.chain[: length // BLOCK], row.used)
                self.forget(number)
                self._add(number, row)

    def holds_alone(self, row: int) -> bool:
        """Whether a row holds something that is known, and no other row holds all of it."""
        found = self._rows.get(row)
        return found is not None and len(self._holders[found.chain[-1]]) == 1

    def value(self, row: int) -> tuple[int, int]:
        """What is lost with a row, for comparison: what a row holds alone by when it was of use, and otherwise less."""
        found = self._rows.get(row)
        return (0, 0) if found is None else (1 + self.holds_alone(row), found.used)

    def _add(self, number: int, row: _Row) -> None:
        if row.chain:
            self._rows[number] = row
            for digest in row.chain:
                self._holders.setdefault(digest, {})[number] = None

    def _take(self, number: int) -> _Row | None:
        row = self._rows.pop(number, None)
        for digest in row.chain if row is not None else ():
            holders = self._holders[digest]
            del holders[number]
            if not holders:
                del self._holders[digest]
        return row
