"""The automaton that finds several strings in one pass over a text (Aho and Corasick 1975, doi:10.1145/360825.360855).

The library pyahocorasick doesn't report how much of a stream's end may still become a match and must be held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["StopAutomaton"]

_CODE_BITS: Final = 21
"""Number of bits of a character's code point."""


class StopAutomaton:
    """Stop strings as a trie with failure links. Immutable, so sequences and threads may share it.

    Each state is a number and stands for a beginning of a stop string; state 0 stands for the empty string. After each
    character of a text, the automaton is in the state of the longest beginning that the text ends with. The memory is
    linear in the total length of the stop strings, the time of the construction in their number times the length of the
    longest.

    Args:
        stops: the stop strings. The index of a stop string is its rank.
    """

    depth: Final[list[int]]
    """Number of characters of each state's string."""
    found: Final[list[int | None]]
    """For each state the rank of the longest stop string that a text in this state ends with; `None` without such a
    stop string."""
    open: Final[list[int]]
    """For each state the state of the longest beginning at the text's end that may still become a (longer) stop string;
    0 if there is no such beginning."""
    open_rank: Final[list[int]]
    """For each state the lowest rank of the longer stop strings that begin with it; the number of all stop strings if
    no longer stop string begins with it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._next: dict[int, int] = {}
        """The next state, by state and character."""
        self._shorter = [0]
        """The failure links: for each state the state of the longest shorter beginning that it ends with."""
        self.depth = [0]
        self.found = [None]
        self.open = [0]
        self.open_rank = [len(self.stops)]
        paths = [self._path(rank, stop) for rank, stop in enumerate(self.stops)]
        self._link(paths)

    def after(self, state: int, character: str) -> int:
        """The state after a character. Takes constant time, averaged over a text."""
        step, shorter, code = self._next, self._shorter, ord(character)
        while (next_state := step.get(state << _CODE_BITS | code)) is None:
            if not state:
                return 0
            state = shorter[state]
        return next_state

    def _path(self, rank: int, stop: str) -> list[int]:
        """Add a stop string; returns the state after each of its characters."""
        path, state = [], 0
        for character in stop:
            self.open_rank[state] = min(self.open_rank[state], rank)
            key = state << _CODE_BITS | ord(character)
            if key not in self._next:
                self._next[key] = len(self.depth)
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
                self.open_rank.append(len(self.stops))
            state = self._next[key]
            path.append(state)
        if self.found[state] is None:
            self.found[state] = rank
        return path

    def _link(self, paths: Sequence[Sequence[int]]) -> None:
        """Set the failure links, for shorter states first."""
        self._shorter.extend([0] * (len(self.depth) - 1))
        self.open.extend([0] * (len(self.depth) - 1))
        for place in range(max(map(len, paths), default=0)):
            for stop, path in zip(self.stops, paths, strict=True):
                if place < len(path):
                    before = path[place - 1] if place else 0
                    self._link_one(path[place], self.after(self._shorter[before], stop[place]) if place else 0)

    def _link_one(self, state: int, shorter: int) -> None:
        self._shorter[state] = shorter
        if self.found[state] is None:
            self.found[state] = self.found[shorter]
        self.open[state] = state if self.open_rank[state] < len(self.stops) else self.open[shorter]
