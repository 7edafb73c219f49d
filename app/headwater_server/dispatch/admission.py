"""Admits requests: the limits of a deployment's queue and of all queues of a worker, and how fast a queue drains."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic

from headwater_server.dispatch.queue import BatchQueue, T, Waiting
from headwater_server.errors import BadRequest, BodyTooLarge, QueueFull

__all__ = ["Admission", "DrainRate", "FinishRate", "QueueBudget"]

MEMORY_S = 5.0
"""The time constant of the drain rate's average."""

RETRY_AFTER_LIMIT_S: Final = 60
ROWS_OF_ALL: Final = "server.max_queue_size"
BYTES_OF_ALL: Final = "server.max_queue_bytes"
GAVE_WAY: Final = "; the request gave way to one whose class or model has less than its share"


class DrainRate:
    """The rows per second that leave a queue while others wait behind them: what all replicas together can do.

    A queue that runs empty doesn't count: it lets out no more than came in.
    """

    def __init__(self) -> None:
        self._rows = 0.0
        self._seconds = 0.0
        self._last_s: float | None = None
        """The time at which rows last left; None if none have waited since."""

    def note(self, rows: int, now_s: float, *, others_wait: bool) -> None:
        """Record that rows left."""
        if self._last_s is not None:
            took_s = now_s - self._last_s
            kept = math.exp(-took_s / MEMORY_S)
            self._rows = self._rows * kept + rows
            self._seconds = self._seconds * kept + took_s
        self._last_s = now_s if others_wait else None

    def note_empty(self) -> None:
        """Record that the queue is empty without rows having left for a replica."""
        self._last_s = None

    def seconds_for(self, rows: float) -> float | None:
        """How long so many rows take to leave; None if that is unknown yet."""
        return rows * self._seconds / self._rows if self._rows and self._seconds else None


class QueueBudget:
    """How much may wait in a gateway worker, in the queues of all deployments.

    Each deployment is guaranteed an equal share, or its own limit if that is less. Beyond its share it may use what
    the others don't, and gives it back when they need it.

    Args:
        max_rows: this worker's part of `server.max_queue_size`.
        max_bytes: this worker's part of `server.max_queue_bytes`.
    """

    def __init__(self, max_rows: int = 8192, max_bytes: int = 1 << 30) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.waiting = Waiting()
        self.members: list[Admission[Any]] = []

    def share(self) -> tuple[int, int]:
        """The rows and bytes that each deployment is guaranteed."""
        count = len(self.members)
        return self.max_rows // count, self.max_bytes // count

    def drop_copies(self) -> bool:
        """Remove everything that no client waits for from all queues. Returns whether there was anything."""
        return sum([member.drop_copies() for member in self.members]) > 0

    def reclaim(self, member: Admission[Any], rows: int, held_bytes: int) -> None:
        """Remove what others have beyond their shares, as far as a request of this deployment needs it."""
        share_rows, share_bytes = self.share()
        waiting = self.waiting
        others = [one for one in self.members if one is not member]
        for other in sorted(others, key=lambda one: one.queue.rows, reverse=True):
            over = min(waiting.rows + rows - self.max_rows, other.queue.rows - share_rows)
            if over > 0:
                other.displace(other.queue.last_to_go(over, 0), ROWS_OF_ALL)
        for other in sorted(others, key=lambda one: one.queue.held_bytes, reverse=True):
            over = min(waiting.held_bytes + held_bytes - self.max_bytes, other.queue.held_bytes - share_bytes)
            if over > 0:
                other.displace(other.queue.last_to_go(0, over), BYTES_OF_ALL)


