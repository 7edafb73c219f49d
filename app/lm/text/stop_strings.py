"""Stop strings in a text that comes piece by piece, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

__all__ = ["Emitted", "StopFinder", "StopString", "StopStrings"]

StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
"""As long as what may be held back, and looked through again with every piece."""
StopStrings: TypeAlias = Annotated[list[StopString], Meta(max_length=16, extra={"expected": "at most 16 strings"})]
"""OpenAI allows 4."""


class Emitted(NamedTuple):
    """What can be sent, and why the text ends there."""

    text: str
    stop: str | None
    """The stop string that was found; None: none so far."""


class StopFinder:
    """Ends a text at its first stop string, and holds back what could still become one. One thread at a time.

    First is the stop string that begins first in the whole text, and of several that begin there the one that is listed
    first; so where the pieces are cut doesn't matter. At most the longest stop string less one character is held back.

    Args:
        stops: the stop strings.
        include_stop: send the stop string, too.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> Emitted:
        """More of the text; after the stop string was found, nothing of it is sent."""
        if self._found is not None or not self._stops:
            return Emitted("" if self._found is not None else text, self._found)
        text = self._held + text
        place, rank = self._first(text)
        beginning = self._beginning(text, place, rank)
        if beginning is None and rank is not None:
            return self._stop(text, place, rank)
        safe = len(text) if beginning is None else beginning
        self._held = text[safe:]
        return Emitted(text[:safe], None)

    def finish(self) -> Emitted:
        """The text is over: what was held back, up to a stop string that an earlier, unfinished one kept waiting."""
        if self._found is not None:
            return Emitted("", self._found)
        text, self._held = self._held, ""
        place, rank = self._first(text)
        return Emitted(text, None) if rank is None else self._stop(text, place, rank)

    def _first(self, text: str) -> tuple[int, int | None]:
        """Where the first stop string begins, and its number; the text's end and None if there is none."""
        found = ((text.find(stop), n) for n, stop in enumerate(self._stops))
        return min(((place, n) for place, n in found if place >= 0), default=(len(text), None))

    def _beginning(self, text: str, place: int, rank: int | None) -> int | None:
        """Where the text's rest begins that could become a stop string that comes before the one found.

        Args:
            text: all that isn't sent yet.
            place, rank: where the stop string begins that is complete, and its number; the end and None without one.
        """
        starts = []
        for n, stop in enumerate(self._stops):
            # Only a rest that is shorter than the stop string, and where it would be first: on a tie by its number.
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
