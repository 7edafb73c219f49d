"""A request in flight, and its parts, which wait in the queue and travel to replicas."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

import msgspec

from headwater.signature import Signature
from headwater.wire.report import RowNote, RowReport
from headwater_server.codecs.tensors import InferRequest, Outputs, RawTensor, SlicedTensor, join_rows
from headwater_server.dispatch.collector import Collector
from headwater_server.dispatch.deadlines import Deadlines
from headwater_server.dispatch.queue import Item
from headwater_server.errors import CallableFailed, HeadwaterError, ReplicaLost
from headwater_server.telemetry.tracing import ModelTrace
from headwater_server.transport.batch import row_error
from headwater_server.transport.replica_protocol import FrameReplicaClient

__all__ = ["Part", "Pending", "hand_out", "held_bytes"]


class Pending:
    """A request in flight.

    Args:
        request: the request.
        signature: the signature that the request was checked against; a reload may change the model's signature before
            the request is answered.
        collector: collects its answer.
        timeout_s: the deployment's timeout.
    """

    __slots__ = (
        "_results", "arrived_ns", "batch_wait_ns", "collector", "compute_ns", "deadlines", "fingerprint",
        "gathered_ns", "parts", "queue_ns", "request", "signature", "stream", "trace",
    )  # fmt: skip

    def __init__(self, request: InferRequest, signature: Signature, collector: Collector, timeout_s: float) -> None:
        self.request = request
        self.signature = signature
        self.collector = collector
        self.deadlines = Deadlines(collector, timeout_s, request.timeout_us, self.where, signature.streams)
        self.arrived_ns = time.perf_counter_ns()
        self.parts: list[Part] = []
        self.stream: tuple[FrameReplicaClient, str] | None = None
        """The client that receives the stream, and the stream's name in that client; None before the call and after the
        last frame."""
        self.queue_ns = 0
        """Nanoseconds from arrival to the start of the last call that was answered, or whose answer has begun; 0
        before."""
        self.compute_ns = 0
        """Nanoseconds in the callable during the last call, so far."""
        self.gathered_ns = 0
        """The reading of the deployment's `headwater_server.dispatch.policy.GatherClock` when the request arrived."""
        self.batch_wait_ns = 0
        """The part of ``queue_ns`` in which a replica was free, but the batch waited for more rows."""
        self.trace: ModelTrace | None = None
        self.fingerprint = b""
        """The request's hash (`headwater_server.dispatch.losses.fingerprint`) once it is suspected of having ended a
        replica; empty before."""
        self._results: dict[str, dict[Part, Outputs]] = {}
        """By head, the outputs of the parts that are answered; used only if the request has several parts."""

    def where(self) -> str:
        """The request's present state in words, for messages."""
        is_waiting = any(part.alive or part.is_retry for part in self.parts)
        return "while it waited in the queue" if is_waiting else "while it was computed"

    def release(self) -> None:
        """Break the reference cycle with its parts, so that its tensors don't wait for the garbage collector."""
        self.deadlines.close()
        self.parts = []
        self._results = {}

    def note_call(self, started_ns: int, compute_ns: int) -> None:
        """Record when its call began, and the time in the callable so far."""
        self.queue_ns, self.compute_ns = started_ns - self.arrived_ns, compute_ns

    def note_headers(self, reports: Sequence[RowReport]) -> None:
        """Take the headers of the answer that the model has set, from the reports of rows that succeeded."""
        for report in reports:
            if report.message:
                self.request.answer_headers.update(msgspec.json.decode(report.message, type=RowNote).headers)

    def transport_ns(self) -> int | None:
        """Nanoseconds since arrival, less queueing and computing; None for a stream, which may wait for its reader."""
        if self.collector.is_stream:
            return None
        return max(0, time.perf_counter_ns() - self.arrived_ns - self.queue_ns - self.compute_ns)

    def join(self, part: Part, head: str, outputs: Outputs) -> None:
        """Take a head's outputs for a part; the outputs of the last missing part complete the head. The head fails if
        the parts' outputs can't be joined."""
        whole = outputs
        if len(self.parts) > 1:
            results = self._results.setdefault(head, {})
            results[part] = outputs
            if len(results) < len(self.parts):
                return
            in_order = [results[piece] for piece in self.parts]
            ragged = {spec.name for spec in self.signature.outputs if spec.ragged}
            try:
                whole = {
                    name: join_rows(name, [tensors[name] for tensors in in_order if tensors], is_ragged=name in ragged)
                    for name in in_order[0]
                }
            except CallableFailed as failure:
                self.collector.decide(head, error=failure)
                return
        # The end of a stream carries no outputs.
        self.collector.decide(head, whole if whole or not self.signature.streams else None)

    def cut(self, part: Part, max_batch_size: int) -> list[Part]:
        """Replace a waiting part by smaller parts, because batches became smaller. Returns the smaller parts."""
        pieces = part.pieces(max_batch_size)
        at = self.parts.index(part)
        self.parts[at : at + 1] = pieces
        for results in self._results.values():
            if part in results:  # the outputs of all its rows now belong to the first piece
                results.update({piece: {} for piece in pieces})
                results[pieces[0]] = results.pop(part)
        return pieces


