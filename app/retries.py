"""Parts of requests that a replica was lost with: each is computed alone, so that what ends a replica is known."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from app.batching import Item
from app.pending import Part
from app.replica_calls import ReplicaCalls

__all__ = ["Retries"]


class Retries:
    """Those of one deployment.

    One replica at a time is set aside for them. It has one call at a time, and batches of others have every second turn
    there, so that neither waits for the other's end.
    """

    def __init__(self) -> None:
        self._waiting: deque[Item] = deque()
        self.aside: ReplicaCalls | None = None
        """The replica that is set aside."""
        self._is_alone = False
        """Whether the replica computes one of them now."""
        self._is_others_turn = False

    def __bool__(self) -> bool:
        """Whether one waits, or a replica is set aside."""
        return bool(self._waiting) or self.aside is not None

    @property
    def rows(self) -> int:
        """Rows waiting."""
        return sum(item.rows for item in self._waiting if not _is_settled(item))

    def push(self, item: Item) -> None:
        """Add one; it was taken from the queue, and doesn't go back there."""
        _part(item).waits = True
        self._waiting.append(item)

    def push_back(self, item: Item) -> None:
        """Put back what `next` gave, because the replica never had it."""
        _part(item).waits = True
        self._waiting.appendleft(item)

    def remove(self, item: Item) -> None:
        """Take one out that waits, because nobody wants it any more."""
        self._waiting.remove(item)
        _part(item).waits = False

    def drain(self) -> list[Item]:
        """Take out everything."""
        items = list(self._waiting)
        self._waiting.clear()
        for item in items:
            _part(item).waits = False
        return items

    def next(self, replicas: Iterable[ReplicaCalls], *, has_others: bool) -> tuple[ReplicaCalls, Item] | None:
        """What is to be computed now, and where. Sets a replica aside if there is none.

        Args:
            replicas: all.
            has_others: whether other rows wait.
        """
        while self._waiting and _is_settled(self._waiting[0]):
            _part(self._waiting.popleft()).waits = False
        if self.aside is not None and not self.aside.is_able:
            self._release()
        if not self._waiting:
            if not self._is_alone:
                self._release()
            return None
        if self.aside is None or (self.aside.calls and not self._is_alone):
            able = [one for one in replicas if one.is_able]
            best = min(able, key=lambda one: (one.calls, one.rows), default=None)
            # Not for less than an idle one: it may be long until a busy one is.
            if best is not None and (self.aside is None or not best.calls):
                self._release()
                self.aside = best
        if self.aside is None or self.aside.calls or (self._is_others_turn and has_others):
            return None
        item = self._waiting.popleft()
        _part(item).waits = False
        self._is_alone = True
        return self.aside, item

    def admits(self, replica: ReplicaCalls) -> bool:
        """Whether a replica may have a batch of others now."""
        return replica is not self.aside or (self._is_others_turn and not replica.calls)

    def note_batch(self, replica: ReplicaCalls) -> None:
        """A replica gets a batch of others."""
        if replica is self.aside:
            self._is_others_turn = False

    def note_end(self, replica: ReplicaCalls) -> None:
        """A call of a replica has ended, and is counted so."""
        if replica is not self.aside:
            return
        self._is_others_turn = self._is_alone
        self._is_alone = False
        if not self._waiting:
            self._release()

    def _release(self) -> None:
        self.aside = None
        self._is_alone = False
        self._is_others_turn = False


def _part(item: Item) -> Part:
    part: Part = item.payload
    return part


def _is_settled(item: Item) -> bool:
    """Whether nobody waits for it any more."""
    return _part(item).pending.collector.is_done
