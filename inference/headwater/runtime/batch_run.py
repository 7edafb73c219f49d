"""Runs a batch through the steps of a fused pipeline, and decides which answers share a frame."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from headwater.errors import DeclarationError
from headwater.pipeline import INPUT, Plan, PlannedStep
from headwater.runtime.feature_cache import FeatureCache
from headwater.runtime.request import Part
from headwater.runtime.step import LATE, Given, Made, Step
from headwater.runtime.stream_control import StreamControl
from headwater.runtime.values import copied, rows_of, settled
from headwater.wire.arrays import Array, spread
from headwater.wire.frame import Frame, FrameTensor, Piece, StepCount, encode_frame, tensor_bytes
from headwater.wire.report import CallNote, RowReport, Status

__all__ = ["BatchRun", "Pace"]


SMOOTHING = 0.2

_READ = CallNote()
"""Replaces a call's note after the note has been read."""


class Pace:
    """Smoothed step times. They decide whether an answer that is ready waits for the next answer, for at most `wait_s`
    seconds."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._seconds: dict[str, float] = {}

    def note(self, step: str, took_s: float) -> None:
        """Record how long a call of a step took."""
        average_s = self._seconds.get(step, took_s)
        self._seconds[step] = average_s + SMOOTHING * (took_s - average_s)

    def allows(self, waited_s: float, steps: Iterable[str]) -> bool:
        """Whether an answer that has waited this long, in seconds, may wait for these steps; False if a step never ran
        before."""
        return waited_s + sum(self._seconds.get(step, math.inf) for step in steps) <= self._wait_s

    def left_s(self, waited_s: float) -> float:
        """How much longer an answer that has waited this long may wait, in seconds."""
        return max(0.0, self._wait_s - waited_s)


MAX_MESSAGE_CHARS = 2000

_Answer = tuple[Piece, list[bytes]]
"""A piece and the bytes of its tensors."""


class _Result(NamedTuple):
    """The result of a step for some of a batch's rows."""

    rows: list[int]
    """Indices in the batch of the rows that succeeded."""
    values: Mapping[str, Any]
    """Outputs that other steps take, by name, for the rows in `rows`."""
    failures: Mapping[int, RowReport]
    """The report of each failed row, by the row's index in the batch."""


class _Hold:
    """A batch's hold of the pipeline's turn; the batch may release the turn and take it again."""

    __slots__ = ("_has_turn", "_turn")

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self._has_turn = False

    async def take(self) -> None:
        """Wait for the turn, unless the batch holds it."""
        if not self._has_turn:
            await self._turn.acquire()
            self._has_turn = True

    def leave(self) -> None:
        """Release the turn to another batch."""
        if self._has_turn:
            self._has_turn = False
            self._turn.release()

    async def __aenter__(self) -> _Hold:
        await self.take()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()


class _ReadyAnswers:
    """Answers that wait for the next answer, to share its frame, as far as the pace and the clients let them.

    Args:
        pace: the pipeline's pace.
        patience_s: how long clients can't use a part of the answers without the rest, in seconds. Each frame that is
            sent while a step computes slows that step down.
    """

    def __init__(self, pace: Pace, patience_s: float) -> None:
        self._pace = pace
        self._patience_s = patience_s
        self._answers: list[_Answer] = []
        self._since_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._answers)

    def add(self, answer: _Answer) -> None:
        """Add an answer."""
        if not self._answers:
            self._since_s = time.perf_counter()
        self._answers.append(answer)

    def take(self) -> list[_Answer]:
        """Take all answers."""
        answers, self._answers = self._answers, []
        return answers

    def may_wait(self, steps: Iterable[str]) -> bool:
        """Whether the answers wait for the next answer, which needs these steps."""
        waited_s = time.perf_counter() - self._since_s
        return waited_s < self._useless_s() or self._pace.allows(waited_s, steps)

    def left_s(self) -> float:
        """How much longer the answers may wait, in seconds."""
        waited_s = time.perf_counter() - self._since_s
        return max(self._useless_s() - waited_s, self._pace.left_s(waited_s))

    def _useless_s(self) -> float:
        """How long clients can't use the answers without the rest, in seconds; 0 if a row failed."""
        return 0 if any(piece.failures for piece, _ in self._answers) else self._patience_s


