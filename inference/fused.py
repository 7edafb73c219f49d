"""A fused pipeline: its steps run in one replica, and each head's answer for the batch leaves when it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from inference.arrays import Array
from inference.batch_run import BatchRun, Cancellation
from inference.errors import DeclarationError
from inference.frame import FRAME, Frame, Piece, encode_frame
from inference.model import Model
from inference.pace import Pace
from inference.pipeline import Plan, PlannedStep
from inference.pulse import WatchCall
from inference.report import RowReport, Status
from inference.request import TritonRequest, read_request
from inference.steps import Handover, Step

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
            )
            for planned in plan.steps
        }  # fmt: skip
        self._turn = asyncio.Lock()
        self._pace = Pace(wait_for_next_s)
        self._streams: dict[str, Cancellation] = {}
        """By name, of those that run."""

    async def handle(self, requests: Sequence[TritonRequest]) -> AsyncIterator[list[dict[str, Array]]]:
        """Answer one Triton request in frames.

        No exception leaves it: PyTriton would answer with a traceback, and log it. Whatever is not foreseen becomes the
        failure of all rows of those heads that have not answered yet.
        """
        (request,) = requests  # the model is bound without Triton's batcher
        run: BatchRun | None = None
        name = ""
        try:
            try:
                part = read_request(self._plan.signature, request)
            except OSError as error:  # see `inference.shared_memory`
                report = RowReport(Status.UNSHARED, f"{type(error).__name__}: {error}")
                yield [{FRAME: self._refusal(request, report)}]
                return
            if part.note.cancel:
                if part.note.cancel in self._streams:
                    self._streams[part.note.cancel].is_set = True
                return
            run = BatchRun(self._plan, self._ancestors, self.steps, part)
            if self._plan.signature.streams:
                name = part.note.stream
                frames = run.stream(self._turn, self._streams.setdefault(name, Cancellation()))
            else:
                frames = run.batch(self._turn, self._pace)
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    yield [{FRAME: frame}]
        except DeclarationError as error:  # only a client that talks to Triton directly gets here
            yield [{FRAME: self._refusal(request, RowReport(Status.BAD_INPUT, str(error)))}]
        except Exception as error:
            logger.exception("a batch failed between the steps")
            report = RowReport(Status.RAISED, f"internal error: {type(error).__name__}")
            yield [{FRAME: self._refusal(request, report) if run is None else run.failed(report)}]
        finally:
            self._streams.pop(name, None)

    def _refusal(self, request: TritonRequest, report: RowReport) -> Array:
        """A frame that says the same of all rows of all heads."""
        rows = max((len(array) for array in request.data.values()), default=0)
        failures = [(row, int(report.status), report.message) for row in range(rows)]
        pieces = [Piece(head, rows, 0, failures) for head in self._heads]
        return encode_frame(Frame(pieces, []), [])


def _handovers(plan: Plan, producer: PlannedStep) -> list[Handover]:
    return [
        Handover(wire.output, consumer.name, wire.input, consumer.expected[wire.input])
        for consumer in plan.steps
        for wire in consumer.wires
        if wire.step == producer.name
    ]
