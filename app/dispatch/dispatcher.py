"""One deployment in a gateway worker: admission, batching, and which replica has which call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Hashable
from typing import cast

from app.codecs.tensors import Answer, HeadAnswer, InferRequest, RawTensor
from app.control.load import Moment
from app.control.routing import DeploymentRoute, ReplicaRoute, unavailable
from app.dispatch.admission import Admission, QueueBudget
from app.dispatch.calls import Calls
from app.dispatch.collector import Collector, no_rows, no_rows_by_head, wanted_heads
from app.dispatch.deadlines import Deadlines
from app.dispatch.losses import Losses
from app.dispatch.pending import Part, Pending
from app.dispatch.policy import Batching, GatherClock, LengthClasses
from app.dispatch.pool import Connect, ReplicaCalls, ReplicaPool, connect
from app.dispatch.protocol import Dispatcher, Fail
from app.dispatch.queue import DEFAULT_WEIGHTS, Item
from app.errors import BadRequest, QueueFull, ReplicaLost
from app.telemetry.instruments import Gauge
from app.telemetry.recorder import recorder
from app.telemetry.tracing import add_model
from app.transport.batch import encode_nothing
from app.transport.protocol import FrameReplicaClient
from inference.signature import Signature

__all__ = ["ModelDispatcher"]


class ModelDispatcher(Dispatcher):
    """Takes requests for one model and answers them through its replicas.

    Rows of concurrent requests are coalesced while the replicas are busy: with a replica idle a request leaves at once;
    otherwise rows gather until a call comes back.

    Args:
        route: the deployment.
        connect: makes a client of a replica; tests and other engines put their own here.
        on_quarantined: called with the fingerprint of a request that took two replicas down.
        room: what may wait of all deployments together; default: as if there were no other.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        connect: Connect = connect,
        on_quarantined: Callable[[bytes], None] = lambda mark: None,
        room: QueueBudget | None = None,
    ) -> None:
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._pool = ReplicaPool(route.name, self._open, on_back=lambda: self._batching.schedule())
        self._meter = recorder().deployment(route.name)
        self._gathering = GatherClock()
        self._requests: set[Pending] = set()
        """Those under way."""
        self.route = route
        self._is_closed = False
        self._losses = Losses(route.name, self._meter, on_quarantined)
        self._quarantine = self._losses.quarantine
        self._retries = self._losses.retries
        self._calls = Calls(
            route.name,
            self._meter,
            on_lost=self._lose,
            on_lost_part=self._take_loss,
            on_unsent=self._take_back,
            on_alone=self._clear,
            on_end=self._on_end,
        )
        self._admission = Admission(route.name, room or QueueBudget(), self._displace)
        self._queue = self._admission.queue
        self._batching = Batching(
            route,
            self._admission,
            self._retries,
            self._pool.connected,
            self._calls.start,
            self._fitting,
            self._gathering,
        )
        self._lengths: LengthClasses | None = None
        self.update(route)

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._requests)

    @property
    def queued_rows(self) -> int:
        """Rows waiting."""
        return self._queue.rows + self._retries.rows

    def update(self, route: DeploymentRoute) -> None:
        """See `Dispatcher.update`."""
        if route.signature is not None:
            is_smaller = route.signature.max_batch_size < self._queue.max_batch_size
            self._queue.max_batch_size = route.signature.max_batch_size
            if is_smaller:
                self._cut_waiting()
        if route.generation != self.route.generation:
            self._quarantine.lift()
        self._quarantine.for_s = route.quarantine_s
        self._admission.limit = route.max_queue_size
        weights = route.priority_weights or DEFAULT_WEIGHTS
        if weights != self._queue.weights:
            self._queue.reweigh(weights)
        self._lengths = LengthClasses(route.max_padding) if route.max_padding else None
        self._calls.keep_apart = self._lengths is not None
        super().update(route)
        self._batching.update(route)
        self._pool.update(route)
        if self._retries and not self._pool.eligible():
            self._losses.fail_waiting()
        if not route.replicas:
            for item in self._queue.drain():
                item.payload.fail(unavailable(route))
        self._batching.schedule()

    def close(self) -> None:
        """See `Dispatcher.close`."""
        super().close()
        self._is_closed = True
        self._batching.close()
        self._pool.close()
        for item in (*self._retries.drain(), *self._queue.drain()):
            item.payload.fail(ReplicaLost("the server is stopping"))
        self._admission.close()

    def moment(self) -> Moment:
        """See `Dispatcher.moment`."""
        rows = self._queue.rows
        # What a streaming model computes at once only its calls in flight bound.
        streams = self.route.signature is not None and self.route.signature.streams
        most = self.route.max_in_flight if streams else self.route.instances
        calls = [one.calls for one in self._pool.connected.values()]
        return Moment(
            computing=sum(min(one, most) for one in calls),
            requests=max(self.in_flight, sum(calls) - (-rows // self._queue.max_batch_size)),
            waiting=rows,
            wait_s=self._loop.time() - self._queue.oldest_s() if rows else 0.0,
        )

    def gauges(self) -> dict[Gauge, int]:
        """See `Dispatcher.gauges`."""
        return {self._meter.queue_rows: self.queued_rows}

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """See `Dispatcher.under_way`."""
        found: Collection[Pending] = self._requests
        if replicas is not None:
            batches = [batch for one in self._pool.held(replicas) for batch in one.batches.values()]
            found = {_part(item).pending for batch in batches for item in batch}
        # What is answered may still be read: that takes no replica.
        return [pending.collector.fail for pending in found if not pending.collector.is_done]

    def cancel(self, request_id: str) -> int:
        """See `Dispatcher.cancel`."""
        found = [one.collector for one in self._requests if one.request.cancel_id == request_id]
        return sum(collector.cancel() for collector in found)

    def _open(self, replica: ReplicaRoute) -> ReplicaCalls:
        client = self._connect(self.route.name, replica)
        signature = self.route.signature
        if replica.grpc_socket and signature is not None:
            cast(FrameReplicaClient, client).open(encode_nothing(signature), streams=signature.streams)
        return ReplicaCalls(replica, client)

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> Answer:
        """See `Dispatcher.infer`."""
        signature = self.check_ready(is_step=is_step)
        if request.rows == 0:
            return Answer(no_rows(signature, request))
        pending = self._take_in(request, signature, is_stream=False)
        try:
            return await pending.collector.whole()
        finally:
            self._leave(pending)

    async def stream(self, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        """See `Dispatcher.stream`."""
        signature = self.check_ready()
        if request.rows == 0:
            for piece in no_rows_by_head(signature, request):
                yield piece
            return
        pending = self._take_in(request, signature, is_stream=True)
        try:
            while (one := await pending.collector.next_piece()) is not None:
                yield one
                del one  # the next one may be long in coming
        finally:
            self._leave(pending)

    def _take_in(self, request: InferRequest, signature: Signature, *, is_stream: bool) -> Pending:
        mark = b""
        if self._quarantine and not signature.streams:
            mark = self._losses.examine(request, self.route.max_queue_size)
        held_bytes = _held_bytes(request.inputs)
        self._admit(request, signature, held_bytes)
        meter = self._meter if signature.heads else None
        collector = Collector(wanted_heads(request, signature), is_stream=is_stream, meter=meter)
        pending = Pending(request, signature, collector, self._queue.max_batch_size)
        pending.gather_mark_ns = self._gathering.read_ns()
        pending.trace = add_model(self.route.name)
        pending.fingerprint = mark
        pending.deadlines = Deadlines(
            collector,
            self.route.timeout_s,
            request.timeout_us,
            where=pending.where,
            is_idle_limit=signature.streams,
        )
        self._enqueue(pending, held_bytes)
        self._requests.add(pending)
        return pending

    def _leave(self, pending: Pending) -> None:
        """Forget a request that is answered, has failed, or whose client went away."""
        self._requests.discard(pending)
        if pending.deadlines is not None:
            pending.deadlines.close()
        collector = pending.collector
        succeeded = collector.succeeded
        if succeeded:
            rows = pending.request.rows
            self._meter.note_request(
                rows, pending.queue_ns, pending.batch_wait_ns, pending.compute_ns, pending.transport_ns()
            )
        elif collector.failed and not collector.is_cancelled:
            self._meter.failures.add()
        if pending.trace is not None:
            error = collector.error
            name = type(error).__name__ if error is not None else ""
            pending.trace.end(pending.request.rows, pending.compute_ns, name)
        for item in pending.items:  # what still waits must not be computed
            if item.alive:
                self._queue.remove(item)
            elif pending.fingerprint and _part(item).waits:
                self._retries.remove(item)
        if pending.stream is not None and (pending.is_awaited or not succeeded):
            client, name = pending.stream
            pending.stream = None
            client.cancel(name)
        collector.close()
        pending.release()

    # Admission

    def _admit(self, request: InferRequest, signature: Signature, held_bytes: int) -> None:
        if signature.streams and request.rows > signature.max_batch_size:
            raise self._too_many(request.rows, signature.max_batch_size)
        self._admission.check(request.rows, held_bytes, request.priority)

    def _displace(self, item: Item, error: QueueFull) -> None:
        """A request gives way to one that has the better claim to its place in the queue."""
        pending = _part(item).pending
        for other in pending.items:
            self._queue.remove(other)
        pending.collector.fail(error)

    def _enqueue(self, pending: Pending, held_bytes: int) -> None:
        request = pending.request
        key: Hashable = (
            # A stream goes alone: its steps depend on what it yields.
            id(pending if pending.signature.streams else pending.signature),
            tuple([(name, tensor.shape[1:]) for name, tensor in request.inputs.items()]),
            tuple(request.batch_parameters.items()),
        )
        now = self._loop.time()
        for part in pending.parts:
            of_part = held_bytes if part.inputs is request.inputs else _held_bytes(part.inputs)
            part_key = key if self._lengths is None else (key, self._lengths.of(part.inputs))
            item = self._item(part, part_key, of_part, now, request.priority)
            pending.items.append(item)
            if pending.fingerprint:
                part.losses = 1
                self._retries.push(item)
            else:
                self._queue.push(item)
        self._batching.schedule()

    def _cut_waiting(self) -> None:
        """Cut what waits so that it fits into the batches that are allowed now."""
        for pending in self._requests:
            for item in [item for item in pending.items if item.alive and item.rows > self._queue.max_batch_size]:
                self._queue.remove(item)
                for piece in self._fitting(item):
                    self._queue.push(piece)

    def _fitting(self, item: Item) -> list[Item]:
        """The rows of an item that doesn't wait now, in items that fit into the batches that are allowed now."""
        part = _part(item)
        pending = part.pending
        size = self._queue.max_batch_size
        if part.rows <= size:
            return [item]
        if pending.signature.streams:  # it can't be cut
            part.fail(self._too_many(part.rows, size))
            return []
        pieces = [
            self._item(piece, item.key, _held_bytes(piece.inputs), item.arrived_s, item.priority)
            for piece in pending.cut(part, size)
        ]
        at = pending.items.index(item)
        pending.items[at : at + 1] = pieces
        return pieces

    def _item(self, part: Part, key: Hashable, held_bytes: int, arrived_s: float, priority: int) -> Item:
        return Item(key, part.rows, held_bytes=held_bytes, arrived_s=arrived_s, priority=priority, payload=part)

    def _too_many(self, rows: int, most: int) -> BadRequest:
        return BadRequest(
            f"inputs: expected at most {most} rows (max_batch_size of model `{self.route.name}`, which streams), "
            f"got {rows}",
            field="inputs",
        )

    # What becomes of calls

    def _lose(self, replica: ReplicaCalls) -> None:
        self._pool.lose(replica)
        if self._retries and not self._pool.eligible():
            self._losses.fail_waiting()

    def _take_loss(self, part: Part, error: ReplicaLost) -> None:
        if self._is_closed:
            part.fail(error)
        else:
            self._losses.take(part, error, has_eligible=bool(self._pool.eligible()))

    def _take_back(self, item: Item) -> None:
        """A replica never had these rows; another may. If there is none, they wait until the table says so."""
        part = _part(item)
        if not self.route.replicas:  # the table has said so
            part.fail(unavailable(self.route))
        elif not part.pending.collector.is_done:
            pieces = self._fitting(item)
            if part.losses:
                self._retries.push_back(pieces)
            else:
                for piece in pieces:
                    self._queue.push(piece)

    def _clear(self, part: Part) -> None:
        """They were alone at a replica, which lives."""
        self._quarantine.clear(part.pending.fingerprint)

    def _on_end(self, replica: ReplicaCalls) -> None:
        if replica is self._retries.aside:
            self._retries.note_end(replica)
        self._batching.schedule()

    def quarantine(self, mark: bytes) -> None:
        """See `Dispatcher.quarantine`."""
        self._losses.refuse(mark)


def _part(item: Item) -> Part:
    part: Part = item.payload
    return part


def _held_bytes(inputs: dict[str, RawTensor]) -> int:
    return sum([len(tensor.data) for tensor in inputs.values()])
