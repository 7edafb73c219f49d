"""Finds stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

__all__ = ["Emitted", "StopFinder", "StopString", "StopStrings"]

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
"""Bounded, because so much may be held back, and searched again with every piece."""
StopStrings: TypeAlias = Annotated[list[StopString], Meta(max_length=16, extra={"expected": "at most 16 strings"})]
"""OpenAI allows 4."""


class Emitted(NamedTuple):
    """Text that can be sent, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None


class StopFinder:
    """Ends a text at its first stop string, and holds back what could still become one. One thread at a time.

    The first one is that which begins first in the whole text, or of several that begin there is listed first, however
    the text is cut into pieces. At most the length of the longest stop string less one character is held back.

    Args:
        stops: the stop strings.
        include_stop: whether the text includes the stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._skipped = 0
        """Characters at the beginning of what is held in which no stop string may end."""
        self._found: str | None = None

    def push(self, text: str) -> Emitted:
        """Add text; after a stop string was found, none is sent."""
        if self._found is not None:
            return Emitted("", self._found)
        text = self._held + text
        place, rank = self._first(text)
        beginning = self._beginning(text, place, rank)
        if beginning is None and rank is not None:
            return self._stop(text, place, rank)
        safe = len(text) if beginning is None else beginning
        self._held = text[safe:]
        self._skipped = max(0, self._skipped - safe)
        return Emitted(text[:safe], None)

    def skip(self, text: str) -> str:
        """Add text in which no stop string ends, though one may begin. Returns what can be sent."""
        text = self._held + text
        beginning = self._beginning(text, len(text), None)
        safe = len(text) if beginning is None else beginning
        self._held = text[safe:]
        self._skipped = len(self._held)
        return text[:safe]

    def finish(self) -> Emitted:
        """End the text; returns what was held back, up to a stop string that the beginning of another one delayed."""
        if self._found is not None:
            return Emitted("", self._found)
        text, self._held = self._held, ""
        place, rank = self._first(text)
        return Emitted(text, None) if rank is None else self._stop(text, place, rank)

    def _first(self, text: str) -> tuple[int, int | None]:
        """The place and number of the first stop string; the text's end and None if there is none."""
        found = ((text.find(stop, max(0, self._skipped - len(stop) + 1)), n) for n, stop in enumerate(self._stops))
        return min(((place, n) for place, n in found if place >= 0), default=(len(text), None))

    def _beginning(self, text: str, place: int, rank: int | None) -> int | None:
        """The first place in unsent text where a stop string may have begun that precedes the complete one.

        Args:
            text: the unsent text.
            place, rank: what `_first` returned.
        """
        starts = []
        for n, stop in enumerate(self._stops):
            # Only where less than the stop string is left, and where it would be first; its number decides ties.
            last = place if rank is not None and n < rank else place - 1
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start <= last and not stop.startswith(text[start:]):
                start = text.find(stop[0], start + 1)
            if 0 <= start <= last:
                starts.append(start)
        return min(starts, default=None)

    def _stop(self, text: str, place: int, rank: int) -> Emitted:
        self._found = self._stops[rank]
        return Emitted(text[: place + len(self._found)] if self._include_stop else text[:place], self._found)
