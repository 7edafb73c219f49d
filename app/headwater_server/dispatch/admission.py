"""Admits requests within the limits of a deployment's queue and of all queues in a worker; measures the drain rate."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic

from headwater_server.dispatch.queue import BatchQueue, T, Waiting
from headwater_server.errors import BadRequest, BodyTooLarge, QueueFull

__all__ = ["Admission", "DrainRate", "FinishRate", "QueueBudget"]

MEMORY_S = 5.0
"""Time constant of the drain rate's exponential average, in seconds."""

RETRY_AFTER_LIMIT_S: Final = 60
ROWS_OF_ALL: Final = "server.max_queue_size"
BYTES_OF_ALL: Final = "server.max_queue_bytes"
GAVE_WAY: Final = "; a request whose class or model has less than its share took the place"


class DrainRate:
    """Rows per second that leave a queue while further rows wait: the rows that all replicas together take from this
    worker.

    Time in which the queue is empty doesn't count, because then arrivals limit the rate and not the replicas.
    """

    def __init__(self) -> None:
        self._rows = 0.0
        self._seconds = 0.0
        self._last_s: float | None = None
        """Time at which rows last left; None if no rows waited afterwards."""

    def note(self, rows: int, now_s: float, *, others_wait: bool) -> None:
        """Record that rows left; ``others_wait``: whether further rows wait in the queue."""
        if self._last_s is not None:
            took_s = now_s - self._last_s
            kept = math.exp(-took_s / MEMORY_S)
            self._rows = self._rows * kept + rows
            self._seconds = self._seconds * kept + took_s
        self._last_s = now_s if others_wait else None

    def note_empty(self) -> None:
        """Record that the queue became empty although no replica took its last rows: they expired, for instance."""
        self._last_s = None

    def seconds_for(self, rows: float) -> float | None:
        """Seconds until this number of rows has left; None if the rate is not known yet."""
        return rows * self._seconds / self._rows if self._rows and self._seconds else None


