"""The order in which grammars are compiled: requests' cache scopes take turns; slow grammars move to another lane."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["LANES", "CompileQueue", "Lane"]

_Item = TypeVar("_Item")


class Lane(NamedTuple):
    """A lane: grammars with the same limit of processor time."""

    cpu_s: float
    """Limit of processor time for each grammar, in seconds. A grammar that exceeds it is tried again in the next lane,
    or fails in the last lane."""
    most_running: int
    """The most grammars of the lane that are compiled at once."""


LANES: Final = Lane(0.25, 2), Lane(2.5, 1)


class CompileQueue(Generic[_Item]):
    """The waiting items of a lane, and the number of its running items.

    Args:
        lane: the lane, which says how many items may run.
    """

    def __init__(self, lane: Lane) -> None:
        self._most_running = lane.most_running
        self._running = 0
        self._waiting: OrderedDict[str, deque[_Item]] = OrderedDict()
        """Waiting items by scope; the first scope is next."""

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
        """Take the item that may run now; None if no item waits, or the lane is busy. Call `end` when the item has
        run."""
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
