"""Calls a deployment's replicas, and passes their answers to the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import cast

from headwater.wire.report import REPORT, Status, decode_reports
from headwater_server.dispatch.collector import PIECES_LIMIT, PIECES_LIMIT_BYTES, WHOLE
from headwater_server.dispatch.frame_call import FrameCall
from headwater_server.dispatch.losses import Losses
from headwater_server.dispatch.pending import Part, Pending, hand_out
from headwater_server.dispatch.pool import ReplicaCalls
from headwater_server.errors import CallableFailed, HeadwaterError, ReplicaLost, ReplicaUnreachable, SharedMemoryFull
from headwater_server.telemetry.recorder import DeploymentMeter
from headwater_server.transport.batch import encode_batch, replica_loss, sliced
from headwater_server.transport.replica_protocol import FrameReplicaClient, ReplicaClient
from headwater_server.transport.segments import RemoteSegment, RemoteSegments, Segments

__all__ = ["Calls"]

logger = logging.getLogger("headwater.dispatch")


class Calls:
    """Makes calls. An error in a call fails the rows that the call has not answered, with these exceptions:

    - ``losses`` takes the rows of a lost replica;
    - ``on_unsent`` is called with each part that never reached its replica;
    - if a call of several parts was too large for shared memory, and the model is idempotent, each part is retried
      alone.
    """

    def __init__(self, name: str, meter: DeploymentMeter, losses: Losses, on_unsent: Callable[[Part], None]) -> None:
        self._name = name
        self._meter = meter
        self._losses = losses
        self._on_unsent = on_unsent
        self.on_end: Callable[[], None] = lambda: None
        """Called after each call, also after a call that failed."""
        self.on_change: Callable[[ReplicaCalls], None] = lambda replica: None
        """Called with a replica when its number of calls or its report has changed."""
        self.keep_apart = False
        """Whether replicas must not merge waiting calls into one batch."""
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._segments = Segments()
        self._remote = RemoteSegments(self._segments)

    def start(self, replica: ReplicaCalls, batch: list[Part], gathered_ns: int) -> None:
        """Begin a call of a replica, in a new task.

        Args:
            replica: the replica.
            batch: parts that may share a call.
            gathered_ns: the present reading of the deployment's `headwater_server.dispatch.policy.GatherClock`.
        """
        rows = 0
        for part in batch:
            rows += part.rows
            pending = part.pending
            pending.batch_wait_ns = gathered_ns - pending.gathered_ns
            if pending.trace is not None:
                pending.trace.call(replica.route.id)
        replica.calls += 1
        replica.rows += rows
        replica.started_rows += rows
        replica.batches[id(batch)] = batch
        self.on_change(replica)
        rows_offset = replica.rows - replica.started_rows
        task = self._loop.create_task(self._call(replica, batch, rows, rows_offset))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, replica: ReplicaCalls, parts: list[Part], rows: int, rows_offset: int) -> None:
        """Make a call. ``rows_offset`` plus the replica's ``started_rows`` when the call ends is the number of this
        worker's rows that the replica had at any time during the call."""
        try:
            if replica.route.grpc_address:
                held = await self._answer_in_frames(replica, parts, rows)
            else:
                held = await self._answer_whole(replica, parts, rows)
            replica.others = max(0, held - rows_offset - replica.started_rows)
            replica.heard_s = self._loop.time()
            if not replica.is_lost:
                replica.losses = 0
            if parts[0].losses and not replica.is_lost:  # a retry runs alone, so its request is not to blame
                self._losses.quarantine.clear(parts[0].pending.fingerprint)
        except ReplicaUnreachable:
            self._losses.lose(replica, parts)
            for part in parts:
                self._on_unsent(part)
        except ReplicaLost as error:
            self._losses.lose(replica)
            for part in parts:
                self._losses.take(part, replica, error)
        except SharedMemoryFull as error:
            for part in parts:  # a part may fit alone
                if len(parts) > 1 and part.pending.signature.idempotent:
                    part.key = object()  # it shares no call even if it returns to the queue
                    self._losses.retries.push(part)
                else:
                    part.fail(error)
        except HeadwaterError as error:
            for part in parts:
                part.fail(error)
        except Exception as error:
            logger.exception("model %s: a batch of %d rows failed in the gateway", self._name, rows)
            for part in parts:
                part.fail(CallableFailed(f"internal error: {type(error).__name__}"))
        finally:
            del replica.batches[id(parts)]
            replica.calls -= 1
            replica.rows -= rows
            self.on_change(replica)
            self._losses.retries.note_end(replica)
            self.on_end()

    async def _answer_whole(self, replica: ReplicaCalls, parts: list[Part], rows: int) -> int:
        """Call a model that answers its batch whole. Returns the rows of all workers that the replica computed when
        this call's rows were ready."""
        client = cast(ReplicaClient, replica.client)
        started_ns = time.perf_counter_ns()
        signature = parts[0].pending.signature
        rows_of = [(part.pending.request, part.inputs, part.rows) for part in parts]
        is_alone = self.keep_apart or parts[0].losses > 0
        segments = (self._remote if replica.is_remote else self._segments) if replica.is_sharing else None
        head, data, segment = encode_batch(signature, rows_of, is_alone=is_alone, segments=segments)
        try:
            tensors = await client.infer(head, data, segment if isinstance(segment, RemoteSegment) else None)
            reports, compute_us, is_merged, held = decode_reports(tensors.pop(REPORT).data, rows)
        except BaseException:
            if segment is not None:
                segment.spoil()
            raise
        if segment is not None:
            if reports[0].status is Status.UNSHARED:
                self._stop_sharing(replica, reports[0].message)
                return await self._answer_whole(replica, parts, rows)
            tensors.update(segment.outputs(signature))
        if replica.is_sharing:
            self._segments.note_answer(tensors.values(), rows)
        self._meter.note_call(rows, signature.max_batch_size, compute_us * 1000, is_merged=is_merged)
        noted = [report for report in reports if report.message or report.status is not Status.OK]
        lost = replica_loss(noted)
        try:
            outputs = sliced(signature, tensors, reports, rows)
        except CallableFailed as error:
            raise lost or error from None
        for part in parts:
            part.pending.note_call(started_ns, compute_us * 1000)
        hand_out(parts, WHOLE, outputs, reports if noted else (), is_last=True)
        if lost is not None:
            raise lost
        return held

    async def _answer_in_frames(self, replica: ReplicaCalls, parts: list[Part], rows: int) -> int:
        """Call a fused pipeline, or a model that streams or whose calls are coroutines. Returns the rows of all workers
        that the replica had, by its last report; 0 if the replica was not called, because the request had ended."""
        pending = parts[0].pending
        is_stream = pending.signature.streams
        if is_stream and pending.collector.is_done:  # the request has just ended
            return 0
        # A stream's inputs go inline: a segment would stay open in gateway and replica for as long as the stream lasts.
        segments = (self._remote if replica.is_remote else self._segments) if replica.is_sharing else None
        call = FrameCall(parts, None if is_stream else segments)
        try:
            if isinstance(call.segment, RemoteSegment):
                client = cast(FrameReplicaClient, replica.client)
                async with client.placed(call.segment) as path:
                    call.tell_path(path)
                    await self._read(replica, call, pending, rows)
            else:
                await self._read(replica, call, pending, rows)
        except BaseException:
            if call.segment is not None:
                call.segment.spoil()
            raise
        if call.unshared:
            self._stop_sharing(replica, call.unshared)
            return await self._answer_in_frames(replica, parts, rows)
        return call.held_rows

    async def _read(self, replica: ReplicaCalls, call: FrameCall, pending: Pending, rows: int) -> None:
        """Pass a call's frames to its requests, until the call ends, no request wants more, or the replica can't open
        the segment (`FrameCall.unshared`)."""
        client = cast(FrameReplicaClient, replica.client)
        is_stream = pending.signature.streams
        if is_stream:
            pending.stream = (client, call.name)
        async with contextlib.aclosing(client.frames(call.name, call.request)) as frames:
            async for raw in frames:
                call.take(raw, self._meter)
                size_bytes = len(raw)
                del raw  # frees its memory: the next frame may take long
                if call.unshared:
                    return
                if is_stream:
                    call.release()
                if call.lost is not None:
                    raise call.lost
                if not is_stream:
                    if call.is_complete:  # only Triton's end of the call follows, a millisecond later
                        break
                    continue
                await _wait_for_reader(pending, size_bytes)
                if pending.collector.is_done and not pending.collector.succeeded:
                    # The request failed or was cancelled, but a slow reader may not have cancelled the stream yet.
                    if pending.stream is not None:
                        client.cancel(call.name)
                    break
        pending.stream = None
        self._meter.note_call(rows, pending.signature.max_batch_size, call.compute_ns)
        call.end()

    def _stop_sharing(self, replica: ReplicaCalls, why: str) -> None:
        logger.warning(
            "model %s: replica %s can't open the gateway's memory, so large tensors take the slower way: %s",
            self._name, replica.route.id, why,
        )  # fmt: skip
        replica.is_sharing = False


async def _wait_for_reader(pending: Pending, size_bytes: int) -> None:
    """Wait for a stream's slow reader. The last frame had ``size_bytes``; the next frame is expected to be as large.

    The replica pauses when too many frames are not yet taken from the connection.
    """
    limit = max(1, min(PIECES_LIMIT, PIECES_LIMIT_BYTES // size_bytes))
    if pending.collector.is_full(limit):
        pending.deadlines.hold()
        await pending.collector.wait_for_capacity(limit)
        pending.deadlines.note_piece()
