"""One deployment in a gateway worker: admission, batching, the calls under way, and the way back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from app.answers import Answer, HeadAnswer, Outputs
from app.batch_request import encode_batch, encode_nothing
from app.batching import BatchQueue, Item
from app.collector import WHOLE, Collector, wanted_heads
from app.deadlines import TIMER_RESOLUTION_S, Deadlines
from app.draining import Fail
from app.errors import (
    BadRequest,
    CallableFailed,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from app.frame_call import FrameCall
from app.pending import Part, Pending
from app.routing import DeploymentRoute, ReplicaRoute, State
from app.row_errors import RETRY_AFTER_LOST_S, row_error, unavailable
from app.row_slices import SlicedTensor
from app.statistics import Statistics
from app.tensors import InferRequest, RawTensor
from app.triton_client import FrameReplicaClient, ReplicaClient, TritonClient
from inference.frame import decode_frame
from inference.report import REPORT, RowReport, Status, decode_reports
from inference.signature import Signature

__all__ = ["Connect", "Dispatcher", "no_rows"]

logger = logging.getLogger("headwater.dispatch")

RETRY_AFTER_LIMIT_S = 60
LOST_RETRY_S = 2.0
"""A replica that ended is out of the table within this time."""
RATE_SMOOTHING = 0.2


Connect = Callable[[str, ReplicaRoute], "ReplicaClient | FrameReplicaClient"]


@dataclass(slots=True)
class _Replica:
    route: ReplicaRoute
    client: ReplicaClient | FrameReplicaClient
    calls: int = 0
    rows: int = 0
    """Outstanding."""
    batches: dict[int, list[Item]] = field(default_factory=dict)
    """Under way, by identity."""
    is_retiring: bool = False
    """Others have replaced it: it gets no call any more, and finishes those that it has."""
    is_lost: bool = False
    """It failed as a whole; it gets no call any more, and the supervisor will take it from the table."""


class Dispatcher:
    """Takes requests for one deployment and answers them through its replicas.

    Rows of concurrent requests are coalesced while the replicas are busy: with a replica idle a request leaves at once;
    otherwise rows gather until a call comes back.

    Args:
        route: the deployment.
        connect: makes a client; tests and other engines put their own here.
    """

    def __init__(self, route: DeploymentRoute, connect: Connect | None = None) -> None:
        self._connect = connect or _connect
        self._loop = asyncio.get_running_loop()
        self._replicas: dict[str, _Replica] = {}
        self._dispatch_due = False
        self._delay: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._rows_per_s = 0.0
        self.statistics = Statistics()
        self.in_flight = 0
        """Requests under way."""
        self._requests: set[Pending] = set()
        """Those."""
        self.is_draining = False
        """Whether new requests are refused; those under way are still answered."""
        self.route = route
        self._queue = BatchQueue(1)
        self.update(route)

    @property
    def signature(self) -> Signature | None:
        """The model's signature, once known."""
        return self.route.signature

    @property
    def _streams(self) -> bool:
        return self.route.signature is not None and self.route.signature.streams

    @property
    def queued_rows(self) -> int:
        """Rows waiting."""
        return self._queue.rows

    def update(self, route: DeploymentRoute) -> None:
        """Take in a new state of the deployment: other replicas, another signature."""
        if route.signature is not None:
            self._queue.max_batch_size = route.signature.max_batch_size
            if route.signature == self.route.signature:
                # The same object, so that what was made for it stays good.
                route = msgspec.structs.replace(route, signature=self.route.signature)
        self.route = route
        wanted = {replica.id: replica for replica in (*route.replicas, *route.retiring)}
        for id in [id for id in self._replicas if id not in wanted]:
            self._replicas.pop(id).client.close()
        for id, replica in wanted.items():
            if id not in self._replicas:
                self._add(replica)
        for replica in route.retiring:
            self._replicas[replica.id].is_retiring = True
        if not route.replicas:
            for item in self._queue.drain():
                item.payload.fail(unavailable(route))
        self._schedule()

    def close(self) -> None:
        """End all calls; their requests are answered with `ReplicaLost`."""
        self._stop_delay()
        for replica in self._replicas.values():
            replica.client.close()
        self._replicas.clear()
        self.route = msgspec.structs.replace(self.route, replicas=(), retiring=())
        for item in self._queue.drain():
            item.payload.fail(ReplicaLost("the server is stopping"))

    def under_way(self, replicas: Collection[str] | None) -> list[Fail]:
        """See `app.draining.Drainable`."""
        found: Collection[Pending] = self._requests
        if replicas is not None:
            held = [self._replicas[id] for id in replicas if id in self._replicas]
            found = {part.pending for one in held for batch in one.batches.values() for part in map(_part, batch)}
        # What is answered may still be read: that takes no replica.
        return [pending.collector.fail for pending in found if not pending.collector.is_done]

    def _add(self, replica: ReplicaRoute) -> None:
        client = self._connect(self.route.name, replica)
        self._replicas[replica.id] = _Replica(replica, client)
        if replica.grpc_socket and self.route.signature is not None:
            cast(FrameReplicaClient, client).open(encode_nothing(self.route.signature))

    def check_ready(self, *, is_step: bool = False) -> Signature:
        """The signature, if requests can be taken now.

        Raises:
            Unavailable: they can't.
        """
        if self.is_draining and not is_step:
            raise Unavailable("the server is stopping", retry_after_s=RETRY_AFTER_LOST_S)
        route = self.route
        if route.signature is None or not route.replicas:
            raise unavailable(route)
        # A step's pipeline is drained first, and still needs it.
        if route.state is State.DRAINING and not (is_step and route.part_of is not None):
            raise unavailable(route)
        return route.signature

    async def infer(self, request: InferRequest, *, is_step: bool = False) -> Answer:
        """Answer a request whole.

        Args:
            request: what is asked.
            is_step: whether it is a step of a pipeline's request, which is answered although the server is stopping.

        Raises:
            Unavailable: no replica is ready, or the one that had the request ended.
            QueueFull: the queue is full.
            DeadlineExceeded: it took too long; rows not yet sent are never computed.
            BadRequest: the callable said that the rows are wrong.
            CallableFailed: the callable raised, or broke its declaration.
        """
        signature = self.check_ready(is_step=is_step)
        if request.rows == 0:
            return Answer(no_rows(signature, request))
        pending = self._take_in(request, signature, is_stream=False)
        try:
            return await pending.collector.whole()
        finally:
            self._leave(pending)

    async def stream(self, request: InferRequest) -> AsyncIterator[HeadAnswer]:
        """Answer a request piece by piece, each as soon as it is ready.

        Raises:
            HeadwaterError: as `infer`; after the first piece too.
        """
        signature = self.check_ready()
        if request.rows == 0:
            for name, spec in wanted_heads(request, signature).items():
                outputs = no_rows(signature, request)
                yield HeadAnswer(name, {one: outputs[one] for one in spec.outputs or outputs if one in outputs})
            return
        pending = self._take_in(request, signature, is_stream=True)
        try:
            async for piece in pending.collector.pieces():
                yield piece
        finally:
            self._leave(pending)

    def _take_in(self, request: InferRequest, signature: Signature, *, is_stream: bool) -> Pending:
        self._admit(request, signature)
        collector = Collector(wanted_heads(request, signature), is_stream=is_stream)
        pending = Pending(request, signature, collector, self._queue.max_batch_size)
        pending.deadlines = Deadlines(
            collector,
            self.route.timeout_s,
            request.timeout_us,
            where=lambda: "while it waited in the queue" if pending.is_waiting else "while it was computed",
            is_idle_limit=signature.streams,
        )
        self._enqueue(pending)
        self._requests.add(pending)
        self.in_flight += 1
        return pending

    def _leave(self, pending: Pending) -> None:
        """Forget a request that is answered, has failed, or whose client went away."""
        self._requests.discard(pending)
        self.in_flight -= 1
        if pending.deadlines is not None:
            pending.deadlines.close()
        if pending.collector.succeeded:
            self.statistics.note_request(pending.request.rows, pending.queue_ns, pending.compute_ns)
        elif pending.collector.failed:
            self.statistics.failures += 1
        for item in pending.items:  # what still waits must not be computed
            self._queue.remove(item)
        if pending.stream is not None and (pending.is_awaited or not pending.collector.succeeded):
            client, name = pending.stream
            pending.stream = None
            client.cancel(name)
        pending.collector.close()
        pending.release()

    # Admission

    def _admit(self, request: InferRequest, signature: Signature) -> None:
        limit = self.route.max_queue_size
        if request.rows > limit:
            raise BadRequest(
                f"inputs: expected at most {limit} rows (max_queue_size of model `{self.route.name}`, over its gateway "
                f"workers), got {request.rows}; send them in several requests",
                field="inputs",
            )
        if signature.streams and request.rows > signature.max_batch_size:
            raise BadRequest(
                f"inputs: expected at most {signature.max_batch_size} rows (max_batch_size of model "
                f"`{self.route.name}`, which streams), got {request.rows}",
                field="inputs",
            )
        if self._queue.rows + request.rows > limit:
            self.statistics.shed += 1
            wait_s = self._queue.rows / self._rows_per_s if self._rows_per_s else 1.0
            raise QueueFull(
                f"model `{self.route.name}`: the queue is full: {self._queue.rows} of {limit} rows wait",
                retry_after_s=max(1, min(RETRY_AFTER_LIMIT_S, math.ceil(wait_s))),
            )

    def _enqueue(self, pending: Pending) -> None:
        request = pending.request
        key = (
            # A stream goes alone: its steps depend on what it yields.
            id(pending if pending.signature.streams else pending.signature),
            tuple([(name, tensor.shape[1:]) for name, tensor in request.inputs.items()]),
            tuple(request.batch_parameters.items()),
        )
        now = self._loop.time()
        for part in pending.parts:
            size_bytes = _varying_bytes(part.inputs) // part.rows
            item = Item(key, part.rows, size_bytes=size_bytes, arrived_s=now, priority=request.priority, payload=part)
            pending.items.append(item)
            self._queue.push(item)
        self._schedule()

    # Batching

    def _schedule(self) -> None:
        """Dispatch at the end of this turn of the event loop, so that requests that arrived together go together."""
        if not self._dispatch_due and self._queue.rows:
            self._dispatch_due = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_due = False
        while self._queue.rows:
            replica = self._choose()
            if replica is None or (replica.calls and not self._streams and not self._queue.next_is_full()):
                return
            if self.route.max_queue_delay_ms and not self._streams and not self._delay_is_over():
                return
            batch = self._queue.pop()
            replica.calls += 1
            replica.rows += sum(item.rows for item in batch)
            call = self._call_frames if replica.route.grpc_socket else self._call
            task = self._loop.create_task(call(replica, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _choose(self) -> _Replica | None:
        """The replica with the fewest outstanding rows, among those that may have another call."""
        best: _Replica | None = None
        for replica in self._replicas.values():
            if (
                replica.calls < self.route.max_in_flight
                and not replica.is_lost
                and not replica.is_retiring
                and (best is None or replica.rows < best.rows)
            ):
                best = replica
        return best

    def _delay_is_over(self) -> bool:
        """Whether the first rows have waited for company as long as they should; if not, looks again when they have."""
        left_s = self._queue.oldest_s() + self.route.max_queue_delay_ms / 1000 - self._loop.time()
        if left_s < TIMER_RESOLUTION_S or self._queue.next_is_full():
            return True
        if self._delay is None:
            self._delay = self._loop.call_later(left_s, self._on_delay)
        return False

    def _on_delay(self) -> None:
        self._delay = None
        self._dispatch()

    def _stop_delay(self) -> None:
        if self._delay is not None:
            self._delay.cancel()
            self._delay = None

    # The call

    async def _call(self, replica: _Replica, batch: list[Item]) -> None:
        """One call of a model that answers its batch whole."""
        parts: list[Part] = [item.payload for item in batch]
        rows = sum(part.rows for part in parts)
        client = cast(ReplicaClient, replica.client)
        started_ns = time.perf_counter_ns()
        with self._boundary(replica, batch):
            signature = parts[0].pending.signature
            head, data = encode_batch(signature, [(part.pending.request, part.inputs, part.rows) for part in parts])
            tensors = await client.infer(head, data)
            reports, compute_us, is_merged = decode_reports(tensors.pop(REPORT).data, rows)
            if any(report.status is Status.BROKEN for report in reports):
                self._lose(replica)
            self._note_rate(rows, time.perf_counter_ns() - started_ns)
            if not is_merged:
                self.statistics.note_call(rows, compute_us * 1000)
            outputs = _sliced(signature, tensors, reports, rows)
            self._distribute(parts, outputs, reports, started_ns, compute_us * 1000)

    async def _call_frames(self, replica: _Replica, batch: list[Item]) -> None:
        """One call of a pipeline or of a model that streams: its answer comes in frames."""
        parts: list[Part] = [item.payload for item in batch]
        rows = sum(part.rows for part in parts)
        client = cast(FrameReplicaClient, replica.client)
        started_ns = time.perf_counter_ns()
        with self._boundary(replica, batch):
            call = FrameCall(parts)
            pending = parts[0].pending
            if pending.signature.streams:
                pending.stream = (client, call.name)
            compute_us = 0
            async with contextlib.aclosing(client.frames(call.name, call.request)) as frames:
                async for raw in frames:
                    frame, pieces = decode_frame(raw)
                    for count in frame.counts:
                        self.statistics.note_step(count)
                        compute_us += count.compute_us
                    for part in parts:
                        part.pending.note_call(started_ns, compute_us * 1000)
                        if part.pending.deadlines is not None:
                            part.pending.deadlines.hear()
                    for piece, data in zip(frame.pieces, pieces, strict=True):
                        if call.take(piece, data):
                            self._lose(replica)
                    if pending.signature.streams and pending.collector.is_done and not pending.collector.succeeded:
                        # Nobody wants the rest. Who waits for its reader may be slow to say so.
                        if pending.stream is not None:
                            client.cancel(call.name)
                        break
            pending.stream = None
            self._note_rate(rows, time.perf_counter_ns() - started_ns)
            self.statistics.note_call(rows, compute_us * 1000)
            call.end()

    @contextlib.contextmanager
    def _boundary(self, replica: _Replica, batch: list[Item]) -> Iterator[None]:
        """Of a call: whatever goes wrong in it becomes the failure of what it has not answered; the next may go."""
        parts: list[Part] = [item.payload for item in batch]
        rows = sum(part.rows for part in parts)
        replica.batches[id(batch)] = batch
        try:
            yield
        except ReplicaUnreachable:
            # It never had them; another may. If there is none, they wait until the table says so.
            self._lose(replica)
            for item in batch:
                if not self.route.replicas:  # the table has said so
                    item.payload.fail(unavailable(self.route))
                elif not item.payload.pending.collector.is_done:
                    self._queue.push(item)
        except HeadwaterError as error:
            if isinstance(error, ReplicaLost):
                self._lose(replica)
            for part in parts:
                part.fail(error)
        except Exception as error:
            logger.exception("model %s: a batch of %d rows failed in the gateway", self.route.name, rows)
            for part in parts:
                part.fail(CallableFailed(f"internal error: {type(error).__name__}"))
        finally:
            del replica.batches[id(batch)]
            replica.calls -= 1
            replica.rows -= rows
            self._schedule()

    def _lose(self, replica: _Replica) -> None:
        """Give a replica no call any more; if it still stands in the table after a while, it is tried again."""
        if not replica.is_lost:
            replica.is_lost = True
            self._loop.call_later(LOST_RETRY_S, self._find_again, replica)

    def _find_again(self, replica: _Replica) -> None:
        if self._replicas.get(replica.route.id) is not replica or replica.is_retiring:
            return
        logger.warning(
            "model %s: replica %s was lost, but is still there: trying it again", self.route.name, replica.route.id
        )
        if replica.route.grpc_socket:  # all its calls went over the connection that is gone
            replica.client.close()
            self._add(replica.route)
        else:
            replica.is_lost = False
        self._schedule()

    def _note_rate(self, rows: int, took_ns: int) -> None:
        rate = rows / (took_ns / 1e9) * max(1, len(self._replicas))
        self._rows_per_s += RATE_SMOOTHING * (rate - self._rows_per_s) if self._rows_per_s else rate

    def _distribute(
        self,
        parts: Sequence[Part],
        outputs: dict[str, SlicedTensor],
        reports: list[RowReport],
        started_ns: int,
        compute_ns: int,
    ) -> None:
        start = 0
        for part in parts:
            pending = part.pending
            end = start + part.rows
            error = row_error(reports[start:end], part.start, pending.request.rows)
            if error is not None:
                part.fail(error)
            elif not pending.collector.is_done:
                found = {wish.name: outputs[wish.name].rows(start, part.rows) for wish in pending.request.outputs}
                pending.note_call(started_ns, compute_ns)
                part.decide(WHOLE, found)
            start = end


def _part(item: Item) -> Part:
    part: Part = item.payload
    return part


def _connect(name: str, route: ReplicaRoute) -> ReplicaClient | FrameReplicaClient:
    if route.grpc_socket:
        from app.frame_client import FrameClient  # only where there is something to speak to: gRPC takes memory

        return FrameClient(name, route.grpc_socket, route.token)
    return TritonClient(name, route.http_socket, route.token)


def _varying_bytes(inputs: dict[str, RawTensor]) -> int:
    """Bytes of the inputs whose size varies from row to row at equal shapes."""
    return sum(len(tensor.data) for tensor in inputs.values() if tensor.datatype == "BYTES")


def _sliced(signature: Signature, tensors: Outputs, reports: Sequence[RowReport], rows: int) -> dict[str, SlicedTensor]:
    """Prepare a batch's outputs for being cut; those without elements get their true shape back."""
    true_shapes: dict[str, list[int]] = {}
    for report in reports:
        if report.status is Status.OK and report.message:
            true_shapes = msgspec.json.decode(report.message)
            break
    outputs = {}
    for spec in signature.outputs:
        tensor = tensors.get(spec.name)
        if tensor is None:  # nobody wanted it
            continue
        tensor.datatype = spec.datatype  # BF16 travels under another name
        if spec.name in true_shapes:
            tensor = RawTensor(spec.datatype, tuple(true_shapes[spec.name]), b"")
        if tensor.shape[0] != rows:
            raise CallableFailed(f"output {spec.name!r}: expected {rows} rows, got shape {list(tensor.shape)}")
        outputs[spec.name] = SlicedTensor(tensor)
    return outputs


def no_rows(signature: Signature, request: InferRequest) -> Outputs:
    """The answer to a request without rows, which no model is called for."""
    wanted = {wish.name for wish in request.outputs}
    return {
        spec.name: RawTensor(spec.datatype, (0, *(max(dim, 0) for dim in spec.shape)), b"")
        for spec in signature.outputs
        if spec.name in wanted
    }