class Part(Item):
    """Rows of a request that wait and travel together.

    Args:
        pending: the request.
        key: see `Item`, also for ``rows`` and ``held_bytes``.
        start: the index of the first row in the request.
        inputs: the rows' tensors.
        awaited: the heads that haven't answered these rows.
        losses: the number of replicas that were lost while they had these rows; it starts at 1 if the request was a
            suspect when it arrived (`headwater_server.dispatch.losses.Quarantine`).
    """

    __slots__ = ("awaited", "inputs", "is_retry", "losses", "lost_with", "pending", "start")

    def __init__(
        self,
        pending: Pending,
        key: Hashable,
        start: int,
        rows: int,
        inputs: dict[str, RawTensor],
        awaited: set[str],
        held_bytes: int,
        losses: int,
    ) -> None:
        super().__init__(key, rows, pending.collector.started_s, pending.request.priority, held_bytes)
        self.pending = pending
        self.start = start
        self.inputs = inputs
        self.awaited = awaited
        self.losses = losses
        self.lost_with = ""
        """Id of the first replica that was lost with these rows; empty before, and if the request was a suspect when it
        arrived."""
        self.is_retry = False
        """Whether it waits in `headwater_server.dispatch.losses.Retries`."""

    def add(self, head: str, outputs: Outputs) -> None:
        """Take outputs of a head that will send more outputs."""
        if head in self.awaited:
            self.pending.collector.add(head, outputs)

    def decide(self, head: str, outputs: Outputs | None = None, error: HeadwaterError | None = None) -> None:
        """Take a head's last outputs for these rows, or its error; later calls for the head are ignored."""
        if head not in self.awaited:
            return
        self.awaited.discard(head)
        if error is not None:
            self.pending.collector.decide(head, error=error)
        elif head in self.pending.collector.undecided:
            self.pending.join(self, head, outputs or {})

    def fail(self, error: HeadwaterError) -> None:
        """Fail the heads that haven't answered these rows, which may fail the whole request."""
        for head in [head for head in self.pending.collector.heads if head in self.awaited]:
            self.decide(head, error=error.again())

    def pieces(self, max_batch_size: int) -> list[Part]:
        """Cut the part into parts of at most ``max_batch_size`` rows; returns the part itself if it is small enough."""
        if self.rows <= max_batch_size:
            return [self]
        sliced = {name: SlicedTensor(tensor) for name, tensor in self.inputs.items()}
        pieces = []
        for start in range(0, self.rows, max_batch_size):
            rows = min(max_batch_size, self.rows - start)
            inputs = {name: tensor.rows(start, rows) for name, tensor in sliced.items()}
            piece = Part(
                self.pending,
                self.key,
                self.start + start,
                rows,
                inputs,
                set(self.awaited),
                held_bytes(inputs),
                self.losses,
            )
            piece.lost_with = self.lost_with
            pieces.append(piece)
        return pieces


def held_bytes(inputs: dict[str, RawTensor]) -> int:
    """The size of these tensors' data in bytes."""
    return sum([len(tensor.data) for tensor in inputs.values()])


def hand_out(
    parts: Sequence[Part], head: str, outputs: dict[str, SlicedTensor], reports: Sequence[RowReport], *, is_last: bool
) -> None:
    """Cut a head's outputs by rows, and give each part its rows.

    A part gets the error of its first failed row in place of outputs. If that row reports that the replica can't
    continue (`headwater.wire.report.Status.BROKEN`), the part gets nothing: the caller retries or fails the part.

    Args:
        parts: the parts that the outputs' rows belong to, in the order of the rows.
        head: the head.
        outputs: the outputs of all parts by name.
        reports: a report for each row; empty if all rows succeeded.
        is_last: whether these are the head's last outputs for these parts.
    """
    start = 0
    for part in parts:
        request = part.pending.request
        end = start + part.rows
        error = row_error(reports[start:end], part.start, request.rows) if reports else None
        if error is not None:
            if not isinstance(error, ReplicaLost):
                part.decide(head, error=error)
        elif not part.pending.collector.is_done:
            part_outputs = {
                output.name: outputs[output.name].rows(start, part.rows)
                for output in request.outputs
                if output.name in outputs
            }
            if reports:
                part.pending.note_headers(reports[start:end])
            if is_last:
                part.decide(head, part_outputs)
            else:
                part.add(head, part_outputs)
        start = end
