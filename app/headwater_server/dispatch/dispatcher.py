"""One model in a gateway worker: admits requests, batches their rows and sends the batches to replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable
from pathlib import Path
from typing import cast

from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.inputs import add_counts
from headwater_server.codecs.tensors import InferRequest
from headwater_server.control.load import Moment
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, check_key, unavailable
from headwater_server.dispatch.admission import Admission, QueueBudget
from headwater_server.dispatch.calls import Calls
from headwater_server.dispatch.collector import Collector, wanted_heads
from headwater_server.dispatch.deployment_protocol import Fail, TensorDispatcher
from headwater_server.dispatch.losses import Losses, keys_of
from headwater_server.dispatch.pending import Part, Pending, held_bytes
from headwater_server.dispatch.policy import RAGGED_PADDING, BatchingPolicy, length_class
from headwater_server.dispatch.pool import Connect, ReplicaCalls, ReplicaPool, connect
from headwater_server.dispatch.queue import DEFAULT_WEIGHTS
from headwater_server.dispatch.sequence_states import SequenceStates
from headwater_server.errors import BadRequest, QueueFull, ReplicaLost
from headwater_server.telemetry.instruments import Gauge
from headwater_server.telemetry.recorder import recorder
from headwater_server.telemetry.tracing import add_model
from headwater_server.transport.batch import encode_nothing
from headwater_server.transport.replica_protocol import FrameReplicaClient

__all__ = ["ModelDispatcher"]


class ModelDispatcher(TensorDispatcher[Pending]):
    """Takes requests for one model, and has its replicas answer them in batches.

    Args:
        route: the deployment.
        connect: makes a replica's client.
        on_quarantined: called with the fingerprint of a request that took two replicas down.
        budget: limits the rows and bytes that wait in all deployments together. Default: a `QueueBudget` with default
            limits, for this deployment alone.
        on_lost: called with the report of each lost replica, and again once a request with an API key has taken two
            replicas down.
        folder: see `SequenceStates`; a model with states needs it.
    """

    def __init__(
        self,
        route: DeploymentRoute,
        connect: Connect = connect,
        on_quarantined: Callable[[bytes], None] = lambda fingerprint: None,
        budget: QueueBudget | None = None,
        on_lost: Callable[[ReplicaLoss], None] = lambda loss: None,
        folder: Path | None = None,
    ) -> None:
        super().__init__(route)
        self._folder = folder
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._meter = recorder().deployment(route.name)
        self._pool = ReplicaPool(
            route.name,
            self._open,
            lambda: self._batching.schedule(),
            lambda replica: self._batching.note(replica),
            on_lost=on_lost,
            keys_of=keys_of,
        )
        self._losses = Losses(route.name, self._meter, self._pool, on_quarantined, on_lost)
        self._quarantine = self._losses.quarantine
        self._retries = self._losses.retries
        self._calls = Calls(route.name, self._meter, self._losses, self._take_back)
        self._admission = Admission(route.name, budget or QueueBudget(), self._displace)
        self._queue = self._admission.queue
        self._batching = BatchingPolicy(
            route, self._admission, self._retries, self._pool.connected, self._calls, self._fitting
        )
        self._counts: dict[str, TensorSpec] = {}
        """The inputs with counts, by ragged input."""
        self._calls.on_end = self._batching.schedule
        self._calls.on_change = self._batching.note
        self.update(route)

    @property
    def queued_rows(self) -> int:
        """Rows that wait, including rows that wait to be retried."""
        return self._queue.rows + self._retries.rows

    @property
    def is_crowded(self) -> bool:
        """See `TensorDispatcher.is_crowded`."""
        return self.queued_rows > self._queue.max_batch_size

    def _is_queued(self, request: InferRequest) -> bool:
        """See `TensorDispatcher._is_queued`."""
        return any(part.alive for run in self._requests if run.request is request for part in run.parts)

    def update(self, route: DeploymentRoute) -> None:
        """See `Dispatcher.update`."""
        if route.signature is not None:
            self._counts = {spec.counts: spec for spec in route.signature.inputs if spec.counts}
            is_smaller = route.signature.max_batch_size < self._queue.max_batch_size
            self._queue.max_batch_size = route.signature.max_batch_size
            if is_smaller:
                self._cut_waiting()
            if not route.signature.states:
                self._states = None
            elif self._states is None:
                assert self._folder is not None
                self._states = SequenceStates(route.name, self._folder)
        if route.generation != self.route.generation:
            self._quarantine.lift()
        self._quarantine.for_s = route.quarantine_s
        self._admission.limit = route.max_queue_size
        weights = route.priority_weights or DEFAULT_WEIGHTS
        if weights != self._queue.weights:
            self._queue.reweigh(weights)
        self._calls.keep_apart = route.max_padding > 0
        super().update(route)
        self._batching.update(route)
        self._pool.update(route)
        self._losses.judge()
        self._losses.fail_stranded()
        if not route.replicas:
            for part in self._queue.drain():
                part.fail(unavailable(route))
        self._batching.schedule()

    def close(self) -> None:
        """See `Dispatcher.close`."""
        super().close()
        self._losses.close()
        self._batching.close()
        self._pool.close()
        for part in (*self._retries.drain(), *self._queue.drain()):
            part.fail(ReplicaLost("the server is stopping"))
        self._admission.close()

    def moment(self) -> Moment:
        """See `Dispatcher.moment`."""
        rows = self._queue.rows
        at_once = self.route.at_once
        calls = [replica.calls for replica in self._pool.connected.values()]
        return Moment(
            computing=sum(min(count, at_once) for count in calls),
            requests=max(len(self._requests), sum(calls) - (-rows // self._queue.max_batch_size)),
            waiting=rows,
            wait_s=self._loop.time() - self._queue.oldest_s() if rows else 0.0,
        )

    def gauges(self) -> dict[Gauge, int]:
        """See `Dispatcher.gauges`."""
        return {**super().gauges(), self._meter.queue_rows: self.queued_rows}

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """See `Dispatcher.under_way`."""
        if replicas is None:
            return super().under_way(None)
        batches = [batch for replica in self._pool.held(replicas) for batch in replica.batches.values()]
        runs = {part.pending for batch in batches for part in batch}
        # A stream's client may still be reading after the last outputs arrived; that needs no replica.
        return [run.collector.fail for run in runs if not run.collector.is_done]

    def quarantine(self, fingerprint: bytes) -> None:
        """See `Dispatcher.quarantine`."""
        self._quarantine.refuse(fingerprint, self._loop.time())

    def _open(self, replica: ReplicaRoute) -> ReplicaCalls:
        client = self._connect(self.route.name, replica)
        signature = self.route.signature
        if replica.grpc_address and signature is not None:
            cast(FrameReplicaClient, client).open(encode_nothing(signature), streams=signature.streams)
        return ReplicaCalls(replica, client)

    # Requests

    def _start(self, request: InferRequest, signature: Signature, *, is_stream: bool) -> Pending:
        if self._counts:
            add_counts(request.inputs, self._counts.values())
        if self.route.barred:
            check_key(self.route, request.owner)
        fingerprint = b""
        if self._quarantine and not signature.streams:
            fingerprint = self._losses.examine(request, self.route.max_queue_size)
        size_bytes = held_bytes(request.inputs)
        if signature.streams and request.rows > signature.max_batch_size:
            raise self._too_many(request.rows, signature.max_batch_size)
        if request.is_copy:
            self._admission.check_copy(request.rows, size_bytes)
        else:
            self._admission.check(request.rows, size_bytes, request.priority)
        meter = self._meter if signature.heads and not request.is_copy else None
        collector = Collector(wanted_heads(request, signature), is_stream, meter)
        pending = Pending(request, signature, collector, self.route.timeout_s)
        pending.gathered_ns = self._batching.clock.read_ns()
        pending.trace = add_model(self.route.name)
        pending.fingerprint = fingerprint
        self._enqueue(pending, size_bytes)
        self._requests.add(pending)
        return pending

    def _end(self, run: Pending) -> None:
        self._requests.discard(run)
        collector = run.collector
        succeeded = collector.succeeded
        is_counted = not run.request.is_copy  # the shadow counts copies
        if is_counted and succeeded:
            self._meter.note_request(
                run.request.rows, run.queue_ns, run.batch_wait_ns, run.compute_ns, run.transport_ns()
            )
        elif is_counted and collector.failed:
            self._meter.failures.add()
        if run.trace is not None:
            error = collector.error
            name = type(error).__name__ if error is not None else ""
            run.trace.end(run.request.rows, run.compute_ns, name)
        for part in run.parts:  # waiting rows must not be computed
            if part.alive:
                self._queue.remove(part)
            elif part.is_retry:
                self._retries.remove(part)
        if run.stream is not None and (not succeeded or any(part.awaited for part in run.parts)):
            client, name = run.stream
            run.stream = None
            client.cancel(name)
        collector.close()
        run.release()

    def _enqueue(self, pending: Pending, size_bytes: int) -> None:
        request, ragged = pending.request, self._counts
        max_padding = self.route.max_padding or (RAGGED_PADDING if ragged else 0)
        key: Hashable = (
            # A stream never shares a call: when it ends depends on its outputs.
            id(pending if pending.signature.streams else pending.signature),
            tuple([(name, tensor.shape[1 + (name in ragged) :]) for name, tensor in request.inputs.items()]),
            tuple(request.batch_parameters.items()),
            request.is_copy,  # a client's request must not be blamed if a copy ends the replica
        )
        losses = 1 if pending.fingerprint else 0
        whole = Part(pending, key, 0, request.rows, request.inputs, set(pending.collector.heads), size_bytes, losses)
        pending.parts = whole.pieces(self._queue.max_batch_size)
        for part in pending.parts:
            if max_padding:
                part.key = (key, length_class(part.inputs, max_padding, ragged))
            if losses:
                self._retries.push(part)
            else:
                self._push(part)
        self._batching.schedule()

    def _push(self, part: Part) -> None:
        self._queue.push(part)
        if part.pending.request.is_copy:
            self._admission.add_copy(part)

    def _displace(self, part: Part, error: QueueFull) -> None:
        """Fail a waiting request, so that another request fits in the queues."""
        for sibling in part.pending.parts:
            self._queue.remove(sibling)
        part.pending.collector.fail(error)

    def _cut_waiting(self) -> None:
        """Cut parts in the queue that are larger than the present batch size. A part that waits to be retried is cut
        when it leaves."""
        for pending in self._requests:
            for part in list(pending.parts):
                if part.alive and part.rows > self._queue.max_batch_size:
                    self._queue.remove(part)
                    for piece in self._fitting(part):
                        self._push(piece)

    def _fitting(self, part: Part) -> list[Part]:
        """Cut a part, which must be in no queue, into pieces of at most the present batch size. A part of a stream that
        is too large fails; then the list is empty."""
        size = self._queue.max_batch_size
        if part.rows <= size:
            return [part]
        if part.pending.signature.streams:  # a stream can't be cut
            part.fail(self._too_many(part.rows, size))
            return []
        return part.pending.cut(part, size)

    def _too_many(self, rows: int, limit: int) -> BadRequest:
        return BadRequest(
            f"inputs: expected at most {limit} rows (max_batch_size of model `{self.route.name}`, which streams), "
            f"got {rows}",
            field="inputs",
        )

    def _take_back(self, part: Part) -> None:
        """Queue rows again that never reached their replica, unless their request has ended. They fail if the routing
        table has no replica, and wait if no replica of the table is eligible now."""
        if not self.route.replicas:  # the table already says that no replica is left
            part.fail(unavailable(self.route))
        elif not part.pending.collector.is_done:
            pieces = self._fitting(part)
            if part.losses:
                self._retries.push_back(pieces)
            else:
                for piece in pieces:
                    self._push(piece)
