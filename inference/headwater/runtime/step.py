"""Calls one model (a plain model, or a step of a fused pipeline) and makes a report for every row that fails."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import math
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from headwater.errors import BadOutput
from headwater.model import Model, Parameter
from headwater.pipeline import INPUT, PlannedStep
from headwater.runtime.capacity import Capacity
from headwater.runtime.compiled import begin_graphs
from headwater.runtime.device import free_memory
from headwater.runtime.failure_log import CallFailed, Failures
from headwater.runtime.request_log import headers_by_row, note_call, requests_of
from headwater.runtime.stream_control import StreamControl
from headwater.runtime.values import (
    checked,
    checked_elements,
    converted,
    copied,
    first_rows,
    joined,
    one_row,
    overlaps,
    refuses_writes,
    rows_of,
    settled,
    version_of,
)
from headwater.runtime.watchdog import WatchCall
from headwater.signature import CONTEXT, COUNT, TensorSpec
from headwater.wire.arrays import Array, argument, fetched, ragged, widened, wire
from headwater.wire.report import RowReport, Status

__all__ = ["LATE", "Given", "Handover", "Made", "Step"]

T = TypeVar("T")

_UNWATCHED: Final = contextlib.nullcontext()

LATE: Final = "deadline exceeded"
"""The message of rows with an exceeded deadline; no client reads it, because the gateway has already answered."""


class Handover(NamedTuple):
    """An output that another step takes."""

    output: str
    consumer: str
    input: str
    expected: TensorSpec
    """The tensor that the consumer expects."""
    ragged: TensorSpec | None = None
    """The output's declaration if it is ragged; ``expected`` is then each element."""


class Given(NamedTuple):
    """The arguments of a step."""

    inputs: Mapping[str, Any]
    """Values by input name: the pipeline's inputs as arrays in wire form, other values as the producing step returned
    them. Optional inputs without a value are absent."""
    rows: int
    parameters: Mapping[str, Any] = {}
    """The pipeline's per-batch parameters."""
    row_parameters: Mapping[str, Sequence[Any]] = {}
    """The pipeline's per-row parameters, one value per row."""
    is_warmup: bool = False
    shared: frozenset[str] = frozenset()
    """Names of the inputs that are no copies of the producing step's outputs: other steps may read the same memory."""
    owners: Sequence[str] = ()
    """The name of each row's API key. Without API keys the names are empty, or there are no names."""
    until_s: float = math.inf
    """Deadline on the clock of `time.monotonic`: a coroutine is cancelled then; a plain function runs on, but it isn't
    called for further rows."""
    places: Mapping[str, Sequence[int]] = {}
    """For each input in which rows share values: the index of every row's value."""


@dataclass(slots=True)
class Made:
    """A step's result."""

    good: list[int] = field(default_factory=list)
    """Indices of the rows that succeeded; values and arrays hold only these rows, in this order."""
    values: dict[str, Any] = field(default_factory=dict)
    """Outputs that other steps take, by name."""
    arrays: dict[str, Array] = field(default_factory=dict)
    """A head's outputs in wire form, by name; empty for other steps, and if no row succeeded."""
    failures: dict[int, RowReport] = field(default_factory=dict)
    """The report of each failed row, by the row's index."""
    headers: dict[int, dict[str, str]] = field(default_factory=dict)
    """Headers of the answer that the model has set, by the row's index."""
    calls: int = 0
    """Number of calls of the model, without retries and warm-up; 0 in a stream's results."""
    retries: int = 0
    """Number of calls to isolate failing rows, to compute rows of different shapes together, or to recompute outputs
    that another step overwrote; 0 in a warm-up."""
    spoiled: tuple[str, ...] = ()
    """Shared inputs that the model wrote into, or tried to, without declaring `mutates_features`."""
    short: int = 0
    """Number of rows of the smallest call for which the device's memory did not suffice; 0: it sufficed for all calls.
    Always 0 in a stream's results."""


class _Watched(NamedTuple):
    """An argument that the model must not write into."""

    input: str
    value: Any
    version: int | None
    is_shared: bool


