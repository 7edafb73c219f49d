"""Computes identical concurrent requests once, and answers later identical requests from the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Literal

import msgspec

from headwater_server.codecs.tensors import Answer, InferRequest, Outputs
from headwater_server.dispatch.answer_cache import AnswerCache
from headwater_server.dispatch.collector import PLAIN, WHOLE, Collector
from headwater_server.dispatch.deadlines import Deadlines
from headwater_server.dispatch.pending import held_bytes
from headwater_server.dispatch.queue import DEFAULT_PRIORITY
from headwater_server.errors import Cancelled, DeadlineExceeded, QueueFull
from headwater_server.telemetry.recorder import CacheMeter

__all__ = ["Flights", "Waiter"]

THREAD_BYTES: Final = 256 * 1024
"""Inputs of at least this size are hashed in a thread: hashing this size takes a quarter of a millisecond."""

_OWN_ENDS: Final = (asyncio.CancelledError, Cancelled, DeadlineExceeded, QueueFull)
"""Errors with a cause in the request's client, deadline or priority: an identical request may still succeed."""


class Waiter:
    """A request that waits for the answer to an identical request.

    Args:
        request: the request.
        timeout_s: the deployment's timeout.
    """

    def __init__(self, request: InferRequest, timeout_s: float) -> None:
        self.request = request
        self.collector = Collector(PLAIN, is_stream=False)
        self.turn: Literal["take", "compute", "alone"] = "take"
        """The decision that ended the wait: ``take`` the shared answer, ``compute`` it for all requests that still
        wait, or compute it ``alone`` for this request only."""
        self._deadlines = Deadlines(
            self.collector, timeout_s, request.timeout_us, where=lambda: "while an equal request was computed"
        )

    def decide(self, turn: Literal["take", "compute", "alone"], outputs: Outputs | None = None) -> None:
        """End the wait, unless it has ended; ``outputs`` are the shared answer."""
        if not self.collector.is_done:
            self.turn = turn
            self.collector.decide(WHOLE, outputs or {})

    def close(self) -> None:
        """Reduce the request's timeout to the remaining time, in case the request is computed now."""
        self.request.timeout_us = max(1, int(1e6 * self._deadlines.left_s(WHOLE)))
        self._deadlines.close()


class _Flight:
    """A computation, and the requests that wait for its answer, in the order of their arrival."""

    def __init__(self) -> None:
        self.waiters: dict[Waiter, None] = {}
        self.computing: list[InferRequest] = []
        """The requests being computed; several if a later request was more urgent than the earlier requests."""

    def land(self, outputs: Outputs) -> None:
        """Give all waiting requests the answer."""
        for waiter in self.waiters:
            waiter.decide("take", outputs)

    def dissolve(self) -> None:
        """Have each waiting request be computed separately."""
        for waiter in self.waiters:
            waiter.decide("alone")

    def hand_on(self) -> bool:
        """Have the most urgent waiting request be computed, among equally urgent requests the first. Returns whether a
        request was waiting."""
        waiting = [waiter for waiter in self.waiters if not waiter.collector.is_done]
        if waiting:
            min(waiting, key=lambda waiter: _urgency(waiter.request)).decide("compute")
        return bool(waiting)


