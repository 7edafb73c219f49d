"""A request under way, and the parts of it that travel to replicas."""

from __future__ import annotations

import time
from dataclasses import dataclass

from app.codecs.tensors import InferRequest, Outputs, RawTensor, SlicedTensor, join_rows
from app.dispatch.collector import Collector
from app.dispatch.deadlines import Deadlines
from app.dispatch.queue import Item
from app.errors import CallableFailed, HeadwaterError
from app.telemetry.tracing import ModelTrace
from app.transport.protocol import FrameReplicaClient
from inference.signature import Signature

__all__ = ["Part", "Pending"]


class Pending:
    """A request under way.

    Args:
        request: what is asked.
        signature: that it was checked against; another version of the model may be served before it is answered.
        collector: of its answer.
        max_batch_size: rows of a part.
    """

    __slots__ = (
        "_missing", "_results", "arrived_ns", "batch_wait_ns", "collector", "compute_ns", "deadlines", "fingerprint",
        "gather_mark_ns", "items", "parts", "queue_ns", "request", "signature", "stream", "trace",
    )  # fmt: skip

    def __init__(self, request: InferRequest, signature: Signature, collector: Collector, max_batch_size: int) -> None:
        self.request = request
        self.signature = signature
        self.collector = collector
        self.arrived_ns = time.perf_counter_ns()
        self.parts = self._split(max_batch_size)
        self.items: list[Item] = []
        """The parts, as they wait."""
        self.deadlines: Deadlines | None = None
        self.stream: tuple[FrameReplicaClient, str] | None = None
        """Who computes a stream, as long as there is more to come, and its name there."""
        self.queue_ns = 0
        """What its last call waited for, and took until it was answered."""
        self.compute_ns = 0
        self.gather_mark_ns = 0
        """What the deployment's `app.dispatch.policy.GatherClock` showed when it came."""
        self.batch_wait_ns = 0
        """How much of what its last call waited for was company."""
        self.trace: ModelTrace | None = None
        """If it is traced."""
        self.fingerprint = b""
        """Once it is suspected to have taken a replica down."""
        self._results: dict[str, list[Outputs]] = {}
        """Of heads that have said some parts, by part."""
        self._missing: dict[str, int] = {}
        """How many parts these have yet to say."""

    def where(self) -> str:
        """What it is at, for messages."""
        is_waiting = any(item.alive for item in self.items) or any(part.waits for part in self.parts)
        return "while it waited in the queue" if is_waiting else "while it was computed"

    @property
    def is_awaited(self) -> bool:
        """Whether a replica has more to say of it."""
        return any(part.awaited for part in self.parts)

    def release(self) -> None:
        """Let go of its tensors: it and its parts know each other, and would wait for the garbage collector."""
        self.items = []
        self.parts = []
        self.deadlines = None
        self._results = {}

    def note_call(self, started_ns: int, compute_ns: int) -> None:
        """Take in when a call of it began, and what it took by now."""
        self.queue_ns, self.compute_ns = started_ns - self.arrived_ns, compute_ns

    def note_start(self, gathered_ns: int) -> None:
        """Take in what the deployment's clock shows as a call of it begins."""
        self.batch_wait_ns = gathered_ns - self.gather_mark_ns

    def transport_ns(self) -> int | None:
        """How long it took by now, without waiting and computing; None: of a stream, whose reader takes its time."""
        if self.collector.is_stream:
            return None
        return max(0, time.perf_counter_ns() - self.arrived_ns - self.queue_ns - self.compute_ns)

    def join(self, index: int, head: str, outputs: Outputs) -> None:
        """Take in what a head says of a part; with the last part it has said all."""
        whole = outputs
        if len(self.parts) > 1:
            results = self._results.setdefault(head, [{}] * len(self.parts))
            results[index] = outputs
            missing = self._missing[head] = self._missing.get(head, len(results)) - 1
            if missing:
                return
            try:
                whole = {name: join_rows(name, [one[name] for one in results if one]) for name in results[0]}
            except CallableFailed as failure:
                self.collector.decide(head, error=failure)
                return
        # The end of a stream's pieces is none itself.
        self.collector.decide(head, whole if whole or not self.signature.streams else None)

    def cut(self, part: Part, max_batch_size: int) -> list[Part]:
        """Cut a part that waits into smaller ones: batches may not be as large any more. Returns these."""
        pieces = _cut(part, max_batch_size)
        at = part.index
        self.parts[at : at + 1] = pieces
        for index, one in enumerate(self.parts):
            one.index = index
        for head, results in self._results.items():
            # A head that has said all of these rows said so of the first piece.
            results[at : at + 1] = [results[at], *[{}] * (len(pieces) - 1)]
            if head in part.awaited:
                self._missing[head] += len(pieces) - 1
        return pieces

    def _split(self, max_batch_size: int) -> list[Part]:
        request = self.request
        whole = Part(self, 0, 0, request.rows, request.inputs, set(self.collector.heads))
        return [whole] if request.rows <= max_batch_size else _cut(whole, max_batch_size)


@dataclass(slots=True, eq=False)
class Part:
    """Some rows of a request, which travel together."""

    pending: Pending
    index: int
    start: int
    """First row, in the request."""
    rows: int
    inputs: dict[str, RawTensor]
    awaited: set[str]
    """Heads that have not said all of these rows."""
    losses: int = 0
    """Replicas that were lost with them."""
    waits: bool = False
    """Whether they wait to be computed alone; see `app.dispatch.losses`."""

    def add(self, head: str, outputs: Outputs) -> None:
        """Take in what a head says of these rows that has more to say."""
        if head in self.awaited:
            self.pending.collector.add(head, outputs)

    def decide(self, head: str, outputs: Outputs | None = None, error: HeadwaterError | None = None) -> None:
        """Take in a head's last word of these rows; what comes after it is ignored."""
        if head not in self.awaited:
            return
        self.awaited.discard(head)
        if error is not None:
            self.pending.collector.decide(head, error=error)
        elif head in self.pending.collector.undecided:
            self.pending.join(self.index, head, outputs or {})

    def fail(self, error: HeadwaterError) -> None:
        """What has not been said of these rows won't be: those heads have failed, and with them perhaps the request."""
        for head in [head for head in self.pending.collector.heads if head in self.awaited]:
            self.decide(head, error=error.again())


def _cut(part: Part, max_batch_size: int) -> list[Part]:
    """A part's rows as parts of at most so many."""
    sliced = {name: SlicedTensor(tensor) for name, tensor in part.inputs.items()}
    pieces: list[Part] = []
    for start in range(0, part.rows, max_batch_size):
        rows = min(max_batch_size, part.rows - start)
        inputs = {name: tensor.rows(start, rows) for name, tensor in sliced.items()}
        index = part.index + len(pieces)
        pieces.append(Part(part.pending, index, part.start + start, rows, inputs, set(part.awaited), part.losses))
    return pieces