class Admission(Generic[T]):
    """Admits requests to one deployment's queue.

    Args:
        name: the deployment's.
        budget: limits what may wait in all deployments together.
        drop: fails the request that an item belongs to, and removes all its items from the queue.
    """

    def __init__(self, name: str, budget: QueueBudget, drop: Callable[[T, QueueFull], None]) -> None:
        self._name = name
        self._budget = budget
        self._drop = drop
        self.queue: BatchQueue[T] = BatchQueue(1, total=budget.waiting)
        self.rate = DrainRate()
        self.limit = 1
        """The number of the deployment's rows that may wait."""
        self._copies: list[T] = []
        """Items that no client waits for; some of them no longer wait."""
        budget.members.append(self)

    def close(self) -> None:
        """Give up the deployment's share of the budget; the queue must be empty."""
        if self in self._budget.members:
            self._budget.members.remove(self)

    def check(self, rows: int, held_bytes: int, priority: int) -> None:
        """Refuse a request that does not fit; make others give way if they exceed their shares.

        Args:
            rows: the request's.
            held_bytes: the size of its tensors while they wait.
            priority: 1 is the most urgent; 0 stands for the default.

        Raises:
            BadRequest: it has more rows than could ever fit.
            BodyTooLarge: it has more bytes than could ever fit.
            QueueFull: it does not fit now.
        """
        queue, budget = self.queue, self._budget
        if not queue.rows:
            self.rate.note_empty()
        if self._has_capacity(rows, held_bytes):
            return
        if budget.drop_copies() and self._has_capacity(rows, held_bytes):
            return
        self._check_possible(rows, held_bytes)
        share_rows, share_bytes = budget.share()
        if budget.waiting.held_bytes + held_bytes > budget.max_bytes and queue.held_bytes + held_bytes > share_bytes:
            raise self._full(BYTES_OF_ALL)
        limit, bound = self.limit, None
        if budget.waiting.rows + rows > budget.max_rows and max(queue.rows, share_rows) < limit:
            limit, bound = max(queue.rows, share_rows), ROWS_OF_ALL
        if queue.rows + rows > limit:
            found = queue.giving_way(priority, rows, limit)
            if found is None:
                raise self._full(bound)
            self.displace(found, bound)
        budget.reclaim(self, rows, held_bytes)

    def check_copy(self, rows: int, held_bytes: int) -> None:
        """Refuse a request that no client waits for, unless it fits without making others give way.

        Raises:
            QueueFull: it does not.
        """
        if not self._has_capacity(rows, held_bytes):
            raise self._full()

    def add_copy(self, item: T) -> None:
        """Note an item that no client waits for: if a request doesn't fit, it gives way before anything else."""
        self._copies = [*(one for one in self._copies if one.alive), item]

    def drop_copies(self) -> bool:
        """Remove these items. Returns whether any of them waited."""
        copies, self._copies = [item for item in self._copies if item.alive], []
        self.displace(copies, None)
        return bool(copies)

    def _has_capacity(self, rows: int, held_bytes: int) -> bool:
        waiting, budget = self._budget.waiting, self._budget
        return (
            self.queue.rows + rows <= self.limit
            and waiting.rows + rows <= budget.max_rows
            and waiting.held_bytes + held_bytes <= budget.max_bytes
        )

    def displace(self, items: list[T], bound: str | None) -> None:
        """Fail the requests that these waiting items belong to with 429.

        Args:
            items: the items.
            bound: the configuration's field that limits them; None: the deployment's own.
        """
        for item in items:
            if item.alive:  # not removed with another item of its request
                self._drop(item, self._full(bound, GAVE_WAY))

    def _full(self, bound: str | None = None, note: str = "") -> QueueFull:
        queue, budget = self.queue, self._budget
        if bound is None:
            what = f"the queue is full: {queue.rows} of {self.limit} rows wait (max_queue_size)"
        elif bound == ROWS_OF_ALL:
            waiting = f"{budget.waiting.rows} of {budget.max_rows} rows wait"
            what = f"the server's queues are full: {waiting} ({bound}), {queue.rows} of them here"
        else:
            waiting = f"{budget.waiting.held_bytes} of {budget.max_bytes} bytes wait"
            what = f"the server's queues are full: {waiting} ({bound}), {queue.held_bytes} of them here"
        # The same for every class: a request is refused only if its class has its share of the queue.
        retry_after_s = _retry_after_s(self.rate.seconds_for(queue.rows) or 0.0)
        return QueueFull(f"model `{self._name}`: {what}{note}", retry_after_s=retry_after_s)

    def _check_possible(self, rows: int, held_bytes: int) -> None:
        budget = self._budget
        limit, field = min((self.limit, f"max_queue_size of model `{self._name}`"), (budget.max_rows, ROWS_OF_ALL))
        if rows > limit:
            raise BadRequest(
                f"inputs: expected at most {limit} rows ({field}, over its gateway workers), got {rows}; send them in "
                "several requests",
                field="inputs",
            )
        if held_bytes > budget.max_bytes:
            raise BodyTooLarge(
                f"inputs: expected at most {budget.max_bytes} bytes ({BYTES_OF_ALL}, over the gateway workers), "
                f"got {held_bytes}; send them in several requests"
            )


def _retry_after_s(wait_s: float) -> int:
    return max(1, min(RETRY_AFTER_LIMIT_S, math.ceil(wait_s)))


FINISHES: Final = 64
"""The number of last finishes that a rate is computed from."""

RECENT_S: Final = 120.0
"""Older finishes don't count."""


class FinishRate:
    """How fast sequences finish, for ``Retry-After``."""

    def __init__(self) -> None:
        self._finished_s: deque[float] = deque(maxlen=FINISHES)

    def note(self, now_s: float) -> None:
        """Record that a sequence has ended, for whatever reason, and made place for another."""
        self._finished_s.append(now_s)

    def wait_s(self, waiting: int, now_s: float, share: float = 1.0) -> int:
        """The time until so many more have ended, in whole seconds from 1 to 60.

        Args:
            waiting: their number.
            now_s: the loop's time.
            share: the fraction of all sequences whose ends are recorded here.
        """
        finished_s = self._finished_s
        while finished_s and finished_s[0] < now_s - RECENT_S:
            finished_s.popleft()
        if len(finished_s) < 2:
            return 1
        each_s = (finished_s[-1] - finished_s[0]) / (len(finished_s) - 1)  # not until now: it may have been idle since
        return _retry_after_s(waiting * each_s * share)