class _WriteGuard:
    """Notices when a step's model writes into outputs of other steps.

    Args:
        step: the step's name.
        kind: the name of the model's class.
    """

    def __init__(self, step: str, kind: str) -> None:
        self._step = step
        self._kind = kind
        self.has_caught = False
        """Whether the model was caught. From then on it gets copies; a call that writes into a copy still fails."""

    @contextlib.contextmanager
    def watching(self, watched: Sequence[_Watched], step_result: Made) -> Iterator[None]:
        """A context in which the model computes, and in which it must not write into these arguments. If it does, the
        names of the shared arguments are added to `step_result.spoiled`.

        Raises:
            CallFailed: the model wrote into an argument, or tried to; this replaces any other exception.
        """
        try:
            yield
        except ValueError as error:
            refused = [arg for arg in watched if refuses_writes(arg.value)]
            if refused and "read-only" in str(error):  # numpy's wording
                raise self._wrote(refused, " or ", step_result) from error
            raise
        finally:
            written = [arg for arg in watched if version_of(arg.value) != arg.version]
            if written:
                self.has_caught = True
                raise self._wrote(written, " and ", step_result)

    def _wrote(self, written: Sequence[_Watched], conjunction: str, step_result: Made) -> CallFailed:
        step_result.spoiled += tuple(arg.input for arg in written if arg.is_shared)
        names = conjunction.join(f"`{arg.input}`" for arg in written)
        return CallFailed(
            f"step `{self._step}` writes into its input {names}, which other steps may read too: set "
            f"`mutates_features = True` in {self._kind}, so that it gets a copy"
        )


class _CallResult(NamedTuple):
    """The result of one call."""

    rows: list[int]
    values: dict[str, Any]
    arrays: dict[str, Array]


