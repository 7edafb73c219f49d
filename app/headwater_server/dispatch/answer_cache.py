"""Answers identical requests of a gateway worker to a deployment from one computation: concurrent requests share the
computation, later requests get the answer from the worker's memory."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Literal, NamedTuple

import msgspec

from headwater_server.codecs.tensors import Answer, InferRequest, Outputs, RawTensor
from headwater_server.control.routing import CacheShare
from headwater_server.dispatch.collector import PLAIN, WHOLE, Collector
from headwater_server.dispatch.deadlines import Deadlines
from headwater_server.dispatch.pending import held_bytes
from headwater_server.dispatch.queue import DEFAULT_PRIORITY
from headwater_server.errors import Cancelled, DeadlineExceeded, QueueFull
from headwater_server.telemetry.recorder import CacheMeter

__all__ = ["AnswerCache", "KeptAnswers", "Waiter"]

ENTRY_BYTES: Final = 1024
TENSOR_BYTES: Final = 512
"""`ENTRY_BYTES` bounds the memory of an entry without its tensors, `TENSOR_BYTES` that of a tensor without its data."""
THREAD_BYTES: Final = 256 * 1024
"""Inputs of at least this size are hashed in a thread: hashing this size takes a quarter of a millisecond."""

_OWN_ENDS: Final = (asyncio.CancelledError, Cancelled, DeadlineExceeded, QueueFull)
"""Errors with a cause in the request's client, deadline or place in the queue: an identical request may still
succeed."""


class _KeptAnswer(NamedTuple):
    outputs: Outputs
    size_bytes: int
    ends_s: float
    """Monotonic time from which the answer isn't used any more; infinite without ``ttl_s``."""


