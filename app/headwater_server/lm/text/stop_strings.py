"""Finds stop strings in a text that comes in pieces."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from headwater_server.lm.text.stop_automaton import StopAutomaton

__all__ = ["Emitted", "StopFinder", "StopString", "StopStrings"]

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Bounded, because so much may be held back."""
StopStrings: TypeAlias = Annotated[list[StopString], Meta(max_length=16, extra={"expected": "at most 16 strings"})]
"""OpenAI allows 4."""


class Emitted(NamedTuple):
    """Text that can be sent, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None


class StopFinder:
    """Ends a text at its first stop string, and holds back what could still become one. One thread at a time.

    The first one is that which begins first in the whole text, or of several that begin there is listed first, however
    the text is cut into pieces. At most the length of the longest stop string less one character is held back. The work
    for a character depends neither on what is held back nor on the stop strings.

    Args:
        automaton: the stop strings.
        include_stop: whether the text includes the stop string.
    """

    def __init__(self, automaton: StopAutomaton, *, include_stop: bool = False) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._read = 0
        """Characters so far."""
        self._first: tuple[int, int] | None = None
        """Of the complete stop strings so far the first one: where it begins, and its rank."""
        self._found: str | None = None

    def push(self, text: str) -> Emitted:
        """Add text; after a stop string was found, none is sent."""
        if self._found is not None:
            return Emitted("", self._found)
        automaton, state = self._automaton, self._state
        for end, character in enumerate(text, self._read + 1):
            state = automaton.after(state, character)
            if (rank := automaton.found[state]) is not None:
                match = end - len(automaton.stops[rank]), rank
                self._first = match if self._first is None else min(self._first, match)
        self._add(text, state)
        if self._first is not None and self._is_settled(*self._first):
            return self._stop(*self._first)
        return Emitted(self._released(), None)

    def skip(self, text: str) -> str:
        """Add text in which no stop string ends, though one may begin. Returns what can be sent."""
        state = self._state
        for character in text:
            state = self._automaton.after(state, character)
        self._add(text, state)
        return self._released()

    def finish(self) -> Emitted:
        """End the text; returns what was held back, up to a stop string that the beginning of another one delayed."""
        if self._found is not None:
            return Emitted("", self._found)
        return Emitted(self._held, None) if self._first is None else self._stop(*self._first)

    def _add(self, text: str, state: int) -> None:
        self._held += text
        self._read += len(text)
        self._state = state

    @property
    def _open(self) -> int:
        """Characters at the text's end with which a stop string begins that is not complete."""
        return self._automaton.depth[self._automaton.open[self._state]]

    def _is_settled(self, begin: int, rank: int) -> bool:
        """Whether no other stop string has begun that would precede this complete one."""
        earlier = self._read - self._open
        if earlier == begin:  # then the rank decides
            return self._automaton.open_rank[self._automaton.open[self._state]] > rank
        return earlier > begin

    def _released(self) -> str:
        """Take what can't become a part of a stop string."""
        safe = len(self._held) - self._open
        released, self._held = self._held[:safe], self._held[safe:]
        return released

    def _stop(self, begin: int, rank: int) -> Emitted:
        self._found = self._automaton.stops[rank]
        begin -= self._read - len(self._held)
        return Emitted(self._held[: begin + len(self._found) * self._include_stop], self._found)
