"""A fused pipeline: its steps run in one replica, and each head's answer for the batch leaves when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from inference.errors import DeclarationError
from inference.model import Model
from inference.pipeline import Plan, PlannedStep
from inference.runtime.batch_run import BatchRun, Pace
from inference.runtime.channel import ChannelStream, StreamChannels
from inference.runtime.pulse import WatchCall
from inference.runtime.request import Part, TritonRequest, read_request
from inference.runtime.step import Handover, Step
from inference.runtime.stream_control import StreamControl
from inference.wire.arrays import Array
from inference.wire.frame import FRAME, Frame, Piece, encode_frame
from inference.wire.report import RowReport, Status

__all__ = ["FusedPipeline"]

logger = logging.getLogger(__name__)

WAIT_FOR_NEXT_S = 0.002
"""A frame costs about a millisecond of CPU on its way: an answer that is ready waits so long for the next one."""


class FusedPipeline:
    """Runs batches through the steps of a pipeline.

    Args:
        plan: the pipeline.
        models: of its steps, loaded, by name.
        device: where torch tensors are put.
        on_broken: called if the device can't be used any more; the replica then ends.
        watch: what each call of a model runs in.
        wait_for_next_s: how long an answer that is ready waits for the next one, to share its frame.
    """

    def __init__(
        self,
        plan: Plan,
        models: Mapping[str, Model],
        device: str,
        on_broken: Callable[[str], None] = lambda _: None,
        watch: WatchCall = contextlib.nullcontext,
        *,
        wait_for_next_s: float = WAIT_FOR_NEXT_S,
    ) -> None:
        self._plan = plan
        self._heads = [head.name for head in plan.signature.heads]
        self._ancestors = {head: frozenset(plan.needed([head])) for head in self._heads}
        # One thread: the models were written for one call at a time, and torch keeps its modes by thread.
        executor = ThreadPoolExecutor(1, thread_name_prefix="steps")
        self.steps = {
            planned.name: Step(
                planned, models[planned.name], device,
                handovers=_handovers(plan, planned), is_head=planned.name in self._heads, executor=executor,
                on_broken=on_broken, watch=watch,
                is_alone=[step.name for step in plan.steps] == [plan.signature.name],
            )
            for planned in plan.steps
        }  # fmt: skip
        self._turn = asyncio.Lock()
        self._pace = Pace(wait_for_next_s)
        self._streams: dict[str, StreamControl] = {}
        """By name, of those that run."""
        self._channels = StreamChannels()

    async def handle(self, requests: Sequence[TritonRequest]) -> AsyncGenerator[list[dict[str, Array]], None]:
        """Answer one Triton request: in frames, with a channel's parcels, or with nothing; its note says which."""
        (request,) = requests  # the model is bound without Triton's batcher
        try:
            part = read_request(self._plan.signature, request)
        except Exception as error:  # none leaves it, see `_frames`
            if isinstance(error, OSError):  # see `inference.wire.shared_memory`
                report = RowReport(Status.UNSHARED, f"{type(error).__name__}: {error}")
            else:
                report = _report_of(error)
            rows = max((len(array) for array in request.data.values()), default=0)
            yield [{FRAME: self._refusal(rows, report)}]
            return
        answers = self._answers(part)
        if answers is not None:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield [{FRAME: answer}]

    def _answers(self, part: Part) -> AsyncGenerator[Array, None] | None:
        """What a request is answered with; None: nothing."""
        note = part.note
        if note.cancel:
            if note.cancel in self._streams:
                self._streams[note.cancel].cancel()
            return None
        if note.channel is None:
            return self._frames(part, StreamControl())
        if note.channel.opens:
            return self._channels.open(note.channel)
        if not note.stream:
            self._channels.acknowledge(note.channel)
            return None
        # The request ends now, and with it the memory that its tensors are in.
        part = part._replace(inputs={name: array.copy() for name, array in part.inputs.items()})
        stream = ChannelStream(note.stream)
        self._channels.start(note.channel, stream, self._frames(part, stream))
        return None

    async def _frames(self, part: Part, control: StreamControl) -> AsyncGenerator[Array, None]:
        """A request's frames.

        No exception leaves it: PyTriton would answer with a traceback, and log it. Whatever is not foreseen becomes the
        failure of all rows of those heads that have not answered yet.
        """
        name = part.note.stream
        run: BatchRun | None = None
        try:
            run = BatchRun(self._plan, self._ancestors, self.steps, part)
            if self._plan.signature.streams:
                self._streams[name] = control
                frames = run.stream(self._turn, control)
            else:
                frames = run.batch(self._turn, self._pace)
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    yield frame
        except Exception as error:
            report = _report_of(error)
            yield self._refusal(part.rows, report) if run is None else run.failed(report)
        finally:
            self._streams.pop(name, None)

    def _refusal(self, rows: int, report: RowReport) -> Array:
        """A frame that says the same of all rows of all heads."""
        failures = [(row, int(report.status), report.message) for row in range(rows)]
        pieces = [Piece(head, rows, 0, failures) for head in self._heads]
        return encode_frame(Frame(pieces, []), [])


def _report_of(error: Exception) -> RowReport:
    """Why rows fail that no step has failed on."""
    if isinstance(error, DeclarationError):  # only a client that talks to Triton directly gets here
        return RowReport(Status.BAD_INPUT, str(error))
    logger.error("a batch failed between the steps", exc_info=error)
    return RowReport(Status.RAISED, f"internal error: {type(error).__name__}")


def _handovers(plan: Plan, producer: PlannedStep) -> list[Handover]:
    return [
        Handover(wire.output, consumer.name, wire.input, consumer.expected[wire.input])
        for consumer in plan.steps
        for wire in consumer.wires
        if wire.step == producer.name
    ]
