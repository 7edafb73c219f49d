"""The batching policy's queue: which rows go together, and which go next. No clock and no event loop of its own.

Between priority classes the order is that of start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with rows
in place of bits: each class has a virtual time, which rows divided by the class's weight move on; the class whose is
the earliest goes next; one that had nothing waiting comes in at the present virtual time, so that it has saved up
nothing. Within a class the order is that of arrival.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any

__all__ = ["DEFAULT_PRIORITY", "DEFAULT_WEIGHTS", "LAST_PRIORITY", "BatchQueue", "Item", "Waiting"]

DEFAULT_PRIORITY = 5
LAST_PRIORITY = 10
DEFAULT_WEIGHTS: Mapping[int, int] = MappingProxyType(
    {priority: 2 ** (LAST_PRIORITY - priority) for priority in range(1, LAST_PRIORITY + 1)}
)
"""Each priority weighs twice as much as the next."""
REMOVED_LIMIT = 16


class Item:
    """Rows of one request that travel together.

    Args:
        key: rows may share a batch only if their keys are equal.
        rows: how many; at most the queue's ``max_batch_size``.
        held_bytes: of all its rows' data, which stay in memory while they wait.
        arrived_s: when, on any steady clock.
        priority: 1 is the most urgent; 0 stands for the default.
        payload: what the caller wants back.
    """

    __slots__ = ("alive", "arrived_s", "held_bytes", "key", "payload", "place", "priority", "rows")

    def __init__(
        self,
        key: Hashable,
        rows: int,
        *,
        arrived_s: float,
        priority: int,
        payload: Any,
        held_bytes: int = 0,
    ) -> None:
        self.key = key
        self.rows = rows
        self.held_bytes = held_bytes
        self.arrived_s = arrived_s
        self.priority = min(priority or DEFAULT_PRIORITY, LAST_PRIORITY)
        self.payload = payload
        self.place = -1
        """In the order of arrival, once it has been pushed."""
        self.alive = False
        """Waiting: pushed, and neither taken nor removed."""


class Waiting:
    """How much waits, in several queues together."""

    __slots__ = ("held_bytes", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.held_bytes = 0


class _PriorityClass:
    """What waits of one class.

    ``next_start`` is the virtual time at which its next rows start. ``start`` is that of its first item, and stays
    while others of the class are taken before that, as company of another class's rows.
    """

    __slots__ = ("arrivals", "cost", "next_start", "priority", "rows", "start", "weight")

    def __init__(self, priority: int, weight: int) -> None:
        self.priority = priority
        self.weight = weight
        self.cost = 1 / weight
        """Of a row, in virtual time."""
        self.rows = 0
        self.start = 0.0
        self.next_start = 0.0
        self.arrivals: deque[Item] = deque()
        """In order; some of them don't wait any more."""

    def pass_over(self) -> None:
        """Drop what is first but doesn't wait any more."""
        arrivals = self.arrivals
        while arrivals and not arrivals[0].alive:
            arrivals.popleft()
            self.start = self.next_start