class BatchRun:
    """Runs a batch and answers in frames. `ancestors` maps each head to the steps that must run for it, the head
    included. `held_rows` returns the number of rows that the replica holds. `caches` keep the outputs of some steps.

    Raises:
        DeclarationError: the masks of requested heads, or the owners, don't cover exactly the rows.
    """

    __slots__ = (
        "_ancestors", "_caches", "_counts", "_held_rows", "_is_warmup", "_kept", "_needed", "_owners", "_part",
        "_patience_s", "_plan", "_results", "_spoilers", "_steps", "_unanswered", "_until_s", "_wanted",
    )  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        ancestors: Mapping[str, frozenset[str]],
        steps: Mapping[str, Step],
        part: Part,
        held_rows: Callable[[], int],
        caches: Mapping[str, FeatureCache],
    ) -> None:
        self._plan = plan
        self._ancestors = ancestors
        self._steps = steps
        # The note is dropped: a stream may be long and doesn't need it.
        self._part = part._replace(note=_READ)
        self._is_warmup = part.note.warmup
        self._patience_s = part.note.patience_s
        self._held_rows = held_rows
        self._caches = caches
        self._owners = [owner for owner, rows in part.note.owners for _ in range(rows)] or [""] * part.rows
        if len(self._owners) != part.rows:
            raise DeclarationError(f"owners: expected those of {part.rows} rows, got {len(self._owners)}")
        self._wanted = _wanted(plan, part)
        """Rows that request a head, by the head's name."""
        self._needed: dict[str, list[int]] = {}
        """Rows for which a step must run, by the step's name."""
        for step in plan.steps:
            wanted = (rows for head, rows in self._wanted.items() if step.name in ancestors[head])
            self._needed[step.name] = sorted(set[int]().union(*wanted))
        left_s, now_s = part.note.left_s, time.monotonic()
        self._until_s = {head: now_s + left_s[head] if head in left_s else math.inf for head in self._wanted}
        """Each head's deadline, in monotonic seconds."""
        self._unanswered = dict.fromkeys(self._wanted)
        """Heads without a final piece in a frame so far, in order."""
        self._results: dict[str, _Result] = {}
        self._kept: set[str] = set()
        """Steps with results that are copies."""
        self._spoilers: dict[str, str] = {}
        """Maps each step with overwritten outputs to the step that overwrote them. The outputs are recomputed when next
        needed."""
        self._counts: dict[str, StepCount] = {}

    async def batch(self, turn: asyncio.Lock, pace: Pace) -> AsyncGenerator[Array, None]:
        """Run the steps, and yield frames with the heads' answers as they become ready. Answers share a frame as far as
        `pace` and the note's `patience_s` let them wait.

        The batch holds the turn from its first step to its last, except while a step overlaps: then other batches run
        at the same time.
        """
        ready = _ReadyAnswers(pace, self._patience_s)
        async with _Hold(turn) as hold:
            names = [step.name for step in self._plan.steps if self._needed[step.name]]
            for place, name in enumerate(names, start=1):
                await hold.take()
                running = asyncio.ensure_future(self._step(self._steps[name], hold, pace))
                try:
                    # The pace is an estimate: if a step hangs this time, it must not delay an answer that is ready.
                    if ready and not await _ends_within(running, ready.left_s()):
                        yield self._frame(ready.take())
                    answer = await running
                finally:
                    if not running.done():  # even if the consumer stops early, the turn is held until the step ends
                        await asyncio.wait({running})
                if answer is None:
                    continue
                ready.add(answer)
                if not ready.may_wait(self._until_next_head(names[place:])):
                    yield self._frame(ready.take())
        if ready:
            yield self._frame(ready.take())

    async def stream(self, turn: asyncio.Lock, control: StreamControl) -> AsyncGenerator[Array, None]:
        """Run the steps that don't depend on the streaming step, then that step, and its descendants for each of its
        yields. Yields frames. A warm-up takes only the first yield.

        A head ends when a row of it fails; the other heads continue. The turn is held while steps run, except while
        the streaming step computes its next yield, or a step overlaps. A cancelled stream ends without a final frame.
        """
        source = next(step for step in self._plan.steps if step.signature.streams)
        after = [
            step for step in self._plan.steps if step is not source and source.name in self._plan.needed([step.name])
        ]
        async with _Hold(turn) as hold:
            control.has_turn = True
            if control.is_cancelled:
                return
            for planned in self._plan.steps:
                if self._needed[planned.name] and planned is not source and planned not in after:
                    await hold.take()
                    answer = await self._step(self._steps[planned.name], hold)
                    if answer is not None:
                        yield self._frame([answer])
            heads = [head for head in self._wanted if source.name in self._ancestors[head]]
            lost = [self._answer(head, {}) for head in heads if self._is_lost(head)]
            if lost:
                yield self._frame(lost)
            if not self._unanswered:
                return
            await hold.take()
            step_input, rows, failures = await self._given(self._steps[source.name], is_private=True)
            self._keep({wire.step for step in after for wire in step.wires})
        control.has_turn = False
        self._count(source.name, 0 if step_input.is_warmup else 1, 0, 0.0)
        async with contextlib.aclosing(self._steps[source.name].iterate(step_input, control)) as results:
            started_s = time.perf_counter()
            async for step_result in results:
                took_s = time.perf_counter() - started_s
                if control.is_cancelled:
                    break
                self._take(source.name, step_result, took_s, rows, failures)
                yield self._frame(await self._follow(source.name, step_result, took_s, after, turn))
                if not self._unanswered:
                    return
                if self._is_warmup:  # a single result is enough: the stream may be endless
                    break
                del step_result  # free the memory: the next result may take long
                started_s = time.perf_counter()
        if control.is_cancelled:
            return
        yield self._frame([(Piece(head, len(self._wanted[head]), 0), []) for head in self._unanswered])

    def failed(self, report: RowReport) -> Array:
        """A final frame in which all rows of the unanswered heads fail."""
        for head in self._unanswered:
            self._results[head] = _Result([], {}, dict.fromkeys(self._wanted[head], report))
        return self._frame([self._answer(head, {}) for head in self._unanswered])

    async def _follow(
        self, source: str, step_result: Made, took_s: float, after: Sequence[PlannedStep], turn: asyncio.Lock
    ) -> list[_Answer]:  # fmt: skip
        """The heads' pieces for a yield of the streaming step."""
        answers = (
            [self._answer(source, step_result.arrays, took_s, is_last=False)] if source in self._unanswered else []
        )
        needed = [step for step in after if any(step.name in self._ancestors[head] for head in self._unanswered)]
        if needed:
            async with _Hold(turn) as hold:
                for planned in needed:
                    await hold.take()
                    answer = await self._step(self._steps[planned.name], hold, is_last=False)
                    if answer is not None:
                        answers.append(answer)
        return answers

    async def _step(
        self, step: Step, hold: _Hold, pace: Pace | None = None, *, is_last: bool = True
    ) -> _Answer | None:  # fmt: skip
        """Run a step on the rows that need it, after its parents have run. A step that overlaps releases the turn. If
        the deadlines of all heads that need the step have passed, its rows fail without a call.

        Returns the piece if the step is a requested head that has not ended; otherwise None.
        """
        until_s = max(self._until_s[head] for head in self._wanted if step.name in self._ancestors[head])
        if until_s <= time.monotonic():
            # The deadlines of the step's descendants have passed too.
            late = dict.fromkeys(self._needed[step.name], RowReport(Status.RAISED, LATE))
            self._results[step.name] = _Result([], {}, late)
            return self._answer(step.name, {}) if step.name in self._unanswered else None
        cache = self._caches.get(step.name)
        overlaps = step.overlaps and cache is None
        step_input, rows, failures = await self._given(step, is_private=overlaps)
        step_input = step_input._replace(until_s=until_s)
        if overlaps:
            self._keep(
                {wire.step for planned in self._plan.steps if planned is not step.planned for wire in planned.wires}
            )
            hold.leave()
        step_result = Made()
        took_s = 0.0
        if rows:
            started_s = time.perf_counter()
            step_result = await (step.run(step_input) if cache is None else cache.run(step, step_input))
            took_s = time.perf_counter() - started_s
            if cache is not None and not step_input.is_warmup:
                self._count_of(step.name).cache = cache.counted()
            if pace is not None:
                pace.note(step.name, took_s)
        for wire in step.planned.wires:
            if wire.input in step_result.spoiled:
                self._spoilers.setdefault(wire.step, step.name)
        self._take(step.name, step_result, took_s, rows, failures)
        return (
            self._answer(step.name, step_result.arrays, took_s, is_last=is_last)
            if step.name in self._unanswered
            else None
        )

    async def _given(
        self, step: Step, *, is_private: bool = False
    ) -> tuple[Given, list[int], dict[int, RowReport]]:  # fmt: skip
        """The arguments of a step, the batch's rows in these arguments, and the reports of rows that failed in an
        earlier step. With `is_private`, other steps' outputs are copied. The step's parents must have run."""
        for parent in step.planned.parents:
            await self._renew(parent)
        lost = self._lost(step.planned.parents)
        needed = self._needed[step.name]
        rows = [row for row in needed if row not in lost]
        inputs: dict[str, Any] = {}
        shared: set[str] = set()
        part = self._part
        for wire in step.planned.wires if rows else ():
            if wire.step == INPUT:
                array = part.inputs.get(wire.output)
                if array is not None:
                    inputs[wire.input] = array if len(rows) == part.rows else array[rows]
                continue
            result = self._results[wire.step]
            value = result.values[wire.output]
            if result.rows != rows:
                place = {row: index for index, row in enumerate(result.rows)}
                value = rows_of(value, [place[row] for row in rows])
            elif is_private:
                value = copied(value)
            else:
                shared.add(wire.input)
            inputs[wire.input] = value
        per_row = {name: [values[row] for row in rows] for name, values in part.row_parameters.items()}
        owners = [self._owners[row] for row in rows]
        step_input = Given(
            inputs, len(rows), part.batch_parameters, per_row, self._is_warmup, frozenset(shared), owners
        )
        return step_input, rows, {row: lost[row] for row in needed if row in lost}

    def _lost(self, steps: Iterable[str]) -> dict[int, RowReport]:
        """Reports, by row, of the rows that failed in these steps, as far as they have run. If a row failed in several
        steps, the report of the first step counts."""
        lost: dict[int, RowReport] = {}
        for name in steps:
            if name in self._results:
                lost = {**self._results[name].failures, **lost}
        return lost

    async def _renew(self, name: str) -> None:
        """Recompute a step's outputs if another step wrote into them; if that is impossible, fail their rows."""
        culprit = self._spoilers.pop(name, None)
        if culprit is None:
            return
        step = self._steps[name]
        signature = step.planned.signature
        if signature.streams or not signature.idempotent:
            why = "it streams" if signature.streams else "it is not idempotent"
            report = RowReport(
                Status.RAISED,
                f"step `{culprit}` wrote into the outputs of step `{name}`, which can't be computed again since {why}: "
                f"set `mutates_features = True` in {type(self._steps[culprit].model).__name__}",
            )
            before = self._results[name]
            self._results[name] = _Result([], {}, {**before.failures, **dict.fromkeys(before.rows, report)})
            return
        step_input, rows, failures = await self._given(step)
        started_s = time.perf_counter()
        step_result = await step.run(step_input, is_retry=True)
        self._take(name, step_result, time.perf_counter() - started_s, rows, failures)

    def _take(
        self, name: str, step_result: Made, took_s: float, rows: Sequence[int], failures: Mapping[int, RowReport]
    ) -> None:  # fmt: skip
        """Store and count a step's result for these rows of the batch; the other rows failed in an earlier step."""
        failed = {rows[row]: report for row, report in step_result.failures.items()}
        self._results[name] = _Result(
            [rows[row] for row in step_result.good], step_result.values, {**failures, **failed}
        )
        self._kept.discard(name)
        self._spoilers.pop(name, None)
        self._count(name, step_result.calls, step_result.retries, took_s)

    def _count(self, name: str, calls: int, retries: int, took_s: float) -> None:
        count = self._count_of(name)
        count.calls += calls
        count.retries += retries
        count.compute_us += int(took_s * 1e6)

    def _count_of(self, name: str) -> StepCount:
        return self._counts.setdefault(name, StepCount(name, 0, 0, 0))

    def _is_lost(self, head: str) -> bool:
        """Whether a row of a streaming head failed before the stream. The failures before the stream become the head's
        result."""
        lost = self._lost(step.name for step in self._plan.steps if step.name in self._ancestors[head])
        self._results[head] = _Result([], {}, lost)
        return any(row in lost for row in self._wanted[head])

    def _keep(self, names: Iterable[str]) -> None:
        """Copy these steps' results, which are needed while other batches run: a model may reuse its memory."""
        for name in names:
            if name in self._results and name not in self._kept:
                self._kept.add(name)
                rows, values, failures = self._results[name]
                kept = {output: settled(copied(value)) for output, value in values.items()}
                self._results[name] = _Result(rows, kept, failures)

    def _until_next_head(self, names: Sequence[str]) -> Sequence[str]:
        """These steps up to the first step with a requested answer; empty if there is no such step."""
        for place, name in enumerate(names, start=1):
            if name in self._wanted:
                return names[:place]
        return ()

    def _answer(self, head: str, arrays: Mapping[str, Array], took_s: float = 0.0, *, is_last: bool = True) -> _Answer:
        """A head's result for the rows that requested it, as a piece and its tensors' bytes.

        `arrays` holds the head's outputs in wire form, for the rows that succeeded, in order. A piece with a failed row
        is always the head's last piece.
        """
        wanted = self._wanted[head]
        result = self._results[head]
        failed = [
            (place, int(result.failures[row].status), _text(result.failures[row].message))
            for place, row in enumerate(wanted)
            if row in result.failures
        ]
        piece = Piece(head, len(wanted), int(took_s * 1e6), failed, is_last=is_last or bool(failed))
        data: list[bytes] = []
        place_of = {row: place for place, row in enumerate(result.rows)}
        good = [place for place, row in enumerate(wanted) if row in place_of]
        order = [place_of[wanted[place]] for place in good]
        for spec in self._steps[head].planned.outputs if good else ():
            array = arrays[spec.name]
            if len(good) < len(wanted):
                array = spread(spec, array[order], good, len(wanted))
            elif len(order) < len(array):
                array = array[order]
            raw = tensor_bytes(spec, array)
            piece.tensors.append(FrameTensor(spec.name, spec.datatype, array.shape, len(raw)))
            data.append(raw)
        return piece, data

    def _frame(self, answers: Sequence[_Answer]) -> Array:
        """A frame of these pieces and the step counts since the last frame."""
        frame = Frame([piece for piece, _ in answers], list(self._counts.values()), self._held_rows())
        encoded = encode_frame(frame, [raw for _, data in answers for raw in data])
        self._counts = {}
        for piece in frame.pieces:
            if piece.is_last:
                self._unanswered.pop(piece.head, None)
        return encoded


async def _ends_within(task: asyncio.Future[Any], timeout_s: float) -> bool:
    """Whether a task ends within this time. It isn't cancelled."""
    await asyncio.wait({task}, timeout=timeout_s)
    return task.done()


def _wanted(plan: Plan, part: Part) -> dict[str, list[int]]:
    """The rows that request each head; heads without such rows are left out."""
    heads = [head.name for head in plan.signature.heads]
    runs = part.note.heads or [((1 << len(heads)) - 1, part.rows)]
    total = sum(rows for _, rows in runs)
    if total != part.rows or any(rows < 0 for _, rows in runs):
        raise DeclarationError(f"heads: expected masks of {part.rows} rows, got {total}")
    masks = [mask for mask, rows in runs for _ in range(rows)]
    wanted = {head: [row for row, mask in enumerate(masks) if mask >> bit & 1] for bit, head in enumerate(heads)}
    return {head: rows for head, rows in wanted.items() if rows}


def _text(message: str) -> str:
    """A shortened message without lone surrogates, which UTF-8 can't encode."""
    return message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
