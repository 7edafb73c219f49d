"""The order in which grammars are compiled: scopes take turns, and what takes long waits behind what doesn't."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["LANES", "CompileQueue", "Lane"]

_Item = TypeVar("_Item")


class Lane(NamedTuple):
    """Grammars that get the same processor time."""

    cpu_s: float
    """The processor time that each may take. One that takes longer is tried in the next lane, in the last it fails."""
    most_running: int


LANES: Final = Lane(0.25, 2), Lane(2.5, 1)


class CompileQueue(Generic[_Item]):
    """What waits in a lane.

    Args:
        lane: how many may run.
    """

    def __init__(self, lane: Lane) -> None:
        self._most_running = lane.most_running
        self._running = 0
        self._waiting: OrderedDict[str, deque[_Item]] = OrderedDict()
        """By scope; the first one is next."""

    def waiting(self, scope: str) -> int:
        """How many items of a scope wait."""
        return len(self._waiting.get(scope, ()))

    def add(self, scope: str, item: _Item) -> None:
        """Let an item wait."""
        self._waiting.setdefault(scope, deque()).append(item)

    def discard(self, scope: str, item: _Item) -> None:
        """Drop an item that waits."""
        items = self._waiting[scope]
        items.remove(item)
        if not items:
            del self._waiting[scope]

    def take(self) -> _Item | None:
        """The item that may run now, if there is one; call `end` when it has."""
        if self._running >= self._most_running or not self._waiting:
            return None
        scope, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[scope] = items
        self._running += 1
        return item

    def end(self) -> None:
        """Note that an item has run."""
        self._running -= 1
