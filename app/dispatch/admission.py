"""Who may wait: the bounds of a deployment's queue and of all queues of a worker, and how fast a queue drains."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from app.dispatch.queue import BatchQueue, Item, Waiting
from app.errors import BadRequest, BodyTooLarge, QueueFull

__all__ = ["Admission", "DrainRate", "FinishRate", "QueueBudget"]


MEMORY_S = 5.0
"""What was this long ago counts a third of what is now."""


class DrainRate:
    """Rows per second that leave a queue while others wait behind them: what all replicas together are good for.

    A queue that runs empty says nothing of that: what leaves it then is what came.
    """

    def __init__(self) -> None:
        self._rows = 0.0
        self._seconds = 0.0
        self._last_s: float | None = None
        """When rows left last; None if none waited since."""

    def note(self, rows: int, now_s: float, *, others_wait: bool) -> None:
        """Take in that rows left."""
        if self._last_s is not None:
            took_s = now_s - self._last_s
            kept = math.exp(-took_s / MEMORY_S)
            self._rows = self._rows * kept + rows
            self._seconds = self._seconds * kept + took_s
        self._last_s = now_s if others_wait else None

    def note_empty(self) -> None:
        """Take in that what waited left otherwise, or can't leave now."""
        self._last_s = None

    def seconds_for(self, rows: float) -> float | None:
        """How long so many rows take; None if that isn't known yet."""
        return rows * self._seconds / self._rows if self._rows and self._seconds else None


RETRY_AFTER_LIMIT_S: Final = 60

RETRY_AFTER_UNKNOWN_S: Final = 1
"""Where nothing has left the queue yet that would tell."""

ROWS_OF_ALL: Final = "server.max_queue_size"

BYTES_OF_ALL: Final = "server.max_queue_bytes"

GAVE_WAY: Final = "; the request gave way to one whose class or model has less than its share"


class QueueBudget:
    """What may wait in a gateway worker, over all its deployments.

    Each deployment is sure of an equal part of it, or of what it may have itself if that is less. Beyond its part it
    may use what the others don't, and gives it back when they need it.

    Args:
        max_rows: `server.max_queue_size`, this worker's share.
        max_bytes: `server.max_queue_bytes`, this worker's share.
    """

    def __init__(self, max_rows: int = 8192, max_bytes: int = 1 << 30) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.waiting = Waiting()
        self._members: list[Admission] = []

    def join(self, member: Admission) -> None:
        """Take in a deployment."""
        self._members.append(member)

    def leave(self, member: Admission) -> None:
        """Forget a deployment; its queue must be empty."""
        if member in self._members:
            self._members.remove(member)

    def part(self) -> tuple[int, int]:
        """Rows and bytes that every deployment is sure of."""
        count = len(self._members)
        return self.max_rows // count, self.max_bytes // count

    def reclaim(self, member: Admission, rows: int, held_bytes: int) -> None:
        """Have others give back what they have beyond their parts, as far as a request of this member needs it."""
        part_rows, part_bytes = self.part()
        waiting = self.waiting
        others = [one for one in self._members if one is not member]
        for other in sorted(others, key=lambda one: one.queue.rows, reverse=True):
            over = min(waiting.rows + rows - self.max_rows, other.queue.rows - part_rows)
            if over > 0:
                other.displace(other.queue.last_to_go(over, 0), ROWS_OF_ALL)
        for other in sorted(others, key=lambda one: one.queue.held_bytes, reverse=True):
            over = min(waiting.held_bytes + held_bytes - self.max_bytes, other.queue.held_bytes - part_bytes)
            if over > 0:
                other.displace(other.queue.last_to_go(0, over), BYTES_OF_ALL)


