"""The batching policy's queue: which rows share a batch, and which batch is next. It uses no clock and no event loop.

Priority classes are ordered by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with rows in place of
bits: each class has a virtual time, which advances by its rows divided by its weight, and the class with the earliest
virtual time is next. A class without waiting rows saves up no credit: when rows arrive, it starts at the present
virtual time at the earliest. Within a class, the items of a key leave in order of arrival.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Generic, TypeVar

__all__ = ["DEFAULT_PRIORITY", "DEFAULT_WEIGHTS", "LAST_PRIORITY", "BatchQueue", "Item", "Waiting"]

DEFAULT_PRIORITY = 5
LAST_PRIORITY = 10
DEFAULT_WEIGHTS: Mapping[int, int] = MappingProxyType(
    {priority: 2 ** (LAST_PRIORITY - priority) for priority in range(1, LAST_PRIORITY + 1)}
)
"""The weight of each priority from 1 to 10: twice the weight of the next less urgent priority."""
REMOVED_LIMIT = 16
"""Removed items that a queue may keep in memory, even if more items are removed than wait."""


class Item:
    """Rows of one request that wait and travel together.

    Args:
        key: only rows with equal keys may share a batch.
        rows: the number of rows, at most the queue's ``max_batch_size``.
        arrived_s: the time of arrival, on any steady clock.
        priority: 1 is the most urgent, 10 the least urgent, and a greater number counts as 10; 0 stands for the
            default.
        held_bytes: bytes of the rows' data, which stay in memory while the rows wait.
    """

    __slots__ = ("alive", "arrived_s", "held_bytes", "key", "place", "priority", "rows")

    def __init__(self, key: Hashable, rows: int, arrived_s: float, priority: int, held_bytes: int = 0) -> None:
        self.key = key
        self.rows = rows
        self.held_bytes = held_bytes
        self.arrived_s = arrived_s
        self.priority = min(priority or DEFAULT_PRIORITY, LAST_PRIORITY)
        self.place = -1
        """Its number in the order of arrival; -1 before the first push."""
        self.alive = False
        """Whether it waits in the queue: it was pushed, and was not taken or removed afterwards."""


T = TypeVar("T", bound=Item)


@dataclass
class Waiting:
    """Rows, and bytes of their data, that wait in several queues together."""

    rows: int = 0
    held_bytes: int = 0


class _PriorityClass(Generic[T]):
    """The waiting items of one class.

    ``next_start`` is the virtual time at which the class's next rows start. ``start`` is the virtual time at which its
    first item starts. ``start`` doesn't change while later items of the class leave before the first item, to fill
    batches that another class started.
    """

    def __init__(self, priority: int, weight: int) -> None:
        self.priority = priority
        self.weight = weight
        self.cost = 1 / weight
        """Virtual time that a row takes."""
        self.rows = 0
        self.start = 0.0
        self.next_start = 0.0
        self.arrivals: deque[T] = deque()
        """Items in order of arrival; some have already left the queue."""

    def pass_over(self) -> None:
        """Drop items at the front that have already left the queue. If there were such items, the first item now starts
        at `next_start`."""
        arrivals = self.arrivals
        while arrivals and not arrivals[0].alive:
            arrivals.popleft()
            self.start = self.next_start


class _Lane(Generic[T]):
    """The items of one key, by priority class; some have already left the queue."""

    def __init__(self) -> None:
        self.rows = 0
        self.queues: dict[_PriorityClass[T], deque[T]] = {}


_start = attrgetter("start")
_priority = attrgetter("priority")
_place = attrgetter("place")


class BatchQueue(Generic[T]):
    """Rows waiting for one deployment.

    Invariants: an item leaves at most once, and never after it was removed; a batch has a single key and at most
    ``max_batch_size`` rows; the first item in order is in the next batch, so no item waits for ever. Classes that
    always have rows waiting get rows in proportion to their weights, as far as keys allow.

    Bound on waiting: every batch that leaves before an item X starts with an item that precedes X, and continues with
    items of the same key from the oldest to the youngest. So if p items of one row each precede X, with k different
    keys, X leaves within p / max_batch_size + k + 1 batches, whatever arrives after X.

    Args:
        max_batch_size: the most rows of a batch.
        weights: by priority. A priority without a weight belongs to the class of the next less urgent priority that has
            a weight, or to the least urgent class.
        total: a counter shared with other queues, which also counts the rows and bytes of this queue.
    """

    def __init__(
        self, max_batch_size: int, weights: Mapping[int, int] = DEFAULT_WEIGHTS, total: Waiting | None = None
    ) -> None:
        self.max_batch_size = max_batch_size
        self.weights = weights
        self.rows = 0
        """Rows waiting."""
        self.held_bytes = 0
        """Bytes of the waiting rows."""
        self._total = total or Waiting()
        self._classes: list[_PriorityClass[T]] = _classes(weights)
        """The class of each priority, by index."""
        self._active: list[_PriorityClass[T]] = []
        """The classes with waiting items, the most urgent first."""
        self._lanes: dict[Hashable, _Lane[T]] = {}
        self._spare: _Lane[T] | None = None
        """An empty lane to reuse: at low load every request would otherwise create a lane."""
        self._virtual = 0.0
        """The present virtual time: the earliest start of a waiting item, or `_latest` while the queue is empty."""
        self._latest = 0.0
        """The latest ``next_start`` of the classes that ran out of items."""
        self._items = 0
        """Items waiting."""
        self._removed = 0
        """Items removed since the last compaction."""
        self._arrivals = itertools.count()

    def push(self, item: T) -> None:
        """Add an item. An item that was taken may be pushed again, and keeps its place in the order."""
        priority_class = self._classes[item.priority]
        lane = self._lanes.get(item.key)
        if lane is None:
            lane = self._lanes[item.key] = self._spare or _Lane()
            self._spare = None
        queue = lane.queues.get(priority_class)
        if queue is None:
            queue = lane.queues[priority_class] = deque()
        item.alive = True
        rows = item.rows
        if not priority_class.rows:
            if priority_class.next_start < self._virtual:
                priority_class.next_start = self._virtual
            priority_class.start = priority_class.next_start
            self._active.append(priority_class)
            if len(self._active) > 1:
                self._active.sort(key=_priority)
        if item.place < 0:
            item.place = next(self._arrivals)
            queue.append(item)
            priority_class.arrivals.append(item)
        else:
            priority_class.next_start -= rows * priority_class.cost
            priority_class.start = min(priority_class.start, priority_class.next_start)
            _put_back(queue, item)
            _put_back(priority_class.arrivals, item)
        priority_class.rows += rows
        lane.rows += rows
        self._count(rows, item.held_bytes, 1)

    def remove(self, item: T) -> bool:
        """Remove an item that expired, was cancelled or was displaced. Returns whether it was still waiting."""
        if not item.alive:
            return False
        item.alive = False
        self._leave(item.key, self._lanes[item.key], item.rows)
        priority_class = self._classes[item.priority]
        while priority_class.arrivals and not priority_class.arrivals[-1].alive:
            priority_class.arrivals.pop()
        self._take_from(priority_class, item.rows)
        self._count(-item.rows, -item.held_bytes, -1)
        self._removed += 1
        # A removed item keeps its rows in memory until its lane reaches it, which a busy replica may delay without end.
        if self._removed > REMOVED_LIMIT and self._removed > self._items:
            self._compact()
        return True

    def pop(self) -> list[T]:
        """Take the next batch: the first item in order, and further items that may share its batch. Returns an empty
        list if no item waits."""
        active = self._active
        if not active:
            return []
        alone = len(active) == 1
        next_class = active[0] if alone else min(active, key=_start)
        arrivals = next_class.arrivals
        if not arrivals[0].alive:
            next_class.pass_over()
        first = arrivals[0]
        lane = self._lanes[first.key]
        classes = active if alone else [priority_class for priority_class in active if priority_class in lane.queues]
        if len(classes) == 1:
            batch = self._take_next(lane.queues[next_class])
            rows = sum([item.rows for item in batch])
            next_class.next_start += rows * next_class.cost
            self._take_from(next_class, rows)
            next_class.pass_over()
        else:
            batch = self._take_in_turn(lane, classes, next_class)
            rows = sum([item.rows for item in batch])
            for item in batch:
                priority_class = self._classes[item.priority]
                priority_class.next_start += item.rows * priority_class.cost
                self._take_from(priority_class, item.rows)
            for priority_class in classes:
                priority_class.pass_over()
                # Rows that left before their turn filled capacity that would have been lost. A class is charged for at
                # most a batch of them: else its first item could wait without end.
                priority_class.next_start = min(
                    priority_class.next_start, priority_class.start + self.max_batch_size * priority_class.cost
                )
        self._leave(first.key, lane, rows)
        self._count(-rows, -sum([item.held_bytes for item in batch]), -len(batch))
        if active:
            now = active[0].start if len(active) == 1 else min(active, key=_start).start
            if now > self._virtual:
                self._virtual = now
        return batch

    def drain(self) -> list[T]:
        """Take all items, in order of arrival."""
        items = sorted(
            (item for priority_class in self._active for item in priority_class.arrivals if item.alive), key=_place
        )
        for item in items:
            item.alive = False
        for priority_class in self._active:
            priority_class.arrivals.clear()
            priority_class.rows = 0
            self._latest = max(self._latest, priority_class.next_start)
        self._active.clear()
        self._lanes.clear()
        self._count(-self.rows, -self.held_bytes, -self._items)
        self._virtual = self._latest
        return items

    def reweigh(self, weights: Mapping[int, int]) -> None:
        """Change classes and weights; items keep their order within a class, and virtual time starts again at 0."""
        items = self.drain()
        self.weights = weights
        self._classes = _classes(weights)
        self._virtual = self._latest = 0.0
        for item in items:
            item.place = -1
            self.push(item)

    def next_has(self, rows: int) -> bool:
        """Whether at least ``rows`` rows wait with the key of the next batch. The batch may still get fewer rows, if
        items don't fill it exactly.

        Args:
            rows: from 1 to ``max_batch_size``.
        """
        if self.rows < rows:
            return False
        next_class = self._active[0] if len(self._active) == 1 else min(self._active, key=_start)
        next_class.pass_over()
        return self._lanes[next_class.arrivals[0].key].rows >= rows

    def oldest_s(self) -> float:
        """The earliest ``arrived_s`` of the first items of all classes; the queue must not be empty."""
        for priority_class in self._active:
            priority_class.pass_over()
        return min(priority_class.arrivals[0].arrived_s for priority_class in self._active)

    def giving_way(self, priority: int, rows: int, limit: int) -> list[T] | None:
        """Choose items to remove so that a request fits: the youngest of the least urgent classes beyond their shares.

        ``limit`` is divided by weight among the classes with waiting items and the request's class; a class's part is
        its share.

        Args:
            priority: priority of the request.
            rows: rows of the request.
            limit: rows that may wait.

        Returns:
            The items; None if the request's class would exceed its share, which is at least a row, or if the items
            would not free enough rows.
        """
        request_class = self._classes[min(priority or DEFAULT_PRIORITY, LAST_PRIORITY)]
        of_all = sum(priority_class.weight for priority_class in self._active) + (
            0 if request_class.rows else request_class.weight
        )
        share = limit / of_all
        if request_class.rows + rows > max(1.0, share * request_class.weight):
            return None
        items: list[T] = []
        missing = self.rows + rows - limit
        for priority_class in reversed(self._active):
            if priority_class is not request_class:
                over = priority_class.rows - share * priority_class.weight
                for item in reversed(priority_class.arrivals):
                    if missing <= 0 or over <= 0:
                        break
                    if item.alive:
                        items.append(item)
                        missing -= item.rows
                        over -= item.rows
        return items if missing <= 0 else None

    def last_to_go(self, rows: int, held_bytes: int) -> list[T]:
        """The youngest items of the least urgent classes that together have at least this number of rows and of bytes,
        or all items if the queue has less. The items stay in the queue."""
        items: list[T] = []
        for priority_class in reversed(self._active):
            for item in reversed(priority_class.arrivals):
                if rows <= 0 and held_bytes <= 0:
                    return items
                if item.alive:
                    items.append(item)
                    rows -= item.rows
                    held_bytes -= item.held_bytes
        return items

    def _count(self, rows: int, held_bytes: int, items: int) -> None:
        self.rows += rows
        self.held_bytes += held_bytes
        self._items += items
        self._total.rows += rows
        self._total.held_bytes += held_bytes

    def _take_from(self, priority_class: _PriorityClass[T], rows: int) -> None:
        priority_class.rows -= rows
        if not priority_class.rows:
            priority_class.arrivals.clear()
            priority_class.start = priority_class.next_start
            self._active.remove(priority_class)
            if priority_class.start > self._latest:
                self._latest = priority_class.start
            if not self._active:
                self._virtual = self._latest

    def _leave(self, key: Hashable, lane: _Lane[T], rows: int) -> None:
        lane.rows -= rows
        if not lane.rows:
            del self._lanes[key]
            for queue in lane.queues.values():
                queue.clear()
            self._spare = lane

    def _compact(self) -> None:
        self._removed = 0
        for priority_class in self._active:
            priority_class.pass_over()
            priority_class.arrivals = deque(item for item in priority_class.arrivals if item.alive)
        for lane in self._lanes.values():
            for priority_class, queue in list(lane.queues.items()):
                lane.queues[priority_class] = deque(item for item in queue if item.alive)

    def _take_next(self, queue: deque[T]) -> list[T]:
        """Take a batch of the items of one class and key, in order, until the next item doesn't fit: small items never
        overtake a large item."""
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

    def _take_in_turn(self, lane: _Lane[T], classes: list[_PriorityClass[T]], first: _PriorityClass[T]) -> list[T]:
        """Take a batch from several classes: starts with an item of ``first``, then picks the class with the earliest
        virtual time for each item, until the next item doesn't fit."""
        taken: list[T] = []
        free = self.max_batch_size
        starts = {priority_class: priority_class.next_start for priority_class in classes}
        priority_class = first
        while free and starts:
            queue = lane.queues[priority_class]
            while queue and not queue[0].alive:
                queue.popleft()
            if not queue:
                del starts[priority_class]
            elif queue[0].rows > free:
                break
            else:
                item = queue.popleft()
                item.alive = False
                taken.append(item)
                free -= item.rows
                starts[priority_class] += item.rows * priority_class.cost
            priority_class = min(starts, key=starts.__getitem__, default=first)
        return taken


def _classes(weights: Mapping[int, int]) -> list[_PriorityClass[T]]:
    """The class of each priority, by index, as `BatchQueue` describes. Index 0 is unused."""
    by_priority: dict[int, _PriorityClass[T]] = {
        priority: _PriorityClass(priority, weight) for priority, weight in weights.items()
    }
    named = sorted(by_priority)
    return [
        by_priority[next((candidate for candidate in named if candidate >= priority), named[-1])]
        for priority in range(LAST_PRIORITY + 1)
    ]


def _put_back(queue: deque[T], item: T) -> None:
    """Insert an item at its former place, unless the queue still has it. The place is near the beginning, since the
    item has been taken before."""
    for index, queued_item in enumerate(queue):
        if queued_item.place >= item.place:
            if queued_item is not item:
                queue.insert(index, item)
            return
    queue.append(item)
