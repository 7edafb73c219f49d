"""A pipeline with separate deployments for its steps: a request calls each step that it needs once, and tensors pass
between steps undecoded."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import struct
from collections.abc import Callable, Hashable, Mapping

from headwater.datatypes import DATATYPES
from headwater.pipeline import INPUT, PlannedStep, Wire, tensor_text
from headwater.signature import COUNT, Signature
from headwater_server.codecs.tensors import (
    InferRequest,
    Outputs,
    OutputWish,
    RawTensor,
    element_count,
    elements_of,
    ragged_of,
    repeated,
)
from headwater_server.control.route_kinds import GraphKind
from headwater_server.control.routing import DeploymentRoute, unavailable
from headwater_server.dispatch.collector import Collector, wanted_heads
from headwater_server.dispatch.deadlines import Deadlines
from headwater_server.dispatch.deployment_protocol import Dispatcher, TensorDispatcher
from headwater_server.errors import (
    RETRY_AFTER_LOST_S,
    BadRequest,
    CallableFailed,
    HeadwaterError,
    QueueFull,
    Unavailable,
)
from headwater_server.telemetry.recorder import recorder

__all__ = ["GraphDispatcher"]

logger = logging.getLogger("headwater.graph")


class GraphDispatcher(TensorDispatcher["_GraphRun"]):
    """Takes requests for one pipeline, and answers them through its steps' deployments.

    A step runs as soon as its inputs are available, concurrently with steps that don't depend on it. A step that is
    slow, fails or is lost affects only the steps that depend on it, unless the failure ends the request.

    Args:
        route: the pipeline.
        find: finds a deployment's dispatcher by its name.
    """

    def __init__(self, route: DeploymentRoute, find: Callable[[str], Dispatcher | None]) -> None:
        super().__init__(route)
        self._find = find
        self._meter = recorder().deployment(route.name)
        self._rows = 0
        """Rows of the requests in ``_requests``."""

    @property
    def version(self) -> Hashable:
        """See `TensorDispatcher.version`: the pipeline's signature, and the generation and signature of each step."""
        plan = _kind(self.route).plan
        steps = plan.steps if plan is not None else ()
        dispatchers = (self._find(step.spec.deployment or f"{self.route.name}.{step.name}") for step in steps)
        return self.route.signature, *(
            dispatcher and (dispatcher.route.generation, dispatcher.route.signature) for dispatcher in dispatchers
        )

    def check_ready(self, *, is_step: bool = False) -> Signature:
        """See `Dispatcher.check_ready`: requests are accepted while the steps that can be reached suffice to answer at
        least a single head."""
        if self.is_draining and not is_step:
            raise Unavailable("the server is stopping", retry_after_s=RETRY_AFTER_LOST_S)
        route = self.route
        kind = _kind(route)
        if route.signature is None or kind.plan is None or not kind.is_open:
            raise unavailable(route)
        return route.signature

    def _start(self, request: InferRequest, signature: Signature, *, is_stream: bool) -> _GraphRun:
        limit = self.route.max_queue_size
        if self._rows and self._rows + request.rows > limit:
            # Refused here, so that the trunk doesn't compute rows that its heads would refuse.
            taken = f"{self._rows} of {limit} rows are under way"
            raise QueueFull(f"model `{self.route.name}`: the queue is full: {taken}", retry_after_s=1)
        collector = Collector(wanted_heads(request, signature), is_stream=is_stream, meter=self._meter)
        run = _GraphRun(self.route, request, collector, self._find)
        self._requests.add(run)
        self._rows += request.rows
        return run

    def _end(self, run: _GraphRun) -> None:
        self._requests.discard(run)
        self._rows -= run.request.rows
        if run.collector.succeeded:
            self._meter.rows.add(run.request.rows)
        elif run.collector.failed:
            self._meter.failures.add()
        run.end()