class KeptAnswers:
    """Keeps answers up to a number of bytes; the least recently used answers are evicted first.

    Args:
        share: the worker's share of the deployment's cache.
        meter: counts evictions.
    """

    def __init__(self, share: CacheShare, meter: CacheMeter) -> None:
        self.size_bytes = 0
        """Bytes of all entries, an upper bound of their bookkeeping included."""
        self._share = share
        self._meter = meter
        self._entries: OrderedDict[bytes, _KeptAnswer] = OrderedDict()
        """Entries by key, the least recently used first."""
        self._secret = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)

    def limit(self, share: CacheShare) -> None:
        """Adopt another share: evict answers that no longer fit, or all answers if ``per_key`` changes. Kept answers
        keep their ``ttl_s``."""
        if share.per_key != self._share.per_key:
            self.clear()
        self._share = share
        self._evict()

    def key(self, request: InferRequest) -> bytes:
        """A digest of everything that a request's answer depends on; takes about 1 ms for each MiB of inputs.

        The digest has a secret key: a client that could make two requests with the same digest could read another
        client's answer.
        """
        inputs = sorted(request.inputs.items())
        head = repr((
            request.owner if self._share.per_key else "",
            request.rows,
            request.heads,
            sorted(output.name for output in request.outputs),
            sorted(request.batch_parameters.items()),
            sorted(request.row_parameters.items()),
            [(name, tensor.datatype, tensor.shape, len(tensor.data)) for name, tensor in inputs],
        )).encode()  # fmt: skip
        digest = hashlib.blake2b(b"%d:" % len(head), digest_size=32, key=self._secret)
        digest.update(head)
        for _, tensor in inputs:
            digest.update(tensor.data)
        return digest.digest()

    def get(self, key: bytes) -> Outputs | None:
        """The outputs that are kept under a key; None if no outputs are kept, or they have expired. The caller must not
        change them."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.ends_s < time.monotonic():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry.outputs

    def put(self, key: bytes, outputs: Outputs) -> None:
        """Keep outputs, unless they are larger than the worker's share. Data in a memoryview is copied, since it may be
        part of a larger piece of memory. Outputs that were kept under the key before are dropped."""
        self._drop(key)
        size_bytes = ENTRY_BYTES + sum(
            [TENSOR_BYTES + len(name) + len(tensor.data) for name, tensor in outputs.items()]
        )
        if size_bytes > self._share.max_bytes:
            return
        kept = {name: RawTensor(tensor.datatype, tensor.shape, bytes(tensor.data)) for name, tensor in outputs.items()}
        ends_s = time.monotonic() + self._share.ttl_s if self._share.ttl_s else float("inf")
        self._entries[key] = _KeptAnswer(kept, size_bytes, ends_s)
        self.size_bytes += size_bytes
        self._evict()

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.size_bytes = 0

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= entry.size_bytes

    def _evict(self) -> None:
        while self.size_bytes > self._share.max_bytes:
            _, entry = self._entries.popitem(last=False)
            self.size_bytes -= entry.size_bytes
            self._meter.evictions.add()


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
        """The decision that ended the wait: ``take`` the shared answer (also without a decision), ``compute`` the
        answer for all requests that still wait, or compute it ``alone`` for this request only."""
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


class _Computation:
    """A computation, and the requests that wait for its answer, in the order of their arrival."""

    def __init__(self) -> None:
        self.waiters: dict[Waiter, None] = {}
        self.computing: list[InferRequest] = []
        """The requests being computed; several if a later request was more urgent than the earlier requests."""

    def resolve(self, outputs: Outputs) -> None:
        """Give all waiting requests the answer."""
        for waiter in self.waiters:
            waiter.decide("take", outputs)

    def split(self) -> None:
        """Have each waiting request be computed separately."""
        for waiter in self.waiters:
            waiter.decide("alone")

    def promote(self) -> bool:
        """Have the most urgent waiting request be computed, among equally urgent requests the first. Returns whether a
        request was waiting."""
        waiting = [waiter for waiter in self.waiters if not waiter.collector.is_done]
        if waiting:
            min(waiting, key=lambda waiter: _urgency(waiter.request)).decide("compute")
        return bool(waiting)


class AnswerCache:
    """Answers one deployment's requests from the cache, from a computation in flight, or by a new computation.

    If the only request being computed is cancelled, loses its client or its place in the queue, or passes its deadline,
    the most urgent waiting request is computed. If the computation fails otherwise, or heads are omitted from the
    answer, each waiting request is computed separately, as without a cache: they may share a batch, and the failure of
    the model or its replica may not repeat. A request that is more urgent than all requests being computed, while these
    still wait in the queue, is computed too; the first answer goes to all waiting requests.

    Args:
        share: the worker's share of the deployment's cache.
        meter: counts hits, misses, shared answers and evictions.
        waiting: the requests that wait for an identical request; this object adds and removes them.
        version: identifies the model that computes now; answers of another version are not used.
        is_queued: whether a request that is to be computed may still wait in a queue.
    """

    def __init__(
        self,
        share: CacheShare,
        meter: CacheMeter,
        waiting: set[Waiter],
        version: Callable[[], Hashable],
        is_queued: Callable[[InferRequest], bool],
    ) -> None:
        self._is_queued = is_queued
        self.kept = KeptAnswers(share, meter)
        self._meter = meter
        self._waiting = waiting
        self._version = version
        self._version_kept: Hashable = None
        self._computations: dict[bytes, _Computation] = {}

    def clear(self) -> None:
        """Forget all answers. The answers of computations in flight go to the requests that wait for them, and are not
        kept."""
        self.kept.clear()
        self._computations = {}

    async def answer(self, request: InferRequest, timeout_s: float, compute: Callable[[], Awaitable[Answer]]) -> Answer:
        """Answer a request. The returned answer says in ``cache`` where it is from.

        Args:
            request: the request.
            timeout_s: the deployment's timeout.
            compute: computes the answer.

        Raises:
            HeadwaterError: the errors of ``compute``; while the request waits for an identical request,
                `DeadlineExceeded` or the error of an unload.
        """
        if held_bytes(request.inputs) < THREAD_BYTES:
            key = self.kept.key(request)
        else:
            key = await asyncio.to_thread(self.kept.key, request)
        version = self._version()
        if version != self._version_kept:
            self.clear()
            self._version_kept = version
        outputs = self.kept.get(key)
        if outputs is not None:
            self._meter.hits.add()
            return Answer(outputs, cache="hit")
        computation = self._computations.get(key)
        if computation is None:
            computation = self._computations[key] = _Computation()
            return await self._compute(key, computation, request, compute)
        if self._overtakes(request, computation):
            return await self._compute(key, computation, request, compute)
        waiter = Waiter(request, timeout_s)
        answer = await self._wait(key, computation, waiter)
        if waiter.turn == "take":
            self._meter.shared.add()
            return msgspec.structs.replace(answer, cache="shared")
        return await self._compute(key, computation if waiter.turn == "compute" else _Computation(), request, compute)

    def _overtakes(self, request: InferRequest, computation: _Computation) -> bool:
        """Whether a request is more urgent than all requests being computed, and these still wait in a queue."""
        computing = computation.computing  # empty while a request that waited is about to be computed
        most_urgent = min(map(_urgency, computing), default=0)
        return _urgency(request) < most_urgent and all(map(self._is_queued, computing))

    async def _wait(self, key: bytes, computation: _Computation, waiter: Waiter) -> Answer:
        computation.waiters[waiter] = None
        self._waiting.add(waiter)
        try:
            return await waiter.collector.whole()
        except BaseException:
            if waiter.turn == "compute":  # the client left just before the computation
                self._promote(key, computation)
            raise
        finally:
            waiter.close()
            self._waiting.discard(waiter)
            computation.waiters.pop(waiter, None)

    async def _compute(
        self, key: bytes, computation: _Computation, request: InferRequest, compute: Callable[[], Awaitable[Answer]]
    ) -> Answer:
        self._meter.misses.add()
        computation.computing.append(request)
        try:
            answer = await compute()
        except _OWN_ENDS:
            computation.computing.remove(request)
            if not computation.computing:
                self._promote(key, computation)
            raise
        except BaseException:
            self._end(key, computation)
            computation.split()
            raise
        is_current = self._end(key, computation)
        if answer.omitted:
            computation.split()
        else:
            computation.resolve(answer.outputs)
            if is_current:
                self.kept.put(key, answer.outputs)
        return msgspec.structs.replace(answer, cache="miss")

    def _promote(self, key: bytes, computation: _Computation) -> None:
        if not computation.promote():
            self._end(key, computation)

    def _end(self, key: bytes, computation: _Computation) -> bool:
        """End a computation. Returns whether it was registered under the key: it is shared, and of the present
        version."""
        if self._computations.get(key) is not computation:
            return False
        del self._computations[key]
        return True


def _urgency(request: InferRequest) -> int:
    """The request's priority; 1 is the most urgent."""
    return request.priority or DEFAULT_PRIORITY