class _Lane:
    """What waits of one key, by class; some of it doesn't wait any more."""

    __slots__ = ("queues", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.queues: dict[_PriorityClass, deque[Item]] = {}


_start = attrgetter("start")
_priority = attrgetter("priority")
_place = attrgetter("place")


class BatchQueue:
    """Rows waiting for one deployment.

    Invariants: an item comes out at most once, and not after it was removed; a batch has one key and at most
    ``max_batch_size`` rows; the item that is first in order is in the next batch, so none waits for ever. Classes that
    always have something waiting get rows in proportion to their weights, as far as keys allow.

    How long one waits: the batches before its own each begin with an item that stands before it, and take what is next
    of that item's key, never a younger one in the place of an older one. So where p items of a row each stand before
    it, of k keys, it comes out within p / max_batch_size + k + 1 batches, whatever comes after it.

    Args:
        max_batch_size: rows of a batch.
        weights: by priority; others belong to the class of the next less urgent one that is named, or to the last.
        total: also counts what waits here.
    """

    def __init__(
        self, max_batch_size: int, weights: Mapping[int, int] = DEFAULT_WEIGHTS, total: Waiting | None = None
    ) -> None:
        self.max_batch_size = max_batch_size
        self.weights = weights
        self.rows = 0
        """Rows waiting."""
        self.held_bytes = 0
        """Theirs."""
        self._total = total or Waiting()
        self._classes = _classes(weights)
        """By priority."""
        self._active: list[_PriorityClass] = []
        """Those of which something waits, the most urgent first."""
        self._lanes: dict[Hashable, _Lane] = {}
        self._spare: _Lane | None = None
        """An empty one, to be used again: at low load every request would make one."""
        self._virtual = 0.0
        """The present virtual time: the earliest start of what waits; while nothing does, the latest there was."""
        self._latest = 0.0
        self._items = 0
        """Items waiting."""
        self._removed = 0
        """Removed since the last compaction."""
        self._arrivals = itertools.count()

    def push(self, item: Item) -> None:
        """Add an item; one that was taken may come back, and keeps its place in the order."""
        one = self._classes[item.priority]
        lane = self._lanes.get(item.key)
        if lane is None:
            lane = self._lanes[item.key] = self._spare or _Lane()
            self._spare = None
        queue = lane.queues.get(one)
        if queue is None:
            queue = lane.queues[one] = deque()
        item.alive = True
        rows = item.rows
        if not one.rows:
            if one.next_start < self._virtual:
                one.next_start = self._virtual
            one.start = one.next_start
            self._active.append(one)
            if len(self._active) > 1:
                self._active.sort(key=_priority)
        if item.place < 0:
            item.place = next(self._arrivals)
            queue.append(item)
            one.arrivals.append(item)
        else:
            one.next_start -= rows * one.cost
            one.start = min(one.start, one.next_start)
            _put_back(queue, item)
            _put_back(one.arrivals, item)
        one.rows += rows
        lane.rows += rows
        self._count(rows, item.held_bytes, 1)

    def remove(self, item: Item) -> bool:
        """Take an item out because it expired, was cancelled or gave way. Returns whether it was still waiting."""
        if not item.alive:
            return False
        item.alive = False
        self._leave(item.key, self._lanes[item.key], item.rows)
        one = self._classes[item.priority]
        while one.arrivals and not one.arrivals[-1].alive:
            one.arrivals.pop()
        self._take_from(one, item.rows)
        self._count(-item.rows, -item.held_bytes, -1)
        self._removed += 1
        # What was removed keeps its rows in memory until it is reached in its lane, which a busy replica may delay
        # without end: clear it out before it outweighs what waits.
        if self._removed > REMOVED_LIMIT and self._removed > self._items:
            self._compact()
        return True

    def pop(self) -> list[Item]:
        """Take out the next batch: the first item in order, and others that may share its batch."""
        active = self._active
        if not active:
            return []
        alone = len(active) == 1
        one = active[0] if alone else min(active, key=_start)
        arrivals = one.arrivals
        if not arrivals[0].alive:
            one.pass_over()
        first = arrivals[0]
        lane = self._lanes[first.key]
        classes = active if alone else [other for other in active if other in lane.queues]
        rows = held_bytes = 0
        if len(classes) == 1:
            batch = self._take_next(lane.queues[one])
            for item in batch:
                rows += item.rows
                held_bytes += item.held_bytes
            one.next_start += rows * one.cost
            self._take_from(one, rows)
            one.pass_over()
        else:
            batch = self._take_in_turn(lane, classes, one)
            for item in batch:
                rows += item.rows
                held_bytes += item.held_bytes
                other = self._classes[item.priority]
                other.next_start += item.rows * other.cost
                self._take_from(other, item.rows)
            for other in classes:
                other.pass_over()
                # What went before its turn filled room that nobody else had a use for: beyond a batch of it is free, or
                # the first of the class would wait without end while others of it go along with another class's.
                other.next_start = min(other.next_start, other.start + self.max_batch_size * other.cost)
        self._leave(first.key, lane, rows)
        self._count(-rows, -held_bytes, -len(batch))
        if active:
            now = active[0].start if len(active) == 1 else min(active, key=_start).start
            if now > self._virtual:
                self._virtual = now
        return batch

    def drain(self) -> list[Item]:
        """Take out everything."""
        items = sorted((item for one in self._active for item in one.arrivals if item.alive), key=_place)
        for item in items:
            item.alive = False
        for one in self._active:
            one.arrivals.clear()
            one.rows = 0
            self._latest = max(self._latest, one.next_start)
        self._active.clear()
        self._lanes.clear()
        self._count(-self.rows, -self.held_bytes, -self._items)
        self._virtual = self._latest
        return items

    def reweigh(self, weights: Mapping[int, int]) -> None:
        """Have other classes, or other weights; what waits keeps its place within its class."""
        items = self.drain()
        self.weights = weights
        self._classes = _classes(weights)
        self._virtual = self._latest = 0.0
        for item in items:
            item.place = -1
            self.push(item)

    def next_is_full(self) -> bool:
        """Whether the next batch would be full."""
        return self.next_has(self.max_batch_size)

    def next_has(self, rows: int) -> bool:
        """Whether the next batch would have so many rows, of at most a full batch."""
        if self.rows < rows:
            return False
        one = self._active[0] if len(self._active) == 1 else min(self._active, key=_start)
        one.pass_over()
        return self._lanes[one.arrivals[0].key].rows >= rows

    def oldest_s(self) -> float:
        """When the oldest item arrived; the queue must not be empty."""
        for one in self._active:
            one.pass_over()
        return min(one.arrivals[0].arrived_s for one in self._active)

    def giving_way(self, priority: int, rows: int, limit: int) -> list[Item] | None:
        """What is to be removed so that a request fits into the queue: the youngest of the least urgent class that has
        more than its share, which is ``limit`` divided by weight among the classes that have or want something.

        Args:
            priority: the request's.
            rows: the request's.
            limit: rows that may wait.

        Returns:
            None if its class would have more than its own share, for which a row at least always counts.
        """
        one = self._class_of(priority)
        of_all = sum(other.weight for other in self._active) + (0 if one.rows else one.weight)
        share = limit / of_all
        if one.rows + rows > max(1.0, share * one.weight):
            return None
        found: list[Item] = []
        missing = self.rows + rows - limit
        for other in reversed(self._active):
            if other is not one:
                over = other.rows - share * other.weight
                for item in reversed(other.arrivals):
                    if missing <= 0 or over <= 0:
                        break
                    if item.alive:
                        found.append(item)
                        missing -= item.rows
                        over -= item.rows
        return found if missing <= 0 else None

    def last_to_go(self, rows: int, held_bytes: int) -> list[Item]:
        """The youngest of the least urgent classes, until they have so many rows and bytes or nothing is left."""
        found: list[Item] = []
        for one in reversed(self._active):
            for item in reversed(one.arrivals):
                if rows <= 0 and held_bytes <= 0:
                    return found
                if item.alive:
                    found.append(item)
                    rows -= item.rows
                    held_bytes -= item.held_bytes
        return found

    def __len__(self) -> int:
        """Items held, those removed or taken but not yet cleared out among them."""
        lanes = sum(len(queue) for lane in self._lanes.values() for queue in lane.queues.values())
        return max(lanes, sum(len(one.arrivals) for one in self._active))

    def _class_of(self, priority: int) -> _PriorityClass:
        return self._classes[min(priority or DEFAULT_PRIORITY, LAST_PRIORITY)]

    def _count(self, rows: int, held_bytes: int, items: int) -> None:
        self.rows += rows
        self.held_bytes += held_bytes
        self._items += items
        self._total.rows += rows
        self._total.held_bytes += held_bytes

    def _take_from(self, one: _PriorityClass, rows: int) -> None:
        one.rows -= rows
        if not one.rows:
            one.arrivals.clear()
            one.start = one.next_start
            self._active.remove(one)
            if one.start > self._latest:
                self._latest = one.start
            if not self._active:
                self._virtual = self._latest

    def _leave(self, key: Hashable, lane: _Lane, rows: int) -> None:
        lane.rows -= rows
        if not lane.rows:
            del self._lanes[key]
            for queue in lane.queues.values():
                queue.clear()
            self._spare = lane

    def _compact(self) -> None:
        self._removed = 0
        for one in self._active:
            one.pass_over()
            one.arrivals = deque(item for item in one.arrivals if item.alive)
        for lane in self._lanes.values():
            for other, queue in list(lane.queues.items()):
                lane.queues[other] = deque(item for item in queue if item.alive)

    def _take_next(self, queue: deque[Item]) -> list[Item]:
        """In order, until the next doesn't fit: a large one isn't passed over again and again by small ones."""
        free = self.max_batch_size
        taken = []
        while free and queue:
            item = queue[0]
            if item.alive:
                if item.rows > free:
                    break
                item.alive = False
                taken.append(item)
                free -= item.rows
            queue.popleft()
        return taken

    def _take_in_turn(self, lane: _Lane, classes: list[_PriorityClass], first: _PriorityClass) -> list[Item]:
        """The same, from several classes: the first's first, then whose turn it is."""
        taken: list[Item] = []
        free = self.max_batch_size
        for item in _in_turn(lane, classes, first):
            if item.rows > free:
                lane.queues[self._classes[item.priority]].appendleft(item)
                break
            item.alive = False
            taken.append(item)
            free -= item.rows
            if not free:
                break
        return taken


def _in_turn(lane: _Lane, classes: list[_PriorityClass], first: _PriorityClass) -> Any:
    """Take what waits out of a lane, the first class's first item first, then by whose turn it would be."""
    starts = {one: one.next_start for one in classes}
    one = first
    while starts:
        queue = lane.queues[one]
        while queue and not queue[0].alive:
            queue.popleft()
        if queue:
            item = queue.popleft()
            starts[one] += item.rows * one.cost
            yield item
        else:
            del starts[one]
        if starts:
            one = min(starts, key=starts.__getitem__)


def _classes(weights: Mapping[int, int]) -> list[_PriorityClass]:
    """The class of each priority."""
    known = {priority: _PriorityClass(priority, weight) for priority, weight in weights.items()}
    named = sorted(known)
    return [known[next((one for one in named if one >= priority), named[-1])] for priority in range(LAST_PRIORITY + 1)]


def _put_back(queue: deque[Item], item: Item) -> None:
    """Insert an item where it was: near the beginning, as it was taken before."""
    for index, other in enumerate(queue):
        if other.place >= item.place:
            if other is not item:
                queue.insert(index, item)
            return
    queue.append(item)
