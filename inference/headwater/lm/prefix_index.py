"""An index of the rows of the slot engine's cache: it finds the row that holds the beginning of a prompt."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

__all__ = ["BLOCK", "NEWEST", "Chain", "PrefixIndex", "chain_of"]

BLOCK: Final = 16
"""Tokens in a block; prefixes are found in whole blocks."""

NEWEST: Final = (3, 0)
"""Greater than the value of any row."""

Chain: TypeAlias = list[bytes]
"""A digest for each whole block of a text. It covers all tokens up to the block's end, so equal digests mean equal
prefixes."""


def chain_of(ids: Sequence[int], scope: str) -> Chain:
    """The chain of these tokens. Chains of different scopes have no digest in common.

    The digests are cryptographic, so that nobody can make a prompt that reuses the keys and values of a different
    prompt.
    """
    digest = blake2b(scope.encode(), digest_size=16)
    digest.update(b"\0")
    data = array("q", ids)
    width = BLOCK * data.itemsize
    raw = memoryview(data).cast("B")
    digests = []
    for start in range(0, len(ids) // BLOCK * width, width):
        digest.update(raw[start : start + width])
        digests.append(digest.digest())
    return digests


@dataclass(eq=False)
class _Row:
    """The content of a row."""

    chain: Chain
    used: int
    """When the row was last used, by the index's clock."""


class PrefixIndex:
    """The rows of a cache by their prefixes: rows of sequences that run, and rows that are kept.

    The index only records the rows' content; its owner copies the rows.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._holders: dict[bytes, dict[int, None]] = {}
        """The rows with each digest; the row that was learned, moved or trimmed last is at the end."""
        self._clock = 0

    def find(self, chain: Chain) -> tuple[int, int]:
        """The row with the longest prefix of this chain, and the prefix's length in blocks; of several such rows, the
        row that was learned, moved or trimmed last. If no row matches, row and length are 0."""
        blocks = 0
        while blocks < len(chain) and chain[blocks] in self._holders:
            blocks += 1
        return (next(reversed(self._holders[chain[blocks - 1]])), blocks) if blocks else (0, 0)

    def blocks(self, row: int) -> int:
        """How many blocks a row is known to hold; 0 if its content is not known."""
        return len(self._rows[row].chain) if row in self._rows else 0

    def learn(self, row: int, chain: Chain) -> None:
        """Note that a row now holds this chain, in place of any earlier content."""
        self.forget(row)
        if chain:
            self._add(row, _Row(chain, 0))
            self.touch(row)

    def touch(self, row: int) -> None:
        """Note that a row, whose content is known, was used."""
        self._clock += 1
        self._rows[row].used = self._clock

    def forget(self, row: int) -> None:
        """Note that a row's content is not known."""
        self._take(row)

    def move(self, sources: Mapping[int, int]) -> None:
        """Note that rows were moved; `sources` maps each target to its source. The targets' earlier content is gone
        unless it was moved, too."""
        moved = {target: self._take(source) for target, source in sources.items()}
        for target, row in moved.items():
            self.forget(target)
            if row is not None:
                self._add(target, row)

    def trim(self, rows: int, length: int) -> None:
        """Note that the cache now has only `rows` rows of `length` tokens."""
        for number, row in list(self._rows.items()):
            if number >= rows:
                self.forget(number)
            elif len(row.chain) > length // BLOCK:
                row = _Row(row.chain[: length // BLOCK], row.used)
                self.forget(number)
                self._add(number, row)

    def holds_alone(self, row: int) -> bool:
        """Whether a row's content is known, and no other row holds all of it."""
        content = self._rows.get(row)
        return content is not None and len(self._holders[content.chain[-1]]) == 1

    def value(self, row: int) -> tuple[int, int]:
        """The value of a row's content, for comparison: highest if no other row holds it, lowest if it is not known; at
        the same level, rows used more recently have a higher value."""
        content = self._rows.get(row)
        return (0, 0) if content is None else (1 + self.holds_alone(row), content.used)

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