class QueueBudget:
    """Limits the rows and bytes in a gateway worker's queues of models that take tensors. Rows that wait to be retried
    don't count.

    Each deployment is guaranteed an equal share, or its ``max_queue_size`` if that is less. It may use the unused
    shares of other deployments, until those deployments need them.

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
        """The guaranteed share of each deployment: rows, bytes."""
        count = len(self.members)
        return self.max_rows // count, self.max_bytes // count

    def drop_copies(self) -> bool:
        """Fail the shadow copies that wait in all queues. Returns whether there were any."""
        return sum([member.drop_copies() for member in self.members]) > 0

    def reclaim(self, member: Admission[Any], rows: int, held_bytes: int) -> None:
        """Fail waiting requests of other deployments that exceed their shares, until a request fits.

        Args:
            member: the admission of the request's deployment.
            rows: rows of the request.
            held_bytes: bytes of the request's tensors.
        """
        share_rows, share_bytes = self.share()
        waiting = self.waiting
        admissions = [admission for admission in self.members if admission is not member]
        for admission in sorted(admissions, key=lambda admission: admission.queue.rows, reverse=True):
            over = min(waiting.rows + rows - self.max_rows, admission.queue.rows - share_rows)
            if over > 0:
                admission.displace(admission.queue.last_to_go(over, 0), ROWS_OF_ALL)
        for admission in sorted(admissions, key=lambda admission: admission.queue.held_bytes, reverse=True):
            over = min(waiting.held_bytes + held_bytes - self.max_bytes, admission.queue.held_bytes - share_bytes)
            if over > 0:
                admission.displace(admission.queue.last_to_go(0, over), BYTES_OF_ALL)


class Admission(Generic[T]):
    """Admits requests to one deployment's queue.

    Args:
        name: the deployment's name.
        budget: limits the rows and bytes that wait in all deployments together.
        drop: fails the request that an item belongs to, and removes all items of that request from the queue.
    """

    def __init__(self, name: str, budget: QueueBudget, drop: Callable[[T, QueueFull], None]) -> None:
        self._name = name
        self._budget = budget
        self._drop = drop
        self.queue: BatchQueue[T] = BatchQueue(1, total=budget.waiting)
        self.rate = DrainRate()
        self.limit = 1
        """Rows of the deployment that may wait in this worker; the dispatcher sets it."""
        self._copies: list[T] = []
        """Items of shadow copies; some have already left the queue."""
        budget.members.append(self)

    def close(self) -> None:
        """Give up the deployment's share of the budget; the queue must be empty."""
        if self in self._budget.members:
            self._budget.members.remove(self)

    def check(self, rows: int, held_bytes: int, priority: int) -> None:
        """Refuse a request that does not fit. To make it fit, shadow copies are removed from all queues, and then
        waiting requests fail whose class or deployment exceeds its share.

        Args:
            rows: rows of the request.
            held_bytes: bytes that the request's tensors hold while they wait.
            priority: 1 is the most urgent; 0 stands for the default.

        Raises:
            BadRequest: the request has more rows than could ever fit.
            BodyTooLarge: the request has more bytes than could ever fit.
            QueueFull: the request does not fit now.
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
            items = queue.giving_way(priority, rows, limit)
            if items is None:
                raise self._full(bound)
            self.displace(items, bound)
        budget.reclaim(self, rows, held_bytes)

    def check_copy(self, rows: int, held_bytes: int) -> None:
        """Refuse a shadow copy unless there is capacity for it; no waiting request is removed for a copy.

        Raises:
            QueueFull: there is no capacity.
        """
        if not self._has_capacity(rows, held_bytes):
            raise self._full()

    def add_copy(self, item: T) -> None:
        """Note an item of a shadow copy. When a client's request doesn't fit, copies are removed first."""
        self._copies = [*(copy for copy in self._copies if copy.alive), item]

    def drop_copies(self) -> bool:
        """Fail the shadow copies that wait in this queue. Returns whether there were any."""
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
        """Fail the requests that these waiting items belong to with status 429.

        Args:
            items: the items.
            bound: the configuration field of the limit that was reached; None for the deployment's ``max_queue_size``.
        """
        for item in items:
            if item.alive:  # unless it was already removed with another item of the same request
                self._drop(item, self._full(bound, GAVE_WAY))

    def _full(self, bound: str | None = None, note: str = "") -> QueueFull:
        queue, budget = self.queue, self._budget
        if bound is None:
            reason = f"the queue is full: {queue.rows} of {self.limit} rows wait (max_queue_size)"
        elif bound == ROWS_OF_ALL:
            waiting = f"{budget.waiting.rows} of {budget.max_rows} rows wait"
            reason = f"the server's queues are full: {waiting} ({bound}), {queue.rows} of them here"
        else:
            waiting = f"{budget.waiting.held_bytes} of {budget.max_bytes} bytes wait"
            reason = f"the server's queues are full: {waiting} ({bound}), {queue.held_bytes} of them here"
        # Retry-After is the same for every priority class: a class is refused only once it has its share of the queue.
        retry_after_s = _retry_after_s(self.rate.seconds_for(queue.rows) or 0.0)
        return QueueFull(f"model `{self._name}`: {reason}{note}", retry_after_s=retry_after_s)

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
"""Number of recent finishes from which the rate is computed."""

RECENT_S: Final = 120.0
"""Age in seconds beyond which a finish no longer counts."""


class FinishRate:
    """How fast sequences finish, for ``Retry-After``."""

    def __init__(self) -> None:
        self._finished_s: deque[float] = deque(maxlen=FINISHES)

    def note(self, now_s: float) -> None:
        """Record that a sequence has ended, for any reason, so that another sequence can start."""
        self._finished_s.append(now_s)

    def wait_s(self, waiting: int, now_s: float, share: float = 1.0) -> int:
        """Seconds until ``waiting`` more sequences have ended, as a whole number from 1 to 60; 1 if fewer than two
        recent finishes are recorded.

        Args:
            waiting: the number of sequences that must end first, recorded here or not.
            now_s: the loop's time.
            share: the fraction of all sequences whose ends are recorded here.
        """
        finished_s = self._finished_s
        while finished_s and finished_s[0] < now_s - RECENT_S:
            finished_s.popleft()
        if len(finished_s) < 2:
            return 1
        each_s = (finished_s[-1] - finished_s[0]) / (len(finished_s) - 1)  # up to the last finish, not up to now
        return _retry_after_s(waiting * each_s * share)
