"""When rows that wait leave, to which replica, and which of them may share a batch.

A model that pads computes a batch of n rows as if each were as long as the longest. Lengths are divided into classes
of which each reaches from a length to ``1 / (1 - max_padding)`` times it, so that of what is computed for the rows of
one class at most ``max_padding`` is padding: "bucketing by sequence length".
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from app.codecs.tensors import RawTensor, longest_row
from app.control.routing import DeploymentRoute
from app.dispatch.admission import Admission
from app.dispatch.deadlines import TIMER_RESOLUTION_S
from app.dispatch.losses import Retries
from app.dispatch.pool import ReplicaCalls
from app.dispatch.queue import Item

__all__ = ["Batching", "GatherClock", "LengthClasses"]

GOOD_PART: Final = 4
"""A busy replica gets no call of less than a batch divided by this,"""

GOOD_ROWS: Final = 8
"""nor of fewer rows than this: small batches are filled."""


class Batching:
    """Decides when rows that wait become a call, and of which replica.

    With a replica idle rows leave at once; otherwise they gather until a call comes back.

    Args:
        route: the deployment.
        admission: has the queue.
        retries: what replicas were lost with, which is computed alone.
        replicas: those connected, by id.
        start: gives a replica a batch; see `app.dispatch.calls.Calls.start`.
        fitting: cuts an item, which doesn't wait, to the batches that are allowed now.
        clock: runs while rows gather.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        admission: Admission,
        retries: Retries,
        replicas: Mapping[str, ReplicaCalls],
        start: Callable[[ReplicaCalls, list[Item], int], None],
        fitting: Callable[[Item], list[Item]],
        clock: GatherClock,
    ) -> None:
        self._route = route
        self._queue = admission.queue
        self._rate = admission.rate
        self._retries = retries
        self._replicas = replicas
        self._start = start
        self._fitting = fitting
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        self._delay: asyncio.TimerHandle | None = None

    def update(self, route: DeploymentRoute) -> None:
        """Take in a new state of the deployment."""
        self._route = route

    def close(self) -> None:
        """Nothing leaves any more for having waited long enough."""
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None

    def schedule(self) -> None:
        """Dispatch at the end of this turn of the event loop, so that requests that arrived together go together."""
        if not self._is_due and (self._queue.rows or self._retries):
            self._is_due = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_due = False
        if self._retries:
            self._start_alone()
        self._start_batches()
        if self._retries and not self._queue.rows:  # it was others' turn, but they went elsewhere
            self._start_alone()

    def _start_alone(self) -> None:
        """Give what replicas were lost with to the replica that is set aside for it, if that is its turn."""
        found = self._retries.next(self._replicas.values(), has_others=self._queue.rows > 0)
        if found is None:
            return
        replica, item = found
        first, *rest = self._fitting(item)
        self._retries.push_back(rest)
        self._start(replica, [first], self._clock.read_ns())

    def _start_batches(self) -> None:
        queue, route = self._queue, self._route
        streams = route.signature is not None and route.signature.streams
        while queue.rows:
            replica = self._choose()
            if replica is None:
                break
            if not streams:
                is_busy = replica.calls >= route.instances
                if (is_busy and not queue.next_has(self._worth_a_call(replica))) or (
                    route.max_queue_delay_ms and not self._delay_is_over()
                ):
                    self._clock.run()
                    return
            if replica is self._retries.aside:
                self._retries.note_batch(replica)
            waiting = queue.rows
            batch = queue.pop()
            self._rate.note(waiting - queue.rows, self._loop.time(), others_wait=queue.rows > 0)
            self._start(replica, batch, self._clock.read_ns())
        self._clock.stop()

    def _choose(self) -> ReplicaCalls | None:
        """The replica with the fewest outstanding rows, among those that may have another call; first those with an
        instance that is idle."""
        instances = self._route.instances
        best: ReplicaCalls | None = None
        aside = self._retries.aside
        for replica in self._replicas.values():
            if (
                replica.calls < self._route.max_in_flight
                and not replica.is_lost
                and not replica.is_retiring
                and (replica is not aside or self._retries.admits(replica))
                and (best is None or (replica.calls >= instances, replica.rows) < (best.calls >= instances, best.rows))
            ):
                best = replica
        return best

    def _worth_a_call(self, replica: ReplicaCalls) -> int:
        """How many rows a replica that is busy gets: a batch, or else as many as it has, and a good part of a batch.

        Where as many connections as a batch has rows ask again and again, one half is computed while the other half's
        answers and next requests are on their way; waiting for a full batch they would do both together, in turns.
        """
        full = self._queue.max_batch_size
        return min(full, max(full // GOOD_PART, GOOD_ROWS, replica.rows))

    def _delay_is_over(self) -> bool:
        """Whether the first rows have waited for company as long as they should; if not, looks again when they have."""
        left_s = self._queue.oldest_s() + self._route.max_queue_delay_ms / 1000 - self._loop.time()
        if left_s < TIMER_RESOLUTION_S or self._queue.next_is_full():
            return True
        if self._delay is None:
            self._delay = self._loop.call_later(left_s, self._on_delay)
        return False

    def _on_delay(self) -> None:
        self._delay = None
        self._dispatch()


class GatherClock:
    """Runs while rows gather: a replica could have a call, but the batching policy waits for more rows.

    Who waits from one reading of it to another has gathered for the difference; the rest of the time no replica was
    free.
    """

    __slots__ = ("_since_ns", "_total_ns")

    def __init__(self) -> None:
        self._total_ns = 0
        self._since_ns = 0
        """0: it stands."""

    def run(self) -> None:
        """From now on rows gather."""
        if not self._since_ns:
            self._since_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """From now on none do."""
        if self._since_ns:
            self._total_ns += time.perf_counter_ns() - self._since_ns
            self._since_ns = 0

    def read_ns(self) -> int:
        """What it shows."""
        return self._total_ns + (time.perf_counter_ns() - self._since_ns if self._since_ns else 0)


class LengthClasses:
    """Classes of rows by the bytes of their BYTES elements, the four that each travels with included.

    Tokens, which a model pads to, aren't known here; in texts of one kind there are so many bytes to each.

    Args:
        max_padding: above 0, below 1.
    """

    __slots__ = ("_per_e",)

    def __init__(self, max_padding: float) -> None:
        self._per_e = -1 / math.log1p(-max_padding)
        """Classes between a length and e times it."""

    def of(self, inputs: Mapping[str, RawTensor]) -> int:
        """The class of a request's rows: that of the longest. 0 if there is nothing that varies."""
        length = 0
        for tensor in inputs.values():
            if tensor.datatype == "BYTES":
                length += len(tensor.data) if tensor.shape[0] == 1 else longest_row(tensor)
        return int(math.log(length) * self._per_e) if length else 0
