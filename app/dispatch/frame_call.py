"""One call that is answered in frames: who wants which head of it, and the way of each piece to its requests."""

from __future__ import annotations

import itertools
import math
import uuid
from collections.abc import Sequence

from app.codecs.tensors import RawTensor, SlicedTensor
from app.dispatch.collector import WHOLE
from app.dispatch.pending import Part
from app.errors import CallableFailed, HeadwaterError, ReplicaLost
from app.transport.batch import encode_for_frames, row_error
from app.transport.protocol import FrameRequest
from app.transport.segments import Segments
from inference.wire.frame import Piece
from inference.wire.report import RowReport, Status

__all__ = ["FrameCall"]

_numbers = itertools.count()
_WORKER = uuid.uuid4().hex[:12]
"""Makes names of calls unique among gateway workers."""


class FrameCall:
    """Some requests' rows in one call.

    Args:
        parts: the rows, which may share a call. The heads that they await, less those that are decided by now, are
            asked for.
        segments: where large inputs go; None: all go inline.
    """

    def __init__(self, parts: Sequence[Part], segments: Segments | None = None) -> None:
        self._parts = parts
        for part in parts:
            part.awaited.intersection_update(part.pending.collector.undecided)
        self._asked = [frozenset(part.awaited) for part in parts]
        signature = parts[0].pending.signature
        self.lost: ReplicaLost | None = None
        """Set once the replica has said that it can't go on."""
        self.unshared = ""
        """Why the replica can't open the memory that the inputs are in; then it ran nothing."""
        self._has_heads = bool(signature.heads)
        self._unsaid = set[str]().union(*self._asked)
        names = [head.name for head in signature.heads] or [WHOLE]
        masks = [sum(1 << names.index(head) for head in asked) for asked in self._asked]
        self.name = f"{_WORKER}-{next(_numbers)}"
        self.request, self.segment = encode_for_frames(
            signature,
            [(part.pending.request, part.inputs, part.rows) for part in parts],
            [(mask, part.rows) for mask, part in zip(masks, parts, strict=True)],
            self.name if signature.streams else "",
            self._patience_s(),
            segments,
        )
        if not signature.streams:
            self.request.note.left_s = self._left_s()

    def _patience_s(self) -> float:
        """How long one head's answer may wait for the others', because no request can do anything with it alone.

        Half of the time until the first deadline at most, so that what is late is known then.
        """
        if not self._has_heads or len(set(self._asked)) != 1:
            return 0
        left_s = []
        for part, asked in zip(self._parts, self._asked, strict=True):
            pending = part.pending
            heads = pending.collector.heads
            if pending.collector.is_stream or any(heads[head].on_error != "fail" for head in asked):
                return 0
            left_s.append(0.0 if pending.deadlines is None else pending.deadlines.first_left_s())
        return min(left_s) / 2

    def _left_s(self) -> dict[str, float]:
        """By head, how long the last of the requests that want it waits for it."""
        left_s: dict[str, float] = {}
        for part, asked in zip(self._parts, self._asked, strict=True):
            deadlines = part.pending.deadlines
            for head in asked:
                waits_s = math.inf if deadlines is None else deadlines.left_s(head)
                left_s[head] = max(left_s.get(head, 0.0), waits_s)
        return {head: one for head, one in left_s.items() if one < math.inf}

    def take(self, piece: Piece, data: Sequence[memoryview]) -> None:
        """Hand a piece to the requests that wanted it, unless it says that nothing ran for want of shared memory."""
        if self.segment is not None and piece.failures and piece.failures[0][1] == Status.UNSHARED:
            self.unshared = piece.failures[0][2]
            return
        if not self._has_heads:  # a model that streams is a pipeline of one step in its replica, and only there
            piece.head = WHOLE
        if piece.is_last:
            self._unsaid.discard(piece.head)
        wanting = [part for part, asked in zip(self._parts, self._asked, strict=True) if piece.head in asked]
        rows = sum(part.rows for part in wanting)
        wrong = {piece.rows, *(tensor.shape[0] for tensor in piece.tensors)} - {rows}
        if wrong:
            for part in wanting:
                error = CallableFailed(f"head `{piece.head}`: expected {rows} rows, got {min(wrong)}")
                part.decide(piece.head, error=error)
            return
        outputs = {
            tensor.name: SlicedTensor(RawTensor(tensor.datatype, tensor.shape, raw))
            for tensor, raw in zip(piece.tensors, data, strict=True)
        }
        failures = {row: RowReport(Status(status), message) for row, status, message in piece.failures}
        start = 0
        for part in wanting:
            self._share(part, piece, start, outputs, failures)
            start += part.rows
        broken = [report for report in failures.values() if report.status is Status.BROKEN]
        if broken:  # what has not been said, another may say
            self.lost = ReplicaLost(f"the replica's device failed: {broken[0].message}")

    def release(self) -> None:
        """Let go of the inputs of a stream that has begun, which isn't tried again: it may last, and they be large."""
        self.request = FrameRequest([], self.request.note)
        for part in self._parts:
            part.inputs = {}
            part.pending.request.inputs.clear()

    @property
    def is_said(self) -> bool:
        """Whether the replica has said all that was asked. Its call ends later, with an empty answer of Triton's."""
        return not self._unsaid

    def end(self) -> None:
        """The replica has said all: a head that is still awaited has failed."""
        for part in self._parts:
            for head in sorted(part.awaited):
                part.decide(head, error=CallableFailed(f"head `{head}`: the replica ended its answer without it"))

    def _share(
        self, part: Part, piece: Piece, start: int, outputs: dict[str, SlicedTensor], failures: dict[int, RowReport]
    ) -> None:
        """Hand a part its rows of a piece, which begin at ``start`` there."""
        request = part.pending.request
        error: HeadwaterError | None = None
        if failures:
            reports = [failures.get(row, RowReport(Status.OK)) for row in range(start, start + part.rows)]
            error = row_error(reports, part.start, request.rows)
        if isinstance(error, ReplicaLost):
            return
        if error is not None:
            part.decide(piece.head, error=error)
            return
        found = {
            wish.name: outputs[wish.name].rows(start, part.rows) for wish in request.outputs if wish.name in outputs
        }
        if piece.is_last:
            part.decide(piece.head, found)
        else:
            part.add(piece.head, found)