class Admission:
    """Admits requests to one deployment's queue.

    Args:
        name: the deployment's.
        room: what may wait of all deployments.
        drop: ends the request that an item belongs to, with an error, and removes all that waits of it.
    """

    def __init__(self, name: str, room: QueueBudget, drop: Callable[[Item, QueueFull], None]) -> None:
        self._name = name
        self._room = room
        self._drop = drop
        self.queue = BatchQueue(1, total=room.waiting)
        self.rate = DrainRate()
        self.limit = 1
        """Rows that may wait, of this deployment."""
        room.join(self)

    def close(self) -> None:
        """Give up its part of the room; the queue must be empty."""
        self._room.leave(self)

    def check(self, rows: int, held_bytes: int, priority: int) -> None:
        """Refuse a request that there is no room for; have others give way where their share is exceeded.

        Args:
            rows: the request's.
            held_bytes: of its tensors, as they would wait.
            priority: 1 is the most urgent; 0 stands for the default.

        Raises:
            BadRequest: it has more rows than ever fit.
            BodyTooLarge: it has more bytes than ever fit.
            QueueFull: there is no room now.
        """
        queue, room = self.queue, self._room
        if not queue.rows:
            self.rate.note_empty()
        if (
            queue.rows + rows <= self.limit
            and room.waiting.rows + rows <= room.max_rows
            and room.waiting.held_bytes + held_bytes <= room.max_bytes
        ):
            return
        self._check_possible(rows, held_bytes)
        part_rows, part_bytes = room.part()
        if room.waiting.held_bytes + held_bytes > room.max_bytes and queue.held_bytes + held_bytes > part_bytes:
            raise self._full(BYTES_OF_ALL)
        limit, bound = self.limit, None
        if room.waiting.rows + rows > room.max_rows and max(queue.rows, part_rows) < limit:
            limit, bound = max(queue.rows, part_rows), ROWS_OF_ALL
        if queue.rows + rows > limit:
            found = queue.giving_way(priority, rows, limit)
            if found is None:
                raise self._full(bound)
            self.displace(found, bound)
        room.reclaim(self, rows, held_bytes)

    def displace(self, items: list[Item], bound: str | None) -> None:
        """End the requests that these items belong to, with 429.

        Args:
            items: which wait here.
            bound: the field of the configuration that says so, where it isn't this deployment's own.
        """
        for item in items:
            if item.alive:  # not gone with another part of its request
                self._drop(item, self._full(bound, GAVE_WAY))

    def _full(self, bound: str | None = None, note: str = "") -> QueueFull:
        if bound is None:
            what = f"the queue is full: {self.queue.rows} of {self.limit} rows wait (max_queue_size)"
        elif bound == ROWS_OF_ALL:
            waiting = f"{self._room.waiting.rows} of {self._room.max_rows} rows wait"
            what = f"the server's queues are full: {waiting} ({bound}), {self.queue.rows} of them here"
        else:
            waiting = f"{self._room.waiting.held_bytes} of {self._room.max_bytes} bytes wait"
            what = f"the server's queues are full: {waiting} ({bound}), {self.queue.held_bytes} of them here"
        return QueueFull(f"model `{self._name}`: {what}{note}", retry_after_s=self._retry_after_s())

    def _retry_after_s(self) -> int:
        """When what waits now will be gone. That is so for every class: who is refused has its share of the queue."""
        wait_s = self.rate.seconds_for(self.queue.rows)
        if wait_s is None:
            return RETRY_AFTER_UNKNOWN_S
        return max(1, min(RETRY_AFTER_LIMIT_S, math.ceil(wait_s)))

    def _check_possible(self, rows: int, held_bytes: int) -> None:
        limit, field = min((self.limit, f"max_queue_size of model `{self._name}`"), (self._room.max_rows, ROWS_OF_ALL))
        if rows > limit:
            raise BadRequest(
                f"inputs: expected at most {limit} rows ({field}, over its gateway workers), got {rows}; send them in "
                "several requests",
                field="inputs",
            )
        if held_bytes > self._room.max_bytes:
            raise BodyTooLarge(
                f"inputs: expected at most {self._room.max_bytes} bytes ({BYTES_OF_ALL}, over the gateway workers), "
                f"got {held_bytes}; send them in several requests"
            )


FINISHES: Final = 64
"""How many of the last ends a rate is taken from."""

RECENT_S: Final = 120.0
"""Ends before that say nothing of now."""


class FinishRate:
    """How fast sequences end, to say when it is worth another try."""

    def __init__(self) -> None:
        self._finished_s: deque[float] = deque(maxlen=FINISHES)

    def note(self, now_s: float) -> None:
        """A sequence has left its place to another, whatever ended it."""
        self._finished_s.append(now_s)

    def wait_s(self, waiting: int, now_s: float, share: float = 1.0) -> int:
        """Until so many more have ended, in whole seconds from 1 to 60.

        Args:
            waiting: how many.
            now_s: the loop's time.
            share: which part of all that may end are noted here.
        """
        finished_s = self._finished_s
        while finished_s and finished_s[0] < now_s - RECENT_S:
            finished_s.popleft()
        if len(finished_s) < 2:
            return 1
        each_s = (finished_s[-1] - finished_s[0]) / (len(finished_s) - 1)  # not until now: it may have been idle since
        return max(1, min(RETRY_AFTER_LIMIT_S, math.ceil(waiting * each_s * share)))