class Flights:
    """Answers one deployment's requests from the cache, from a computation in flight, or by a new computation.

    If a computed request is cancelled, loses its client or its place in the queue, or passes its deadline, the most
    urgent waiting request is computed. If the computation fails otherwise, or heads are omitted from the answer, each
    waiting request is computed separately, as without a cache: they may share a batch, and the failure of the model or
    its replica may not repeat. A request that is more urgent than all requests being computed, while these still wait
    in the queue, is computed too; the first answer goes to all waiting requests.

    Args:
        cache: the answers that are kept.
        meter: counts hits, misses and shared answers.
        waiting: the requests that wait for an identical request; this object adds and removes them.
        version: identifies the model that computes now; answers of another version are not used.
        is_queued: whether a request that is to be computed may still wait in a queue.
    """

    def __init__(
        self,
        cache: AnswerCache,
        meter: CacheMeter,
        waiting: set[Waiter],
        version: Callable[[], Hashable],
        is_queued: Callable[[InferRequest], bool],
    ) -> None:
        self._is_queued = is_queued
        self.cache = cache
        self._meter = meter
        self._waiting = waiting
        self._version = version
        self._version_kept: Hashable = None
        self._flights: dict[bytes, _Flight] = {}

    def clear(self) -> None:
        """Forget all answers. The answers of computations in flight go to the requests that wait for them, and are not
        kept."""
        self.cache.clear()
        self._flights = {}

    async def answer(self, request: InferRequest, timeout_s: float, compute: Callable[[], Awaitable[Answer]]) -> Answer:
        """Answer a request. The returned answer says in ``cache`` where it is from.

        Args:
            request: the request.
            timeout_s: the deployment's timeout.
            compute: computes the answer.

        Raises:
            HeadwaterError: the errors of ``compute``; `DeadlineExceeded` or `Cancelled` while it waits for an identical
                request.
        """
        if held_bytes(request.inputs) < THREAD_BYTES:
            key = self.cache.key(request)
        else:
            key = await asyncio.to_thread(self.cache.key, request)
        version = self._version()
        if version != self._version_kept:
            self.clear()
            self._version_kept = version
        outputs = self.cache.get(key)
        if outputs is not None:
            self._meter.hits.add()
            return Answer(outputs, cache="hit")
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            return await self._compute(key, flight, request, compute)
        if self._overtakes(request, flight):
            return await self._compute(key, flight, request, compute)
        waiter = Waiter(request, timeout_s)
        answer = await self._wait(key, flight, waiter)
        if waiter.turn == "take":
            self._meter.shared.add()
            return msgspec.structs.replace(answer, cache="shared")
        return await self._compute(key, flight if waiter.turn == "compute" else _Flight(), request, compute)

    def _overtakes(self, request: InferRequest, flight: _Flight) -> bool:
        """Whether a request is more urgent than all requests that a flight computes, and these still wait in a
        queue."""
        computing = flight.computing  # empty while a request that waited is about to be computed
        most_urgent = min(map(_urgency, computing), default=0)
        return _urgency(request) < most_urgent and all(map(self._is_queued, computing))

    async def _wait(self, key: bytes, flight: _Flight, waiter: Waiter) -> Answer:
        flight.waiters[waiter] = None
        self._waiting.add(waiter)
        try:
            return await waiter.collector.whole()
        except BaseException:
            if waiter.turn == "compute":  # the client left just before the computation
                self._hand_on(key, flight)
            raise
        finally:
            waiter.close()
            self._waiting.discard(waiter)
            flight.waiters.pop(waiter, None)

    async def _compute(
        self, key: bytes, flight: _Flight, request: InferRequest, compute: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        self._meter.misses.add()
        flight.computing.append(request)
        try:
            answer = await compute()
        except _OWN_ENDS:
            flight.computing.remove(request)
            if not flight.computing:
                self._hand_on(key, flight)
            raise
        except BaseException:
            self._end(key, flight)
            flight.dissolve()
            raise
        is_current = self._end(key, flight)
        if answer.omitted:
            flight.dissolve()
        else:
            flight.land(answer.outputs)
            if is_current:
                self.cache.put(key, answer.outputs)
        return msgspec.structs.replace(answer, cache="miss")

    def _hand_on(self, key: bytes, flight: _Flight) -> None:
        if not flight.hand_on():
            self._end(key, flight)

    def _end(self, key: bytes, flight: _Flight) -> bool:
        """End a flight. Returns whether it was registered under the key: it is of the present version and shared."""
        if self._flights.get(key) is not flight:
            return False
        del self._flights[key]
        return True


def _urgency(request: InferRequest) -> int:
    """The request's priority; 1 is the most urgent."""
    return request.priority or DEFAULT_PRIORITY
