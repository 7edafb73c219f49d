"""The calls of one deployment's replicas that are under way, and the way back of what they answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

from app.codecs.tensors import SlicedTensor
from app.dispatch.collector import PIECES_LIMIT, PIECES_LIMIT_BYTES, WHOLE
from app.dispatch.frame_call import FrameCall
from app.dispatch.pending import Part, Pending
from app.dispatch.pool import ReplicaCalls
from app.dispatch.queue import Item
from app.errors import CallableFailed, HeadwaterError, ReplicaLost, ReplicaUnreachable
from app.telemetry.recorder import DeploymentMeter
from app.transport.batch import encode_batch, row_error, sliced
from app.transport.protocol import FrameReplicaClient, ReplicaClient
from app.transport.segments import Segments
from inference.wire.frame import decode_frame
from inference.wire.report import REPORT, RowReport, Status, decode_reports

__all__ = ["Calls"]

logger = logging.getLogger("headwater.dispatch")


class Calls:
    """Makes calls. Whatever goes wrong in one becomes the failure of what it has not answered.

    Args:
        name: the deployment's.
        meter: where to count.
        on_lost: called with a replica that gets no call any more.
        on_lost_part: called with rows that a replica was lost with, and the reason.
        on_unsent: called with rows that a replica never had.
        on_alone: called with rows that replicas were lost with before, and this one wasn't.
        on_end: called with a replica that has a call less.
    """

    def __init__(
        self,
        name: str,
        meter: DeploymentMeter,
        *,
        on_lost: Callable[[ReplicaCalls], None],
        on_lost_part: Callable[[Part, ReplicaLost], None],
        on_unsent: Callable[[Item], None],
        on_alone: Callable[[Part], None],
        on_end: Callable[[ReplicaCalls], None],
    ) -> None:
        self._name = name
        self._meter = meter
        self._on_lost = on_lost
        self._on_lost_part = on_lost_part
        self._on_unsent = on_unsent
        self._on_alone = on_alone
        self._on_end = on_end
        self.keep_apart = False
        """Whether a replica must not merge calls that wait there."""
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._segments = Segments()

    def start(self, replica: ReplicaCalls, batch: list[Item], gathered_ns: int) -> None:
        """Give a replica a batch.

        Args:
            replica: which.
            batch: rows that may share a call.
            gathered_ns: what the deployment's `app.dispatch.policy.GatherClock` shows.
        """
        rows = 0
        for item in batch:
            rows += item.rows
            pending = _part(item).pending
            pending.note_start(gathered_ns)
            if pending.trace is not None:
                pending.trace.call(replica.route.id)
        replica.calls += 1
        replica.rows += rows
        replica.batches[id(batch)] = batch
        task = self._loop.create_task(self._call(replica, batch, rows))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, replica: ReplicaCalls, batch: list[Item], rows: int) -> None:
        parts = [_part(item) for item in batch]
        try:
            if replica.route.grpc_socket:
                await self._answer_in_frames(replica, parts, rows)
            else:
                await self._answer_whole(replica, parts, rows)
            if parts[0].losses and not replica.is_lost:
                self._on_alone(parts[0])
        except ReplicaUnreachable:
            self._on_lost(replica)
            for item in batch:
                self._on_unsent(item)
        except ReplicaLost as error:
            self._on_lost(replica)
            for part in parts:
                self._on_lost_part(part, error)
        except HeadwaterError as error:
            for part in parts:
                part.fail(error)
        except Exception as error:
            logger.exception("model %s: a batch of %d rows failed in the gateway", self._name, rows)
            for part in parts:
                part.fail(CallableFailed(f"internal error: {type(error).__name__}"))
        finally:
            del replica.batches[id(batch)]
            replica.calls -= 1
            replica.rows -= rows
            self._on_end(replica)

    async def _answer_whole(self, replica: ReplicaCalls, parts: list[Part], rows: int) -> None:
        """One call of a model that answers its batch whole."""
        client = cast(ReplicaClient, replica.client)
        started_ns = time.perf_counter_ns()
        signature = parts[0].pending.signature
        rows_of = [(part.pending.request, part.inputs, part.rows) for part in parts]
        is_alone = self.keep_apart or parts[0].losses > 0
        segments = self._segments if replica.is_sharing else None
        head, data, segment = encode_batch(signature, rows_of, is_alone=is_alone, segments=segments)
        try:
            tensors = await client.infer(head, data)
            reports, compute_us, is_merged = decode_reports(tensors.pop(REPORT).data, rows)
        except BaseException:
            if segment is not None:
                segment.spoil()
            raise
        if segment is not None:
            if reports[0].status is Status.UNSHARED:
                self._stop_sharing(replica, reports[0].message)
                await self._answer_whole(replica, parts, rows)
                return
            tensors.update(segment.outputs(signature))
        if replica.is_sharing:
            self._segments.note_answer(tensors.values(), rows)
        if any(report.status is Status.BROKEN for report in reports):
            self._on_lost(replica)
        self._meter.note_call(rows, signature.max_batch_size, compute_us * 1000, is_merged=is_merged)
        outputs = sliced(signature, tensors, reports, rows)
        self._distribute(parts, outputs, reports, started_ns, compute_us * 1000)

    async def _answer_in_frames(self, replica: ReplicaCalls, parts: list[Part], rows: int) -> None:
        """One call of a pipeline or of a model that streams: its answer comes in frames."""
        if parts[0].pending.signature.streams and parts[0].pending.collector.is_done:  # its client left just now
            return
        # A stream would keep open files for as long as it lasts, here and in the replica.
        is_sharing = replica.is_sharing and not parts[0].pending.signature.streams
        call = FrameCall(parts, self._segments if is_sharing else None)
        try:
            await self._hear(replica, call, parts, rows)
        except BaseException:
            if call.segment is not None:
                call.segment.spoil()
            raise
        if call.unshared:
            self._stop_sharing(replica, call.unshared)
            await self._answer_in_frames(replica, parts, rows)

    async def _hear(self, replica: ReplicaCalls, call: FrameCall, parts: list[Part], rows: int) -> None:
        """Lead a call's frames to its requests, as far as these want them."""
        client = cast(FrameReplicaClient, replica.client)
        pending = parts[0].pending
        is_stream = pending.signature.streams
        started_ns = time.perf_counter_ns()
        if is_stream:
            pending.stream = (client, call.name)
        compute_us = 0
        async with contextlib.aclosing(client.frames(call.name, call.request)) as frames:
            async for raw in frames:
                compute_us = self._take(call, parts, raw, started_ns, compute_us)
                size_bytes = len(raw)
                del raw  # the next one may be long in coming
                if call.unshared:
                    return
                if is_stream:
                    call.release()
                if call.lost is not None:
                    raise call.lost
                if call.is_said and not is_stream:  # what is left is Triton's end, a millisecond later
                    break
                if is_stream:
                    await _wait_for_reader(pending, size_bytes)
                if is_stream and pending.collector.is_done and not pending.collector.succeeded:
                    # Nobody wants the rest. Who waits for its reader may be slow to say so.
                    if pending.stream is not None:
                        client.cancel(call.name)
                    break
        pending.stream = None
        self._meter.note_call(rows, pending.signature.max_batch_size, compute_us * 1000)
        call.end()

    def _take(self, call: FrameCall, parts: list[Part], raw: bytes, started_ns: int, compute_us: int) -> int:
        """Lead one of a call's frames to its requests. Returns what the call computed by now, in microseconds."""
        frame, pieces = decode_frame(raw)
        for count in frame.counts:
            self._meter.note_step(count)
            compute_us += count.compute_us
            for part in parts:
                if part.pending.trace is not None:
                    part.pending.trace.step(count.step, count.compute_us)
        for part in parts:
            part.pending.note_call(started_ns, compute_us * 1000)
            if part.pending.deadlines is not None:
                part.pending.deadlines.hear()
        for piece, data in zip(frame.pieces, pieces, strict=True):
            call.take(piece, data)
        return compute_us

    def _stop_sharing(self, replica: ReplicaCalls, why: str) -> None:
        logger.warning(
            "model %s: replica %s can't open the gateway's memory, so large tensors take the slower way: %s",
            self._name, replica.route.id, why,
        )  # fmt: skip
        replica.is_sharing = False

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
            if isinstance(error, ReplicaLost):
                self._on_lost_part(part, error)
            elif error is not None:
                part.fail(error)
            elif not pending.collector.is_done:
                found = {wish.name: outputs[wish.name].rows(start, part.rows) for wish in pending.request.outputs}
                pending.note_call(started_ns, compute_ns)
                part.decide(WHOLE, found)
            start = end


async def _wait_for_reader(pending: Pending, size_bytes: int) -> None:
    """Hold a stream up whose reader is behind: what isn't taken here, the replica doesn't go on to make.

    Args:
        pending: its request.
        size_bytes: of its last result, and probably of its next one.
    """
    limit = max(1, min(PIECES_LIMIT, PIECES_LIMIT_BYTES // size_bytes))
    if not pending.collector.is_full(limit):
        return
    if pending.deadlines is not None:
        pending.deadlines.hold()
    await pending.collector.room(limit)
    if pending.deadlines is not None:
        pending.deadlines.hear()


def _part(item: Item) -> Part:
    part: Part = item.payload
    return part