class Step:
    """Calls the model of a step.

    Args:
        planned: the step's place in the pipeline.
        model: the step's model, loaded.
        device: the device of torch tensors.
        handovers: the step's outputs that other steps take.
        is_head: whether the step's outputs are the pipeline's.
        executor: runs the calls of a model that isn't async, one after another, outside the event loop; None: these
            calls run in the event loop too.
        on_broken: called with the reason when the device is unusable or the model raised a `ReplicaError`; the replica
            then ends.
        watch: the context in which each call of the model runs; for a streaming model, each of its yields.
        where: prefix of the messages about failures, such as ``step `name`: ``.
        capacity: how many rows fit in the device's memory, for all of a replica's steps.
        sizes: the numbers of rows that the model may be called with, in ascending order; calls are padded with copies
            of their last row. Empty: any number.
    """

    def __init__(
        self,
        planned: PlannedStep,
        model: Model,
        device: str,
        *,
        handovers: Sequence[Handover],
        is_head: bool,
        executor: Executor | None,
        on_broken: Callable[[str], None],
        watch: WatchCall,
        where: str,
        capacity: Capacity | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self.name = planned.name
        self.planned = planned
        self.model = model
        self._is_head = is_head
        self._device = device
        self._handovers = handovers
        self._executor = executor
        self._failures = Failures(device, on_broken, where)
        self._watch = watch
        self._capacity = capacity or Capacity()
        self._sizes = sizes
        self._is_async = inspect.iscoroutinefunction(type(model).__call__)
        self.overlaps = self._is_async and not sizes
        """Whether several calls may run at once: ``__call__`` is a coroutine function, and `sizes` is empty."""
        self._outputs = {spec.name: spec for spec in planned.signature.outputs if not spec.counts}
        """What the model returns."""
        self._ragged = [spec for spec in self._outputs.values() if spec.ragged]
        self._parameters = [parameter for parameter in planned.signature.parameters if parameter.name != CONTEXT]
        self._from_steps = frozenset(wire.input for wire in planned.wires if wire.step != INPUT)
        self._guard = _WriteGuard(planned.name, type(model).__name__)

    async def run(self, step_input: Given, *, is_retry: bool = False) -> Made:
        """Call the model, with at most `max_batch_size` rows at once. A failure is reported for each row, not raised.

        If the model is idempotent, the rows of a failed call are halved until only the rows that make it fail are left.
        Otherwise, and after a `CallFailed` or if the device is unusable, all rows of the call fail. A call of several
        rows for which the device's memory doesn't suffice is such a failed call; for a while later calls have fewer
        rows. If the results of several calls differ in shape, all rows that succeeded are computed once more in one
        call; they fail instead if they are more than `max_batch_size`.

        Args:
            step_input: the arguments.
            is_retry: whether the call is counted in `Made.retries`, and its results are copied.
        """
        step_result = Made()
        rows = list(range(step_input.rows))
        may_split = self.planned.signature.idempotent
        max_rows = max(min(step_input.rows, self.planned.signature.max_batch_size), 1)
        if self._capacity.is_limited:
            max_rows = min(self._capacity.most(self.name, _row_bytes(step_input)) or max_rows, max_rows)
        pieces: list[_CallResult] = []
        for start in range(0, max(step_input.rows, 1), max_rows):
            if start and step_input.until_s <= time.monotonic():
                step_result.failures.update(dict.fromkeys(rows[start:], RowReport(Status.RAISED, LATE)))
                break
            part = rows[start : start + max_rows]
            pieces += await self._attempt(step_input, step_result, part, is_retry=is_retry, may_split=may_split)
        if step_result.short and step_input.rows > 1:
            fitted = max((len(piece.rows) for piece in pieces), default=step_result.short // 2)
            self._capacity.learn(self.name, min(max_rows, step_input.rows), max(fitted, 1), _row_bytes(step_input))
        for spec in self._ragged if len(pieces) > 1 and self._is_head else ():
            size = max(piece.arrays[spec.name].shape[1] for piece in pieces)
            for piece in pieces:
                piece.arrays[spec.name] = widened(spec, piece.arrays[spec.name], size)
        if not _join(step_result, pieces):
            good = [row for row in rows if row not in step_result.failures]
            if len(good) > self.planned.signature.max_batch_size or not may_split:
                reason = f"step `{self.name}` gave rows of different shapes, which can't be one batch's"
                step_result.failures.update(dict.fromkeys(good, RowReport(Status.BAD_OUTPUT, reason)))
            else:
                _join(step_result, await self._attempt(step_input, step_result, good, is_retry=True, may_split=False))
        return step_result

    async def _attempt(
        self, step_input: Given, step_result: Made, rows: list[int], *, is_retry: bool, may_split: bool
    ) -> list[_CallResult]:
        """The results of the rows that succeed; the reports of failed rows are added to `step_result`."""
        try:
            return [await self._call(step_input, step_result, rows, is_retry)]
        except BaseException as error:
            # Also SystemExit and similar: they would end the callable's thread, and the replica would hang.
            report = self._failures.report(error)
            may_split = may_split and not isinstance(error, CallFailed)
        if report.status is Status.OUT_OF_MEMORY:
            step_result.short = min(step_result.short or len(rows), len(rows))
            if self._executor is not None:
                await asyncio.sleep(0)  # until then asyncio holds the exception, which holds the memory
            free_memory()
        if may_split and report.status is not Status.BROKEN and len(rows) > 1:
            middle = len(rows) // 2
            pieces = await self._attempt(step_input, step_result, rows[:middle], is_retry=True, may_split=True)
            return pieces + await self._attempt(step_input, step_result, rows[middle:], is_retry=True, may_split=True)
        if report.status is Status.OUT_OF_MEMORY:
            report = _shortage(report, len(rows), self._device)
        step_result.failures.update(dict.fromkeys(rows, report))
        return []

    async def iterate(self, step_input: Given, control: StreamControl) -> AsyncGenerator[Made, None]:
        """Call a streaming model and yield its results as they come; if it fails, the failure is the last result.

        When the stream is cancelled, an async generator is cancelled where it awaits; a plain generator is not resumed.
        """
        rows = list(range(step_input.rows))
        results: AsyncGenerator[_CallResult, None] | None = None
        watched: list[_Watched] = []

        def to_piece(result: object) -> _CallResult:
            # Copied immediately: another request's call of the model may reuse the memory.
            return _owned(self._piece(result, rows, watched, len(rows)))

        try:
            while not control.is_cancelled:
                try:
                    if results is None:
                        arguments, watched = self._arguments(step_input, rows)
                        results = self._results(arguments, to_piece, control)
                    step_result = Made()
                    with self._guard.watching(watched, step_result) if watched else _UNWATCHED:
                        piece = await anext(results)
                    _join(step_result, [piece])
                    del piece  # free the memory: the next result may take long
                except StopAsyncIteration:
                    return
                except BaseException as error:
                    if control.is_cancelled:
                        if not isinstance(error, asyncio.CancelledError):
                            self._failures.note(error)
                        return
                    report = self._failures.report(error)
                    if report.status is Status.OUT_OF_MEMORY:
                        report = _shortage(report, len(rows), self._device)
                    step_result = Made(failures=dict.fromkeys(rows, report))
                yield step_result
                if step_result.failures:
                    return
                del step_result
        finally:
            if results is not None:
                await self._close(results)

    async def _results(
        self, arguments: Mapping[str, Any], to_piece: Callable[[object], _CallResult], control: StreamControl
    ) -> AsyncGenerator[_CallResult, None]:
        """The results of the model's generator, plain or async, checked and copied."""
        iterator = self.model(**arguments)
        end = object()
        if hasattr(iterator, "__anext__"):
            self._set_up_thread()
            try:
                while True:
                    with self._watch(), control:
                        result = await anext(iterator, end)
                    if result is end:
                        return
                    with self._watch():
                        owned = to_piece(result)
                    del result
                    yield owned
                    del owned
            finally:
                with self._watch():
                    await iterator.aclose()

        def step() -> _CallResult | None:
            with self._watch():  # includes the copy from a GPU, which waits for the computation
                result = next(iterator, end)
                return None if result is end else to_piece(result)

        def close() -> None:
            with self._watch():
                iterator.close()

        try:
            while (piece := await self._in_executor(step)) is not None:
                yield piece
        finally:
            await self._in_executor(close)

    async def _close(self, results: AsyncGenerator[Any, None]) -> None:
        """Close a model's generator. Exceptions of its clean-up are only logged: its rows have been answered."""
        try:
            await results.aclose()
        except BaseException as error:
            self._failures.note(error)

    async def _call(self, step_input: Given, step_result: Made, rows: list[int], is_retry: bool) -> _CallResult:
        if not step_input.is_warmup:
            if is_retry:
                step_result.retries += 1
            else:
                step_result.calls += 1
        self._set_up_thread()
        size = next((size for size in self._sizes if size >= len(rows)), len(rows))
        arguments, watched = self._arguments(step_input, [*rows, *[rows[-1]] * (size - len(rows))])

        def compute() -> _CallResult | Awaitable[object]:
            with self._watch():  # includes the copy from a GPU, which waits for the computation
                result = self.model(**arguments)
                return result if inspect.isawaitable(result) else self._piece(result, rows, watched, size)

        with self._guard.watching(watched, step_result) if watched else _UNWATCHED:
            if self._is_async:
                piece = self.model(**arguments)
            elif self._executor is None:
                piece = compute()
            else:  # one switch to the thread for both call and check: a switch takes as long as a small head
                piece = await self._in_executor(compute)
            if not isinstance(piece, _CallResult):
                await asyncio.sleep(0)  # what the model awaits needs a task; see `headwater.runtime.call_loop.begin`
                piece = await _in_time(self._awaited(piece, rows, watched, size), step_input.until_s)
        if self.model.response_headers:
            found = headers_by_row(rows, arguments["requests"], self.model.response_headers)
            step_result.headers.update(found)
        # A copy, because a later call may reuse the memory.
        return _owned(piece) if is_retry or len(rows) < step_input.rows else piece

    async def _awaited(
        self, computed: Awaitable[object], rows: list[int], watched: Sequence[_Watched], size: int
    ) -> _CallResult:  # fmt: skip
        """Await a model's result, and check it."""
        with self._watch():
            result = await computed
        with self._watch():
            if self._device.startswith("cuda"):  # in a thread, because the copy blocks until the GPU has finished
                return await self._in_executor(lambda: self._piece(result, rows, watched, size))
            piece = self._piece(result, rows, watched, size)
            # A copy, before another call runs that may reuse the memory.
            return _owned(piece) if self.overlaps else piece

    def _arguments(self, step_input: Given, rows: list[int]) -> tuple[dict[str, Any], list[_Watched]]:
        """The model's arguments, and the arguments among them that the model must not write into."""
        arguments: dict[str, Any] = {}
        watched: list[_Watched] = []
        kind = self.model.arrays
        is_whole = len(rows) == step_input.rows and (not self._sizes or rows == list(range(step_input.rows)))
        for spec in self.planned.signature.inputs:
            value = step_input.inputs.get(spec.name)
            if value is None:
                arguments[spec.name] = None
                continue
            places = step_input.places.get(spec.name)
            taken_rows = [places[row] for row in rows] if places is not None else None if is_whole else rows
            if spec.name not in self._from_steps:
                arguments[spec.name] = argument(spec, value, kind, self._device, taken_rows)
                continue
            taken = converted(spec, value if taken_rows is None else rows_of(value, taken_rows), kind, self._device)
            is_shared = taken is value and spec.name in step_input.shared
            if self.model.mutates_features or self._guard.has_caught:
                taken, is_shared = copied(taken), False
            if not self.model.mutates_features:
                watched.append(_Watched(spec.name, taken, version_of(taken), is_shared))
            arguments[spec.name] = taken
        has_batch_axis = self.model.batch is not None
        if not has_batch_axis:  # the call has one row
            arguments = {name: None if value is None else value[0] for name, value in arguments.items()}
        if self._parameters:
            arguments["parameters"] = _values(self._parameters, step_input, rows, has_batch_axis=has_batch_axis)
        requests = []
        if self.model.takes_requests:
            texts = step_input.row_parameters[CONTEXT]
            requests = arguments["requests"] = requests_of([texts[row] for row in rows], self.model.request_headers)
        note_call(requests)
        return arguments, watched

    def _piece(self, result: object, rows: list[int], watched: Sequence[_Watched], size: int) -> _CallResult:
        """Check the model's result, drop the rows that padded the call up to ``size`` rows, and make the outputs ready
        to be shared."""
        values, arrays = self._check(result, size)
        if self._sizes:  # a copy, because CUDA graphs return the same memory in each call
            values = {name: first_rows(value, len(rows)) for name, value in values.items()}
            arrays = {name: array[: len(rows)] for name, array in arrays.items()}
        for name, value in values.items():
            # Writing into the output would change the input that it shares memory with, and other steps read that
            # input.
            if any(overlaps(value, arg.value) for arg in watched):
                value = copied(value)
            values[name] = settled(value)
        return _CallResult(rows, values, arrays)

    def _check(self, result: object, rows: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """Check the model's result: handovers against the tensors that their consumers expect, a head's outputs against
        their declarations."""
        kind = type(self.model).__name__
        if not isinstance(result, Mapping):
            raise BadOutput(f"{kind} returned {type(result).__name__}, expected a dict of output name to array")
        for name in result:
            if name not in self._outputs:
                raise BadOutput(f"{kind} returned an output {name!r}, expected {', '.join(self._outputs)}")
        if self.model.batch is None:
            result = {name: one_row(value) for name, value in result.items()}
        values = _handed_over(self.name, self._handovers, result, rows)
        arrays: dict[str, Array] = {}
        if self._is_head:
            if self._device.startswith("cuda"):
                result = fetched({name: result[name] for name in self._outputs if name in result})
            for name, spec in self._outputs.items():
                if name not in result:
                    raise BadOutput(f"{kind} returned no output {name!r}, expected {', '.join(self._outputs)}")
                if spec.ragged:
                    arrays[name], arrays[COUNT.format(name)] = ragged(spec, result[name], rows)
                else:
                    arrays[name] = wire(spec, result[name], rows)
        return values, arrays

    async def _in_executor(self, call: Callable[[], T]) -> T:
        if self._executor is None:
            return call()

        def run() -> T:
            self._set_up_thread()
            try:
                return call()
            except (StopIteration, GeneratorExit) as error:  # a future can't carry these into a coroutine
                raise RuntimeError(f"the callable raised {type(error).__name__}") from error

        context = contextvars.copy_context()  # for `note_call`
        return await asyncio.get_running_loop().run_in_executor(self._executor, context.run, run)

    def _set_up_thread(self) -> None:
        # Before each call, because gradient mode and CUDA graphs are per thread.
        torch: Any = sys.modules.get("torch")
        if torch is not None and torch.is_grad_enabled():
            torch.set_grad_enabled(False)
        if self._sizes:
            begin_graphs()


async def _in_time(computed: Awaitable[T], until_s: float) -> T:
    """Await a model's result until the deadline.

    Raises:
        CallFailed: the deadline passed, and the call was cancelled.
    """
    if until_s == math.inf:
        return await computed
    task = asyncio.ensure_future(computed)
    await asyncio.wait({task}, timeout=max(0.0, until_s - time.monotonic()))
    if not task.done():
        task.cancel()
        await asyncio.wait({task})  # let it clean up
        if task.cancelled():
            raise CallFailed(LATE)
    return task.result()


def _values(
    parameters: Sequence[Parameter], step_input: Given, rows: Sequence[int], *, has_batch_axis: bool
) -> dict[str, Any]:
    """The values of parameters in a call of these rows; without a batch axis that of the only row, in place of a
    list."""
    per_row = step_input.row_parameters
    return {
        parameter.name: step_input.parameters[parameter.name]
        if parameter.per == "batch"
        else [per_row[parameter.name][row] for row in rows]
        if has_batch_axis
        else per_row[parameter.name][rows[0]]
        for parameter in parameters
    }


def _handed_over(step: str, handovers: Sequence[Handover], result: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The outputs of a step that other steps take, checked; ragged outputs as `Elements`.

    Raises:
        BadOutput: an output differs from what a step expects, or ragged outputs from each other in their rows' sizes.
    """
    values: dict[str, Any] = {}
    sizes: dict[str, list[int]] = {}
    for handover in handovers:
        value, where = result.get(handover.output), f"step `{handover.consumer}`, input `{handover.input}`"
        if handover.ragged is None:
            value = checked(handover.expected, value, rows, where=where, source=f"`{step}`")
        else:
            is_flat = len(handover.ragged.shape) == 1
            value = checked_elements(handover.expected, value, rows, is_flat=is_flat, where=where, source=f"`{step}`")
            sizes[handover.output] = value.counts
        values.setdefault(handover.output, value)
    for (name, counts), (other, other_counts) in itertools.pairwise(sizes.items()):
        if counts != other_counts:
            row = next(row for row in range(rows) if counts[row] != other_counts[row])
            raise BadOutput(
                f"step `{step}`, row {row}: expected as many elements in each ragged output that other steps take, got "
                f"{counts[row]} of {name!r} and {other_counts[row]} of {other!r}"
            )
    return values


def _shortage(report: RowReport, rows: int, device: str) -> RowReport:
    """The report of rows that don't fit in the device's memory and can't be split further."""
    rows_text, fix = "1 row alone", "send a smaller input"
    if rows > 1:
        rows_text, fix = f"{rows} rows, which can't be computed in parts", "lower `batching.max_batch_size`"
    text = f"out of memory on {device} with {rows_text}; {fix}, or give the model a device with more free memory"
    return RowReport(report.status, f"{text}: {report.message.partition(chr(10))[0][:500]}")


def _row_bytes(step_input: Given) -> int:
    """The average size of a row of the inputs, in bytes."""
    return sum(value.nbytes // max(len(value), 1) for value in step_input.inputs.values())


def _join(step_result: Made, pieces: Sequence[_CallResult]) -> bool:
    """Join the pieces into `step_result`: one value for each output, with all rows that succeeded.

    Returns False, and joins nothing, if the shapes of the pieces' rows differ.
    """
    if len(pieces) == 1:
        step_result.good, step_result.values, step_result.arrays = pieces[0]
        return True
    shapes = [
        [tuple(output.shape[1:]) for output in (*piece.values.values(), *piece.arrays.values())] for piece in pieces
    ]
    if any(shape != shapes[0] for shape in shapes):
        return False
    if pieces:
        step_result.values = {
            name: settled(joined([piece.values[name] for piece in pieces])) for name in pieces[0].values
        }
        step_result.arrays = {name: joined([piece.arrays[name] for piece in pieces]) for name in pieces[0].arrays}
    step_result.good = [row for piece in pieces for row in piece.rows]
    return True


def _owned(piece: _CallResult) -> _CallResult:
    """A copy of the piece."""
    values = {name: settled(copied(value)) for name, value in piece.values.items()}
    return _CallResult(piece.rows, values, {name: copied(array) for name, array in piece.arrays.items()})
