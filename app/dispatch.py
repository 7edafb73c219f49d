"""One deployment in a gateway worker: admission, batching, the calls under way, and the way back."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from app.batch_request import encode_batch
from app.batching import BatchQueue, Item
from app.errors import (
    BadRequest,
    CallableFailed,
    DeadlineExceeded,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from app.routing import DeploymentRoute, ReplicaRoute, State
from app.row_slices import SlicedTensor, join_rows
from app.statistics import Statistics
from app.tensors import InferRequest, RawTensor
from app.triton_client import ReplicaClient, TritonClient
from inference.report import REPORT, RowReport, Status, decode_reports
from inference.signature import Signature

__all__ = ["Dispatcher"]

logger = logging.getLogger("headwater.dispatch")

RETRY_AFTER_S = {State.LOADING: 5, State.FAILED: 60}
RETRY_AFTER_LOST_S = 2
RETRY_AFTER_LIMIT_S = 60
RATE_SMOOTHING = 0.2
TIMER_RESOLUTION_S = 0.001
"""uvloop counts timers in whole milliseconds."""

Outputs = dict[str, RawTensor]


class _Pending:
    """A request under way: its parts, and what is known of their answers."""

    __slots__ = ("future", "items", "missing", "parts", "request", "signature")

    def __init__(self, request: InferRequest, signature: Signature, future: asyncio.Future[Outputs]) -> None:
        self.request = request
        self.signature = signature
        """That it was checked against; another version of the model may be served before it is answered."""
        self.future = future
        self.items: list[Item] = []
        self.parts: list[Outputs] = []
        self.missing = 0


@dataclass(slots=True)
class _Part:
    """What an item carries: some rows of a request."""

    pending: _Pending
    index: int
    start: int
    """First row, in the request."""
    rows: int
    inputs: dict[str, RawTensor]
    arrived_ns: int


@dataclass(slots=True)
class _Replica:
    route: ReplicaRoute
    client: ReplicaClient
    calls: int = 0
    rows: int = 0
    """Outstanding."""
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

    def __init__(
        self, route: DeploymentRoute, connect: Callable[[str, ReplicaRoute], ReplicaClient] | None = None
    ) -> None:
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
        wanted = {replica.id: replica for replica in route.replicas}
        for id in [id for id in self._replicas if id not in wanted]:
            self._replicas.pop(id).client.close()
        for id, replica in wanted.items():
            if id not in self._replicas:
                self._replicas[id] = _Replica(replica, self._connect(route.name, replica))
        if not self._replicas:
            for item in self._queue.drain():
                self._fail(item.payload.pending, self._unavailable())
        self._schedule()

    def close(self) -> None:
        """End all calls; their requests are answered with `ReplicaLost`."""
        self._stop_delay()
        for replica in self._replicas.values():
            replica.client.close()
        for item in self._queue.drain():
            self._fail(item.payload.pending, ReplicaLost("the server is stopping"))

    def check_ready(self) -> Signature:
        """The signature, if requests can be taken now.

        Raises:
            Unavailable: they can't.
        """
        if self.is_draining:
            raise Unavailable("the server is stopping", retry_after_s=RETRY_AFTER_LOST_S)
        if self.route.signature is None or not self._replicas:
            raise self._unavailable()
        return self.route.signature

    async def infer(self, request: InferRequest) -> Outputs:
        """Answer a request.

        Raises:
            Unavailable: no replica is ready, or the one that had the request ended.
            QueueFull: the queue is full.
            DeadlineExceeded: it took too long; rows not yet sent are never computed.
            BadRequest: the callable said that the rows are wrong.
            CallableFailed: the callable raised, or broke its declaration.
        """
        signature = self.check_ready()
        if request.rows == 0:
            return _no_rows(signature)
        self._admit(request)
        pending = _Pending(request, signature, self._loop.create_future())
        self._enqueue(pending)
        timeout_s = self.route.timeout_s
        if request.timeout_us:
            timeout_s = min(timeout_s, request.timeout_us / 1e6)
        timer = self._loop.call_later(timeout_s, self._expire, pending, timeout_s)
        self.in_flight += 1
        try:
            return await pending.future
        except BaseException:
            # Failed, or cancelled because the client went away: what still waits must not be computed.
            for item in pending.items:
                self._queue.remove(item)
            raise
        finally:
            self.in_flight -= 1
            timer.cancel()

    # Admission

    def _unavailable(self) -> Unavailable:
        route = self.route
        return Unavailable(
            f"model `{route.name}` is {route.state.value}: {route.reason or 'no replica is ready'}",
            retry_after_s=RETRY_AFTER_S.get(route.state, RETRY_AFTER_LOST_S),
        )

    def _admit(self, request: InferRequest) -> None:
        limit = self.route.max_queue_size
        if request.rows > limit:
            raise BadRequest(
                f"inputs: expected at most {limit} rows (max_queue_size of model `{self.route.name}`, over its gateway "
                f"workers), got {request.rows}; send them in several requests",
                field="inputs",
            )
        if self._queue.rows + request.rows > limit:
            self.statistics.shed += 1
            wait_s = self._queue.rows / self._rows_per_s if self._rows_per_s else 1.0
            raise QueueFull(
                f"model `{self.route.name}`: the queue is full: {self._queue.rows} of {limit} rows wait",
                retry_after_s=max(1, min(RETRY_AFTER_LIMIT_S, math.ceil(wait_s))),
            )

    def _enqueue(self, pending: _Pending) -> None:
        request = pending.request
        key = (
            id(pending.signature),
            tuple([(name, tensor.shape[1:]) for name, tensor in request.inputs.items()]),
            tuple(request.batch_parameters.items()),
        )
        now = self._loop.time()
        arrived_ns = time.perf_counter_ns()
        limit = self._queue.max_batch_size
        count = -(-request.rows // limit)
        pending.missing = count
        pending.parts = [{}] * count
        slices = None if count == 1 else {name: SlicedTensor(tensor) for name, tensor in request.inputs.items()}
        for index in range(count):
            start = index * limit
            rows = min(limit, request.rows - start)
            inputs = request.inputs
            if slices is not None:
                inputs = {name: sliced.rows(start, rows) for name, sliced in slices.items()}
            item = Item(
                key,
                rows,
                size_bytes=_varying_bytes(inputs) // rows,
                arrived_s=now,
                priority=request.priority,
                payload=_Part(pending, index, start, rows, inputs, arrived_ns),
            )
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
            if replica is None or (replica.calls and not self._queue.next_is_full()):
                return
            if self.route.max_queue_delay_ms and not self._delay_is_over():
                return
            batch = self._queue.pop()
            replica.calls += 1
            replica.rows += sum(item.rows for item in batch)
            task = self._loop.create_task(self._call(replica, batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _choose(self) -> _Replica | None:
        """The replica with the fewest outstanding rows, among those that may have another call."""
        best: _Replica | None = None
        for replica in self._replicas.values():
            if (
                replica.calls < self.route.max_in_flight
                and not replica.is_lost
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
        parts: list[_Part] = [item.payload for item in batch]
        rows = sum(part.rows for part in parts)
        started_ns = time.perf_counter_ns()
        try:
            signature = parts[0].pending.signature
            head, data = encode_batch(signature, [(part.pending.request, part.inputs, part.rows) for part in parts])
            tensors = await replica.client.infer(head, data)
            reports, compute_us = decode_reports(tensors.pop(REPORT).data, rows)
            if any(report.status is Status.BROKEN for report in reports):
                replica.is_lost = True
            took_ns = time.perf_counter_ns() - started_ns
            self._note_rate(rows, took_ns)
            self.statistics.note_call(rows, compute_us * 1000)
            outputs = _sliced(signature, tensors, reports, rows)
            self._distribute(parts, outputs, reports, started_ns, compute_us * 1000)
        except ReplicaUnreachable:
            # It never had them; another may. If there is none, they wait until the table says so.
            replica.is_lost = True
            for item in batch:
                if not item.payload.pending.future.done():
                    self._queue.push(item)
        except HeadwaterError as error:
            replica.is_lost = replica.is_lost or isinstance(error, ReplicaLost)
            for part in parts:
                # One each: an exception that is raised in several tasks gathers the tracebacks of all.
                self._fail(part.pending, type(error)(error.message, retry_after_s=error.retry_after_s))
        except Exception as error:
            logger.exception("model %s: a batch of %d rows failed in the gateway", self.route.name, rows)
            for part in parts:
                self._fail(part.pending, CallableFailed(f"internal error: {type(error).__name__}"))
        finally:
            replica.calls -= 1
            replica.rows -= rows
            self._schedule()

    def _note_rate(self, rows: int, took_ns: int) -> None:
        rate = rows / (took_ns / 1e9) * max(1, len(self._replicas))
        self._rows_per_s += RATE_SMOOTHING * (rate - self._rows_per_s) if self._rows_per_s else rate

    def _distribute(
        self,
        parts: Sequence[_Part],
        outputs: dict[str, SlicedTensor],
        reports: list[RowReport],
        started_ns: int,
        compute_ns: int,
    ) -> None:
        start = 0
        for part in parts:
            pending = part.pending
            end = start + part.rows
            error = _row_error(reports[start:end], part, pending.request.rows)
            if error is not None:
                self._fail(pending, error)
            elif not pending.future.done():
                pending.parts[part.index] = {
                    wish.name: outputs[wish.name].rows(start, part.rows) for wish in pending.request.outputs
                }
                pending.missing -= 1
                if pending.missing == 0:
                    self.statistics.note_request(pending.request.rows, started_ns - part.arrived_ns, compute_ns)
                    self._finish(pending)
            start = end

    # Ends

    def _finish(self, pending: _Pending) -> None:
        whole = pending.parts[0]
        if len(pending.parts) > 1:
            try:
                whole = {name: join_rows(name, [part[name] for part in pending.parts]) for name in whole}
            except CallableFailed as error:
                self._fail(pending, error)
                return
        pending.future.set_result(whole)

    def _fail(self, pending: _Pending, error: HeadwaterError) -> None:
        if not pending.future.done():
            pending.future.set_exception(error)
            self.statistics.failures += 1

    def _expire(self, pending: _Pending, timeout_s: float) -> None:
        waiting = any(item.alive for item in pending.items)
        where = "while it waited in the queue" if waiting else "while it was computed"
        self._fail(pending, DeadlineExceeded(f"the deadline of {timeout_s:g} s passed {where}"))


def _connect(name: str, route: ReplicaRoute) -> ReplicaClient:
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


def _no_rows(signature: Signature) -> Outputs:
    """The answer to a request without rows, which no model is called for."""
    return {
        spec.name: RawTensor(spec.datatype, (0, *(max(dim, 0) for dim in spec.shape)), b"")
        for spec in signature.outputs
    }


def _row_error(reports: Sequence[RowReport], part: _Part, rows: int) -> HeadwaterError | None:
    """The error of the first row that failed."""
    for index, report in enumerate(reports):
        if report.status is Status.OK:
            continue
        where = f"row {part.start + index}: " if rows > 1 else ""
        if report.status is Status.BAD_INPUT:
            return BadRequest(f"{where}{report.message}", field="inputs")
        if report.status is Status.BROKEN:
            return ReplicaLost(f"the replica's device failed: {report.message}", retry_after_s=RETRY_AFTER_LOST_S)
        return CallableFailed(f"{where}{report.message}")
    return None
