"""A call that is answered in frames: records which request wants which head, and passes each piece to its requests."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from typing import Final

from headwater.wire.frame import Piece, decode_frame
from headwater.wire.report import CallNote, RowReport, Status
from headwater_server.codecs.tensors import RawTensor, sliced_outputs
from headwater_server.dispatch.collector import WHOLE
from headwater_server.dispatch.pending import Part, hand_out
from headwater_server.errors import CallableFailed, HeadwaterError
from headwater_server.telemetry.recorder import DeploymentMeter
from headwater_server.transport.batch import encode_inputs, replica_loss
from headwater_server.transport.replica_protocol import FrameRequest
from headwater_server.transport.segments import RemoteSegments, Segments

__all__ = ["FrameCall"]

_numbers = itertools.count()
_WORKER = uuid.uuid4().hex[:12]
"""Makes the names of calls unique among gateway workers."""
_WHOLE_ONLY: Final = frozenset((WHOLE,))
_NOTHING: Final = FrameRequest([], CallNote())
"""Replaces a request that is no longer needed."""


class FrameCall:
    """The rows of a call, perhaps of several requests.

    Args:
        parts: the rows, which may share a call. The call asks for the heads that the parts await and are undecided.
        segments: memory for large inputs; None to send all inputs inline.
    """

    __slots__ = (
        "_asked", "_has_heads", "_parts", "_started_ns", "_unanswered", "compute_ns", "held_rows", "lost", "name",
        "request", "segment", "unshared",
    )  # fmt: skip

    def __init__(self, parts: Sequence[Part], segments: Segments | RemoteSegments | None = None) -> None:
        self._parts = parts
        for part in parts:
            part.awaited.intersection_update(part.pending.collector.undecided)
        self._asked = [_WHOLE_ONLY if part.awaited == _WHOLE_ONLY else frozenset(part.awaited) for part in parts]
        signature = parts[0].pending.signature
        self.lost: HeadwaterError | None = None
        """Set once the replica has reported that it can't continue."""
        self.unshared = ""
        """Why the replica can't open the segment with the inputs; it then has computed nothing. Empty: the replica
        didn't report that."""
        self._has_heads = bool(signature.heads)
        self._unanswered = set[str]().union(*self._asked)
        names = [head.name for head in signature.heads] or [WHOLE]
        masks = [sum(1 << names.index(head) for head in heads) for heads in self._asked]
        self.name = f"{_WORKER}-{next(_numbers)}"
        rows_of = [(part.pending.request, part.inputs, part.rows) for part in parts]
        self.request, self.segment = encode_inputs(signature, rows_of, segments)
        note = self.request.note
        note.heads = [(mask, part.rows) for mask, part in zip(masks, parts, strict=True)]
        if signature.by_key:
            note.owners = [(part.pending.request.owner, part.rows) for part in parts]
        note.patience_s = self._patience_s()
        if signature.streams:
            note.stream = self.name
        else:
            # The only step of a plain model has the model's name.
            note.left_s = {head or signature.name: left_s for head, left_s in self._left_s().items()}
        self._started_ns = time.perf_counter_ns()
        self.compute_ns = 0
        """Nanoseconds in the callables of all steps so far."""
        self.held_rows = 0
        """Rows of all gateway workers that the replica had, by its last report."""

    def tell_path(self, path: str) -> None:
        """Note the path at which the replica's port stored the segment."""
        assert self.request.note.shared is not None
        self.request.note.shared.path = path

    def _patience_s(self) -> float:
        """Seconds that a head's answer may wait for the other heads; 0 if a request can use the answer alone, if the
        parts await different heads, or if the model has no heads.

        At most half of the time until the earliest deadline, so that a late head is noticed before the deadline.
        """
        if not self._has_heads or len(set(self._asked)) != 1:
            return 0
        for part, heads in zip(self._parts, self._asked, strict=True):
            collector = part.pending.collector
            if collector.is_stream or any(collector.heads[head].on_error != "fail" for head in heads):
                return 0
        left_s = [part.pending.deadlines.left_s(head) for part in self._parts for head in self._asked[0]]
        return min(left_s, default=0.0) / 2

    def _left_s(self) -> dict[str, float]:
        """By head, the seconds until the latest deadline among the requests that want the head."""
        left_s: dict[str, float] = {}
        for part, heads in zip(self._parts, self._asked, strict=True):
            for head in heads:
                left_s[head] = max(left_s.get(head, 0.0), part.pending.deadlines.left_s(head))
        return left_s

    @property
    def is_complete(self) -> bool:
        """Whether all heads have answered. The call itself ends later, with an empty response from Triton."""
        return not self._unanswered

    def take(self, raw: bytes, meter: DeploymentMeter) -> None:
        """Count a frame of the call, and pass its pieces to the requests."""
        frame, pieces = decode_frame(raw)
        self.held_rows = frame.held_rows
        for count in frame.counts:
            meter.note_step(count)
            self.compute_ns += count.compute_us * 1000
            for part in self._parts:
                if part.pending.trace is not None:
                    part.pending.trace.step(count.step, count.compute_us)
        for part in self._parts:
            part.pending.note_call(self._started_ns, self.compute_ns)
            part.pending.deadlines.note_piece()
        for piece, data in zip(frame.pieces, pieces, strict=True):
            self._take(piece, data)

    def _take(self, piece: Piece, data: Sequence[memoryview]) -> None:
        """Pass a piece to the requests that want it, unless it reports that the segment could not be opened."""
        if self.segment is not None and piece.failures and piece.failures[0][1] == Status.UNSHARED:
            self.unshared = piece.failures[0][2]
            return
        if not self._has_heads:  # the replica runs a plain model as a pipeline of one step
            piece.head = WHOLE
        if piece.is_last:
            self._unanswered.discard(piece.head)
        wanting = [part for part, heads in zip(self._parts, self._asked, strict=True) if piece.head in heads]
        rows = sum(part.rows for part in wanting)
        failures = {row: RowReport(Status(status), message) for row, status, message in piece.failures}
        lost = replica_loss(failures.values())
        self.lost = lost or self.lost
        wrong = {piece.rows, *(tensor.shape[0] for tensor in piece.tensors)} - {rows}
        if wrong:
            if lost is None:
                error = CallableFailed(f"head `{piece.head}`: expected {rows} rows, got {min(wrong)}")
                for part in wanting:
                    part.decide(piece.head, error=error.again())
            return
        tensors = {
            tensor.name: RawTensor(tensor.datatype, tensor.shape, raw)
            for tensor, raw in zip(piece.tensors, data, strict=True)
        }
        outputs = sliced_outputs(self._parts[0].pending.signature.outputs, tensors)
        reports = [failures.get(row, RowReport(Status.OK)) for row in range(rows)] if failures else []
        hand_out(wanting, piece.head, outputs, reports, is_last=piece.is_last)

    def release(self) -> None:
        """Drop the inputs of a stream that has begun: they may be large, and a stream is never retried."""
        self.request = _NOTHING
        for part in self._parts:
            part.inputs = {}
            part.pending.request.inputs.clear()

    def end(self) -> None:
        """Fail the heads that have not answered when the call has ended."""
        for part in self._parts:
            for head in sorted(part.awaited):
                part.decide(head, error=CallableFailed(f"head `{head}`: the replica ended its answer without it"))