class _GraphRun:
    """A request in flight through the steps."""

    def __init__(
        self,
        route: DeploymentRoute,
        request: InferRequest,
        collector: Collector,
        find: Callable[[str], Dispatcher | None],
    ) -> None:
        plan = _kind(route).plan
        assert plan is not None
        self.request = request
        self.collector = collector
        self._name = route.name
        self._plan = plan
        self._find = find
        self._deadlines = Deadlines(collector, route.timeout_s, request.timeout_us, on_head=self._give_up)
        needed = self._plan.needed(collector.heads)
        self._steps = [step for step in self._plan.steps if step.name in needed]
        self._ragged = {f"{step.name}.{spec.name}" for step in self._steps for spec in step.outputs if spec.ragged}
        """Sources with elements."""
        self._tasks: dict[str, asyncio.Task[Outputs]] = {}
        for step in self._steps:
            task = self._tasks[step.name] = asyncio.create_task(self._step(step))
            task.add_done_callback(functools.partial(self._on_done, step.name))

    def end(self) -> None:
        """Cancel the steps, and drop the tensors: the tasks refer to this object, a cycle for the garbage collector."""
        self._deadlines.close()
        for task in self._tasks.values():
            task.cancel()
        self.collector.close()
        self._tasks = {}

    def _give_up(self, head: str) -> None:
        """Cancel the steps that no undecided head needs; called when a head reaches its deadline."""
        wanted = self._plan.needed(self.collector.undecided)
        for step in self._steps:
            if step.name not in wanted:
                self._tasks[step.name].cancel()

    def _on_done(self, step: str, task: asyncio.Task[Outputs]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            names = {output.name for output in self.request.outputs}
            self.collector.decide(step, {name: tensor for name, tensor in task.result().items() if name in names})
            return
        if not isinstance(error, HeadwaterError):
            logger.error("model %s, step %s: failed in the gateway", self._name, step, exc_info=error)
            error = CallableFailed(f"step `{step}`: internal error: {type(error).__name__}")
        self.collector.decide(step, error=error.again())

    async def _step(self, step: PlannedStep) -> Outputs:
        """Call a step as soon as its inputs are available, and return its outputs. A step whose rows are elements is
        called once with those of all rows, or not at all if there are none; its outputs are returned as ragged.

        Raises:
            HeadwaterError: the step failed, or a step that it depends on.
        """
        tasks = self._tasks  # `end` may replace it
        for parent in step.parents:
            # `asyncio.wait` doesn't cancel the parent's task when this step is cancelled: other steps may need it.
            await asyncio.wait({tasks[parent]})
        sources = {wire: self.request.inputs if wire.step == INPUT else self._made(step, wire) for wire in step.wires}
        counts, rows = None, self.request.rows
        if step.elements_of:
            taken = {wire: outputs for wire, outputs in sources.items() if wire.source in self._ragged}
            counts = _counts(step, taken, rows)
            rows = sum(counts)
            if not rows:
                return _without_elements(step, len(counts))
        inputs: dict[str, RawTensor] = {}
        for wire, outputs in sources.items():
            tensor = outputs.get(wire.output)
            if tensor is None:
                if wire.step != INPUT:
                    raise _mismatch(step, wire, rows, "nothing")
                continue
            if counts is not None:
                tensor = (elements_of if wire.source in self._ragged else repeated)(tensor, counts)
            inputs[wire.input] = tensor if wire.step == INPUT else _checked(tensor, step, wire, rows)
        dispatcher = self._find(step.spec.deployment or f"{self._name}.{step.name}")
        if dispatcher is None:
            raise Unavailable(f"step `{step.name}`: its deployment is gone", retry_after_s=2)
        try:
            request = self._request(step, inputs, rows, is_kept=dispatcher.route.cache is not None)
            made = (await dispatcher.infer(request, is_step=True)).outputs
        except HeadwaterError as error:
            if isinstance(error, BadRequest) and not step.elements_of:
                raise
            of = f", whose rows are the elements of `{step.elements_of}`" if step.elements_of else ""
            raise error.again(f"step `{step.name}`{of}: {error.message}") from error
        return made if counts is None else _ragged(made, counts)

    def _made(self, step: PlannedStep, wire: Wire) -> Outputs:
        """The outputs of the step that ``wire`` comes from.

        Raises:
            HeadwaterError: that step failed. If its output for this wire doesn't match its declaration, the error names
                the input of ``step``.
        """
        try:
            return self._tasks[wire.step].result()
        except HeadwaterError as error:
            # Raise a copy: an exception that is raised in several tasks collects the tracebacks of them all.
            mismatch = error.mismatch if isinstance(error, CallableFailed) else None
            if mismatch is None or mismatch.output != wire.output or not mismatch.shape or step.elements_of:
                raise error.again() from None
            rows = mismatch.shape[0] * self.request.rows // mismatch.rows  # the call may have had a part of the rows
            got = tensor_text(mismatch.datatype, (rows, *mismatch.shape[1:]))
            raise _mismatch(step, wire, self.request.rows, got) from error

    def _request(self, step: PlannedStep, inputs: dict[str, RawTensor], rows: int, *, is_kept: bool) -> InferRequest:
        """The request to a step, with the counts of ragged outputs. If the step's answers are cached, all its outputs
        are requested, so that the answer suits requests for any heads."""
        signature = step.signature
        wanted = {output.name for output in self.request.outputs} if step.name in self.collector.heads else set()
        wanted |= {wire.output for consumer in self._steps for wire in consumer.wires if wire.step == step.name}
        for spec in step.outputs:
            if spec.counts and {spec.name, spec.counts} & wanted:
                wanted |= {spec.name, spec.counts}
        parameters = {parameter.name for parameter in signature.parameters}
        batch, row = (
            {name: value for name, value in values.items() if name in parameters}
            for values in (self.request.batch_parameters, self.request.row_parameters)
        )
        return InferRequest(
            id=self.request.id,
            inputs=inputs,
            rows=rows,
            outputs=[OutputWish(spec.name, True) for spec in signature.outputs if is_kept or spec.name in wanted],
            batch_parameters=batch,
            row_parameters=row,
            priority=self.request.priority,
            owner=self.request.owner,
            # No `timeout_us`: the step is cancelled at the pipeline's deadline, and must not fail just before.
        )


def _counts(step: PlannedStep, taken: Mapping[Wire, Outputs], rows: int) -> list[int]:
    """The number of elements of each row, given the outputs of the steps that the elements come from.

    Raises:
        CallableFailed: a ragged output is missing or malformed, or two have different numbers of elements.
    """
    sizes: dict[str, list[int]] = {}
    for wire, outputs in taken.items():
        tensor, counts = outputs.get(wire.output), outputs.get(COUNT.format(wire.output))
        shape = () if tensor is None else tensor.shape
        found = sizes[wire.source] = [] if counts is None else list(memoryview(bytes(counts.data)).cast("i"))
        if len(shape) < 2 or shape[0] != rows or len(found) != rows or max(found, default=0) > shape[1]:
            got = "nothing" if tensor is None else f"{tensor_text(tensor.datatype, shape)} with the counts {found}"
            raise CallableFailed(
                f"step `{step.name}`, input `{wire.input}`: expected a ragged output of {rows} rows and the counts of "
                f"their elements, got {got} from `{wire.step}`"
            )
    first, *others = sizes
    for other in others:
        if sizes[other] != sizes[first]:
            raise CallableFailed(
                f"step `{step.name}`: expected as many elements in each ragged input, got {sizes[first]} from "
                f"`{first}` and {sizes[other]} from `{other}`"
            )
    return sizes[first]


def _ragged(outputs: Outputs, counts: list[int]) -> Outputs:
    """A step's outputs as ragged outputs of the rows that have the elements."""
    raw = RawTensor("INT32", (len(counts), 1), struct.pack(f"<{len(counts)}i", *counts))
    ragged = {name: ragged_of(tensor, counts) for name, tensor in outputs.items()}
    return ragged | dict.fromkeys(map(COUNT.format, outputs), raw)


def _without_elements(step: PlannedStep, rows: int) -> Outputs:
    """A step's outputs, for rows without elements."""
    counts = {spec.name: RawTensor("INT32", (rows, 1), bytes(4 * rows)) for spec in step.outputs if spec.counts}
    shapes = {spec: (rows, 0, *(max(dim, 0) for dim in spec.shape[1:])) for spec in step.outputs if spec.ragged}
    return counts | {spec.name: RawTensor(spec.datatype, shape, b"") for spec, shape in shapes.items()}


def _checked(tensor: RawTensor, step: PlannedStep, wire: Wire, rows: int) -> RawTensor:
    """Check that a tensor has the datatype, shape and size that an input expects.

    Raises:
        CallableFailed: the tensor has another datatype, shape or size.
    """
    spec = step.expected[wire.input]
    fits = len(tensor.shape) == len(spec.shape) + 1 and all(
        dim in (-1, got) for dim, got in zip((rows, *spec.shape), tensor.shape, strict=True)
    )
    if tensor.datatype != spec.datatype or not fits:
        raise _mismatch(step, wire, rows, tensor_text(tensor.datatype, tensor.shape))
    count = math.prod(tensor.shape)
    size_bytes = DATATYPES[spec.datatype].size_bytes
    if (len(tensor.data) != count * size_bytes) if size_bytes else (element_count(tensor.data) != count):
        got = f"{tensor_text(tensor.datatype, tensor.shape)} of {len(tensor.data)} bytes"
        raise _mismatch(step, wire, rows, got)
    return tensor


def _mismatch(step: PlannedStep, wire: Wire, rows: int, got: str) -> CallableFailed:
    spec = step.expected[wire.input]
    expected = tensor_text(spec.datatype, (rows, *spec.shape))
    where = f"step `{step.name}`, input `{wire.input}`"
    return CallableFailed(f"{where}: expected {expected}, got {got} from `{wire.step}`")


def _kind(route: DeploymentRoute) -> GraphKind:
    assert isinstance(route.kind, GraphKind)
    return route.kind
