"""Decides when waiting rows leave, which replica they go to, and which rows may share a batch.

A model that pads computes a batch as if each row were as long as the longest row. Each length class therefore reaches
from a length to ``1 / (1 - max_padding)`` times that length, so that at most ``max_padding`` of a batch of one class is
padding: "bucketing by sequence length".
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from headwater_server.codecs.tensors import RawTensor, longest_row
from headwater_server.control.routing import DeploymentRoute
from headwater_server.deadline_timer import TIMER_RESOLUTION_S
from headwater_server.dispatch.admission import Admission
from headwater_server.dispatch.calls import Calls
from headwater_server.dispatch.choice import Choice
from headwater_server.dispatch.losses import Retries
from headwater_server.dispatch.pending import Part
from headwater_server.dispatch.pool import ReplicaCalls

__all__ = ["RAGGED_PADDING", "BatchingPolicy", "GatherClock", "length_class"]

GOOD_PART: Final = 4
"""A busy replica gets no call with fewer rows than ``max_batch_size`` divided by this number."""

GOOD_ROWS: Final = 8
"""A busy replica gets no call with fewer rows than this, so that small batches are filled; a full batch suffices if
``max_batch_size`` is less."""


RAGGED_PADDING: Final = 0.5
"""`length_class`'s ``max_padding`` for a model with ragged inputs whose deployment sets none."""


class BatchingPolicy:
    """Decides when waiting rows become a call, and to which replica.

    If a replica has an idle instance, rows leave at once; with ``max_queue_delay_ms``, they leave after this delay or
    as a full batch. Otherwise they gather until a call returns, or until enough rows wait for a call in advance
    (`_worth_a_call`). Rows of streams leave as soon as a replica may have another call.

    ``fitting`` cuts a part, which must be in no queue, into pieces of at most the present batch size.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        admission: Admission[Part],
        retries: Retries,
        replicas: Mapping[str, ReplicaCalls],
        calls: Calls,
        fitting: Callable[[Part], list[Part]],
    ) -> None:
        self.clock = GatherClock()
        self._queue = admission.queue
        self._rate = admission.rate
        self._retries = retries
        self._choice = Choice(replicas)
        self._calls = calls
        self._fitting = fitting
        self._loop = asyncio.get_running_loop()
        self._is_due = False
        self._delay: asyncio.TimerHandle | None = None
        self.update(route)

    def update(self, route: DeploymentRoute) -> None:
        """Adopt a new state of the deployment."""
        self.route = route
        self._at_once = route.at_once
        self._choice.bound(route.max_in_flight, self._at_once)

    def note(self, replica: ReplicaCalls) -> None:
        """Update the choice of replicas after a change of a replica's calls, report or eligibility."""
        self._choice.note(replica)

    def close(self) -> None:
        """Cancel the timer."""
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None

    def schedule(self) -> None:
        """Dispatch in the next turn of the event loop, so that requests that arrived together leave together. Nothing
        happens if no rows wait."""
        if not self._is_due and (self._queue.rows or self._retries):
            self._is_due = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_due = False
        if self._retries:
            self._start_alone()
        self._start_batches()
        if self._retries and not self._queue.rows:  # batches had the turn, but left for another replica
            self._start_alone()

    def _start_alone(self) -> None:
        """Give the next retry to the replica that is set aside for retries, if it is the retries' turn."""
        retry = self._retries.next(self._choice.least, has_others=self._queue.rows > 0)
        if retry is None:
            return
        replica, part = retry
        first, *rest = self._fitting(part)
        self._retries.push_back(rest)
        self._calls.start(replica, [first], self.clock.read_ns())

    def _start_batches(self) -> None:
        queue, route = self._queue, self.route
        streams = route.signature is not None and route.signature.streams
        while queue.rows:
            replica = self._choose()
            if replica is None:
                break
            if not streams:
                is_busy = replica.calls >= self._at_once
                if (is_busy and not queue.next_has(self._worth_a_call(replica))) or (
                    route.max_queue_delay_ms and not self._delay_is_over()
                ):
                    self.clock.run()
                    return
            if replica is self._retries.aside:
                self._retries.note_batch()
            waiting = queue.rows
            batch = queue.pop()
            self._rate.note(waiting - queue.rows, self._loop.time(), others_wait=queue.rows > 0)
            self._calls.start(replica, batch, self.clock.read_ns())
        self.clock.stop()

    def _choose(self) -> ReplicaCalls | None:
        """The least loaded replica that may have another call; replicas with an idle instance come first. None: no
        replica may have another call."""
        aside, choice = self._retries.aside, self._choice
        best = choice.best(aside)
        if aside is None or not aside.is_eligible or not self._retries.admits(aside):
            return best
        return aside if best is None or choice.weight(aside) < choice.weight(best) else best

    def _worth_a_call(self, replica: ReplicaCalls) -> int:
        """The rows that make a call to a busy replica worthwhile: as many as it has, and a good part of a batch, but at
        most a full batch.

        Suppose that as many connections as a batch has rows send requests without pause. Then half of the rows are
        computed while the answers and next requests of the other half travel. If calls waited for full batches,
        computing and travelling would alternate.
        """
        full = self._queue.max_batch_size
        return min(full, max(full // GOOD_PART, GOOD_ROWS, replica.rows))

    def _delay_is_over(self) -> bool:
        """Whether the oldest rows have waited ``max_queue_delay_ms``, or a full batch waits; if not, sets a timer that
        dispatches when the delay is over."""
        left_s = self._queue.oldest_s() + self.route.max_queue_delay_ms / 1000 - self._loop.time()
        if left_s < TIMER_RESOLUTION_S or self._queue.next_has(self._queue.max_batch_size):
            return True
        if self._delay is None:
            self._delay = self._loop.call_later(left_s, self._on_delay)
        return False

    def _on_delay(self) -> None:
        self._delay = None
        self._dispatch()


class GatherClock:
    """Runs while rows gather: a replica could have a call, but the batching policy waits for more rows.

    For a row that waited between two readings, their difference is the time that it spent gathering; for the rest of
    its wait no replica was free.
    """

    def __init__(self) -> None:
        self._total_ns = 0
        self._since_ns = 0
        """Time at which the clock was started; 0 if it is stopped."""

    def run(self) -> None:
        """Start the clock if it is stopped."""
        if not self._since_ns:
            self._since_ns = time.perf_counter_ns()

    def stop(self) -> None:
        """Stop the clock if it runs."""
        if self._since_ns:
            self._total_ns += time.perf_counter_ns() - self._since_ns
            self._since_ns = 0

    def read_ns(self) -> int:
        """Nanoseconds for which the clock has run so far."""
        return self._total_ns + (time.perf_counter_ns() - self._since_ns if self._since_ns else 0)


def length_class(inputs: Mapping[str, RawTensor], max_padding: float, ragged: Collection[str] = ()) -> int:
    """The length class of a request's rows: by the bytes of the longest row, added up over the BYTES inputs, and by the
    sizes of the ``ragged`` inputs; 0 if there are no such inputs.

    A length includes the four bytes in front of each element. A model pads by tokens, which are unknown in the gateway;
    texts of the same kind have similar numbers of bytes per token.
    """
    length = 0
    for name, tensor in inputs.items():
        if name in ragged:
            length += tensor.shape[1]
        elif tensor.datatype == "BYTES":
            length += len(tensor.data) if tensor.shape[0] == 1 else longest_row(tensor)
    return int(math.log(length) / -math.log1p(-max_padding)) if length else 0
