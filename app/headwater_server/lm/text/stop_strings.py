"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from headwater_server.lm.text.stop_automaton import StopAutomaton

__all__ = ["Emitted", "StopFinder", "StopString", "StopStrings"]

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
"""The length is limited, because text of this length may be held back."""
StopStrings: TypeAlias = Annotated[list[StopString], Meta(max_length=16, extra={"expected": "at most 16 strings"})]
"""OpenAI allows 4."""


class Emitted(NamedTuple):
    """Text that can be sent, and the stop string that ends the text, if a stop string was found."""

    text: str
    stop: str | None


class StopFinder:
    """Ends a text at its first stop string, and holds back text that may still become a stop string. Only a single
    thread may use it at a time.

    The first stop string is the stop string that begins first, or, if several begin at the same place, the stop string
    that is listed first. This choice doesn't depend on how the text is divided into pieces. The held-back text is
    shorter than the longest stop string. The time per character depends neither on the length of the held-back text nor
    on the stop strings.

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
        """Number of characters so far."""
        self._first: tuple[int, int] | None = None
        """Begin and rank of the first complete stop string so far; None without such a stop string."""
        self._found: str | None = None
        """The stop string that has ended the text."""

    def push(self, text: str) -> Emitted:
        """Add text. Returns the text that can be sent; once a stop string is found, the rest of the text up to it.
        After that, returns no more text."""
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
        """Add text. Stop strings that end within it are ignored, but a stop string may begin within it. Returns the
        text that can be sent."""
        state = self._state
        for character in text:
            state = self._automaton.after(state, character)
        self._add(text, state)
        return self._released()

    def finish(self) -> Emitted:
        """End the text, and return the held-back text. If it contains a complete stop string, which was held back
        because a stop string that takes precedence had begun, the text ends at the complete stop string."""
        if self._found is not None:
            return Emitted("", self._found)
        return Emitted(self._held, None) if self._first is None else self._stop(*self._first)

    def _add(self, text: str, state: int) -> None:
        self._held += text
        self._read += len(text)
        self._state = state

    @property
    def _open(self) -> int:
        """Number of characters at the text's end that may be the beginning of an incomplete stop string."""
        return self._automaton.depth[self._automaton.open[self._state]]

    def _is_settled(self, begin: int, rank: int) -> bool:
        """Whether no incomplete stop string could still take precedence over this complete stop string."""
        earlier = self._read - self._open
        if earlier == begin:  # the rank decides between stop strings with the same begin
            return self._automaton.open_rank[self._automaton.open[self._state]] > rank
        return earlier > begin

    def _released(self) -> str:
        """Remove the text that can't become part of a stop string from the held-back text, and return it."""
        safe = len(self._held) - self._open
        released, self._held = self._held[:safe], self._held[safe:]
        return released

    def _stop(self, begin: int, rank: int) -> Emitted:
        self._found = self._automaton.stops[rank]
        begin -= self._read - len(self._held)
        return Emitted(self._held[: begin + len(self._found) * self._include_stop], self._found)
