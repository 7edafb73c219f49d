"""Runs the steps of a fused pipeline in one replica, and sends the heads' answers as they become ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headwater.errors import DeclarationError
from headwater.model import Model
from headwater.pipeline import Plan, PlannedStep
from headwater.runtime.batch_run import BatchRun, Pace
from headwater.runtime.capacity import Capacity
from headwater.runtime.channel import StreamChannels
from headwater.runtime.elements import ElementStep
from headwater.runtime.feature_cache import FeatureCache
from headwater.runtime.request import Part, TritonRequest, read_request, refusal
from headwater.runtime.step import Handover, Step
from headwater.runtime.stream_control import StreamControl
from headwater.runtime.watchdog import WatchCall
from headwater.wire.arrays import Array
from headwater.wire.frame import FRAME, Frame, Piece, encode_frame
from headwater.wire.report import RowReport, Status

__all__ = ["FusedPipeline"]

logger = logging.getLogger(__name__)

WAIT_FOR_NEXT_S = 0.002
"""The most seconds that an answer waits for the next answer, unless `headwater.wire.report.CallNote.patience_s` is
longer: each frame costs CPU time in Triton and in its Python backend."""


class FusedPipeline:
    """Runs batches through the steps of a pipeline.

    Args:
        plan: the pipeline.
        models: the steps' models, loaded, by name.
        device: the device of torch tensors.
        on_broken: see `Step`.
        watch: the context in which each call of a model runs.
        capacity: how many rows fit in the device's memory.
        sizes: see `Step`, by step.
        wait_for_next_s: see `WAIT_FOR_NEXT_S`.
    """

    def __init__(
        self,
        plan: Plan,
        models: Mapping[str, Model],
        device: str,
        on_broken: Callable[[str], None] = lambda _: None,
        watch: WatchCall = contextlib.nullcontext,
        capacity: Capacity | None = None,
        sizes: Mapping[str, Sequence[int]] | None = None,
        *,
        wait_for_next_s: float = WAIT_FOR_NEXT_S,
    ) -> None:
        self._plan = plan
        self._heads = [head.name for head in plan.signature.heads]
        self._ancestors = {head: frozenset(plan.needed([head])) for head in self._heads}
        # A single thread: models expect one call at a time, and torch's modes are per thread.
        executor = ThreadPoolExecutor(1, thread_name_prefix="steps")
        capacity = capacity or Capacity()
        # A plain model that streams is called a model in messages: clients don't know that it is a step.
        kind = "model" if [step.name for step in plan.steps] == [plan.signature.name] else "step"
        self.steps = {
            planned.name: (ElementStep if planned.elements_of else Step)(
                planned, models[planned.name], device,
                handovers=_handovers(plan, planned), is_head=planned.name in self._heads, executor=executor,
                on_broken=on_broken, watch=watch, where=f"{kind} `{planned.name}`: ", capacity=capacity,
                sizes=(sizes or {}).get(planned.name, ()),
            )
            for planned in plan.steps
        }  # fmt: skip
        self._caches = {planned.name: FeatureCache(planned) for planned in plan.steps if planned.spec.cache is not None}
        self._turn = asyncio.Lock()
        self._pace = Pace(wait_for_next_s)
        self._channels = StreamChannels()
        self._held_rows = 0
        """Rows that the replica holds, computing or waiting for their turn."""

    async def handle(self, requests: Sequence[TritonRequest]) -> AsyncGenerator[list[dict[str, Array]], None]:
        """Answer a Triton request with frames, with a channel's parcels, or with nothing, depending on its note."""
        (request,) = requests  # the model is bound without Triton's batcher
        try:
            part = read_request(self._plan.signature, request)
        except Exception as error:  # see `_frames`
            rows = max((len(array) for array in request.data.values()), default=0)
            report = refusal(error) if isinstance(error, OSError) else _report_of(error)
            yield [{FRAME: self._refusal(rows, report)}]
            return
        answers = self._channels.answers(part.note, partial(self._frames, part))
        if answers is not None:
            async with contextlib.aclosing(answers):
                async for answer in answers:
                    yield [{FRAME: answer}]

    async def _frames(self, part: Part, control: StreamControl) -> AsyncGenerator[Array, None]:
        """The frames of a request.

        The generator raises no exception, because the answer would be a traceback. An unexpected error fails all rows
        of the heads that have not answered yet.
        """
        run: BatchRun | None = None
        rows = part.rows
        self._held_rows += rows
        try:
            run = BatchRun(self._plan, self._ancestors, self.steps, part, lambda: self._held_rows, self._caches)
            del part  # a stream may be long
            if self._plan.signature.streams:
                frames = run.stream(self._turn, control)
            else:
                frames = run.batch(self._turn, self._pace)
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    yield frame
                    del frame  # free the memory: the next frame may take long
        except Exception as error:
            report = _report_of(error)
            yield self._refusal(rows, report) if run is None else run.failed(report)
        finally:
            self._held_rows -= rows

    def _refusal(self, rows: int, report: RowReport) -> Array:
        """A frame that fails all rows of all heads with the same report."""
        failures = [(row, int(report.status), report.message) for row in range(rows)]
        pieces = [Piece(head, rows, 0, failures) for head in self._heads]
        return encode_frame(Frame(pieces, []), [])


def _report_of(error: Exception) -> RowReport:
    """The report of rows that failed outside the steps."""
    if isinstance(error, DeclarationError):
        return refusal(error)
    logger.error("a batch failed between the steps", exc_info=error)
    return RowReport(Status.RAISED, f"internal error: {type(error).__name__}")


def _handovers(plan: Plan, producer: PlannedStep) -> list[Handover]:
    ragged = {spec.name: spec for spec in producer.signature.outputs if spec.ragged}
    return [
        Handover(wire.output, consumer.name, wire.input, consumer.expected[wire.input], ragged.get(wire.output))
        for consumer in plan.steps
        for wire in consumer.wires
        if wire.step == producer.name
    ]
