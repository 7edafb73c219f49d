"""The batching policy's queue: which rows go together, and which go next. No clock and no event loop of its own."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

__all__ = ["DEFAULT_PRIORITY", "BatchQueue", "Item"]

DEFAULT_PRIORITY = 5
LAST_PRIORITY = 10
PRIORITY_STEP_S = 1.0
"""A level of priority is worth this much waiting: the order is kept by it, and no level starves another."""
REMOVED_LIMIT = 16
LOOK_AHEAD = 4
"""Rows of similar size are looked for among this many batches' worth of waiting ones."""


class Item:
    """Rows of one request that travel together.

    Args:
        key: rows may share a batch only if their keys are equal.
        rows: how many; at most the queue's ``max_batch_size``.
        size_bytes: of one row's variable-length data; rows of similar size are put together. 0 where all are alike.
        arrived_s: when, on any steady clock.
        priority: 1 is the most urgent; 0 stands for the default.
        payload: what the caller wants back.
    """

    __slots__ = ("alive", "arrived_s", "key", "order", "payload", "rows", "size_bytes")

    def __init__(
        self, key: Hashable, rows: int, *, size_bytes: int, arrived_s: float, priority: int, payload: Any
    ) -> None:
        self.key = key
        self.rows = rows
        self.size_bytes = size_bytes
        self.arrived_s = arrived_s
        self.order = arrived_s + min(priority or DEFAULT_PRIORITY, LAST_PRIORITY) * PRIORITY_STEP_S
        self.payload = payload
        self.alive = True
        """Waiting: neither taken nor removed."""


class BatchQueue:
    """Rows waiting for one deployment.

    Invariants: an item comes out at most once, and not after it was removed; a batch has one key and at most
    ``max_batch_size`` rows; the item that is first in order is in the next batch, so none waits for ever.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.rows = 0
        """Rows waiting."""
        self._lanes: dict[Hashable, list[tuple[float, int, Item]]] = {}
        self._removed = 0
        """Removed since the last compaction."""
        self._arrivals = itertools.count()

    def push(self, item: Item) -> None:
        """Add an item; one that was taken may come back, and keeps its place in the order."""
        item.alive = True
        lane = self._lanes.get(item.key)
        if lane is None:
            lane = self._lanes[item.key] = []
        heapq.heappush(lane, (item.order, next(self._arrivals), item))
        self.rows += item.rows

    def remove(self, item: Item) -> bool:
        """Take an item out because it expired or was cancelled. Returns whether it was still waiting."""
        if not item.alive:
            return False
        item.alive = False
        self.rows -= item.rows
        self._removed += 1
        # What was removed keeps its rows in memory until it is reached in its lane, which a busy replica may delay
        # without end: clear it out before it outweighs what waits.
        if self._removed > REMOVED_LIMIT and 2 * self._removed > len(self):
            self._compact()
        return True

    def pop(self) -> list[Item]:
        """Take out the next batch: the first item in order, and others that may share its batch."""
        lane = self._first_lane()
        if lane is None:
            return []
        first = heapq.heappop(lane)[2]
        batch = [first]
        free = self.max_batch_size - first.rows
        if free > 0 and lane:
            batch += self._take_similar(lane, first, free) if first.size_bytes else self._take_next(lane, free)
        for item in batch:
            item.alive = False
            self.rows -= item.rows
        if not lane:
            del self._lanes[first.key]
        return batch

    def drain(self) -> list[Item]:
        """Take out everything."""
        items = [item for lane in self._lanes.values() for _, _, item in lane if item.alive]
        for item in items:
            item.alive = False
        self._lanes.clear()
        self.rows = 0
        return items

    def next_is_full(self) -> bool:
        """Whether the next batch would be full."""
        if self.rows < self.max_batch_size:
            return False
        lane = self._first_lane()
        return lane is not None and sum(item.rows for _, _, item in lane if item.alive) >= self.max_batch_size

    def __len__(self) -> int:
        """Items held, those removed but not yet cleared out among them."""
        return sum(map(len, self._lanes.values()))

    def oldest_s(self) -> float:
        """When the first item in order arrived; the queue must not be empty."""
        lane = self._first_lane()
        assert lane is not None
        return lane[0][2].arrived_s

    def _compact(self) -> None:
        self._removed = 0
        for key, lane in list(self._lanes.items()):
            lane[:] = [entry for entry in lane if entry[2].alive]
            heapq.heapify(lane)
            if not lane:
                del self._lanes[key]

    def _first_lane(self) -> list[tuple[float, int, Item]] | None:
        found: list[tuple[float, int, Item]] | None = None
        for key, lane in list(self._lanes.items()):
            while lane and not lane[0][2].alive:
                heapq.heappop(lane)
            if not lane:
                del self._lanes[key]
            elif found is None or lane[0][:2] < found[0][:2]:
                found = lane
        return found

    @staticmethod
    def _take_next(lane: list[tuple[float, int, Item]], free: int) -> list[Item]:
        """In order, until the next doesn't fit: a large one isn't passed over again and again by small ones."""
        taken = []
        while lane and (not lane[0][2].alive or lane[0][2].rows <= free):
            item = heapq.heappop(lane)[2]
            if item.alive:
                taken.append(item)
                free -= item.rows
                if free == 0:
                    break
        return taken

    def _take_similar(self, lane: list[tuple[float, int, Item]], first: Item, free: int) -> list[Item]:
        """Those nearest in size to the first, among the next ones in order."""
        window: list[tuple[float, int, Item]] = []
        limit = LOOK_AHEAD * self.max_batch_size
        while lane and len(window) < limit:
            entry = heapq.heappop(lane)
            if entry[2].alive:
                window.append(entry)
        taken = []
        left = []
        for entry in sorted(window, key=lambda entry: _distance(entry[2].size_bytes, first.size_bytes)):
            if entry[2].rows <= free:
                taken.append(entry[2])
                free -= entry[2].rows
            else:
                left.append(entry)
        _push_back(lane, left)
        return taken


def _distance(size_bytes: int, other: int) -> float:
    """How unlike two sizes are: their ratio, at least 1."""
    return max(size_bytes, other) / max(min(size_bytes, other), 1)


def _push_back(lane: list[tuple[float, int, Item]], entries: Sequence[tuple[float, int, Item]]) -> None:
    for entry in entries:
        heapq.heappush(lane, entry)
