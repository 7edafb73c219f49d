"""How long the steps of a fused pipeline take, and what follows for the frames that leave.

One batch on its way through the steps of a fused pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from inference.errors import DeclarationError
from inference.pipeline import INPUT, Plan, PlannedStep
from inference.runtime.request import Part
from inference.runtime.step import LATE, Given, Made, Step
from inference.runtime.stream_control import StreamControl
from inference.runtime.values import copied, rows_of, settled
from inference.wire.arrays import Array, zeros
from inference.wire.frame import Frame, FrameTensor, Piece, StepCount, encode_frame, tensor_bytes
from inference.wire.report import RowReport, Status

__all__ = ["BatchRun", "Pace"]


SMOOTHING = 0.2


class Pace:
    """How long steps take of late, and so whether an answer that is ready should wait for the next one.

    Args:
        wait_s: how long it may wait.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._seconds: dict[str, float] = {}

    def note(self, step: str, took_s: float) -> None:
        """Take in what a call took."""
        known = self._seconds.get(step, took_s)
        self._seconds[step] = known + SMOOTHING * (took_s - known)

    def allows(self, waited_s: float, steps: Iterable[str]) -> bool:
        """Whether to wait on, after so long, until these steps have run. A step that never ran isn't waited for."""
        return waited_s + sum(self._seconds.get(step, math.inf) for step in steps) <= self._wait_s

    def left_s(self, waited_s: float) -> float:
        """How long an answer that has waited so long may go on to."""
        return max(0.0, self._wait_s - waited_s)


MAX_MESSAGE_CHARS = 2000

_Said = tuple[Piece, list[bytes]]
"""A piece and the bytes of its tensors."""


class _Result(NamedTuple):
    """What a step made of some of a batch's rows."""

    rows: list[int]
    """Of the batch; those that succeeded."""
    values: Mapping[str, Any]
    failures: Mapping[int, RowReport]
    """By row of the batch."""


class BatchRun:
    """Runs one batch, and says in frames what comes of it.

    Args:
        plan: the pipeline.
        ancestors: by head, the steps that must run for it, itself included.
        steps: by name.
        part: the batch.

    Raises:
        DeclarationError: the wanted heads are given for another number of rows.
    """

    __slots__ = (
        "_ancestors", "_counts", "_needed", "_part", "_plan", "_results", "_spoilers", "_steps", "_unanswered",
        "_until_s", "_wanted",
    )  # fmt: skip

    def __init__(
        self, plan: Plan, ancestors: Mapping[str, frozenset[str]], steps: Mapping[str, Step], part: Part
    ) -> None:  # fmt: skip
        self._plan = plan
        self._ancestors = ancestors
        self._steps = steps
        self._part = part
        self._wanted = _wanted(plan, part)
        """Rows that want a head, by its name."""
        self._needed: dict[str, list[int]] = {}
        """Rows for which a step must run, by its name."""
        for step in plan.steps:
            wanted = (rows for head, rows in self._wanted.items() if step.name in ancestors[head])
            self._needed[step.name] = sorted(set[int]().union(*wanted))
        left_s, now_s = part.note.left_s, time.monotonic()
        self._until_s = {head: now_s + left_s[head] if head in left_s else math.inf for head in self._wanted}
        """By head, when nobody waits for it any more."""
        self._unanswered = dict.fromkeys(self._wanted)
        """Heads whose last word has not left, in order."""
        self._results: dict[str, _Result] = {}
        self._spoilers: dict[str, str] = {}
        """By step: which other one wrote into its outputs. They are made anew when they are needed next."""
        self._counts: dict[str, StepCount] = {}

    async def batch(self, turn: asyncio.Lock, pace: Pace) -> AsyncGenerator[Array, None]:
        """Run the steps; gives the heads' answers as they are ready.

        Args:
            turn: held while steps run.
            pace: says whether an answer waits for the next one.
        """
        ready: list[_Said] = []
        since_s = 0.0
        async with turn:
            names = [step.name for step in self._plan.steps if self._needed[step.name]]
            for place, name in enumerate(names, start=1):
                running = asyncio.ensure_future(self._step(self._steps[name], pace))
                try:
                    # The pace is a guess: a step that hangs this time holds up no answer that is ready.
                    if ready and not await _ends_within(running, self._left_s(ready, pace, since_s)):
                        yield self._framed(ready)
                        ready = []
                    said = await running
                finally:
                    if not running.done():  # whoever leaves early, the turn lasts as long as the step
                        await asyncio.wait({running})
                if said is None:
                    continue
                if not ready:
                    since_s = time.perf_counter()
                ready.append(said)
                if not self._waits(ready, pace, since_s, self._until_next_head(names[place:])):
                    yield self._framed(ready)
                    ready = []
        if ready:
            yield self._framed(ready)

    async def stream(self, turn: asyncio.Lock, control: StreamControl) -> AsyncGenerator[Array, None]:
        """Run the steps up to the one that streams, then those that follow from it for each of its yields.

        A head has its end once a row of it fails; the others go on.

        Args:
            turn: held while steps run, but not while the one that streams computes its next yield.
            control: of the stream; if it is cancelled, it ends without a word.
        """
        source = next(step for step in self._plan.steps if step.signature.streams)
        after = [
            step for step in self._plan.steps if step is not source and source.name in self._plan.needed([step.name])
        ]
        async with turn:
            control.has_turn = True
            if control.is_cancelled:
                return
            for planned in self._plan.steps:
                if self._needed[planned.name] and planned is not source and planned not in after:
                    said = await self._step(self._steps[planned.name])
                    if said is not None:
                        yield self._framed([said])
            heads = [head for head in self._wanted if source.name in self._ancestors[head]]
            lost = [self._said(head, {}) for head in heads if self._is_lost(head)]
            if lost:
                yield self._framed(lost)
            if not self._unanswered:
                return
            given, rows, failures = await self._given(self._steps[source.name], is_private=True)
            self._keep({wire.step for step in after for wire in step.wires})
        control.has_turn = False
        self._count(source.name, 0 if given.is_warmup else 1, 0, 0.0)
        async with contextlib.aclosing(self._steps[source.name].iterate(given, control)) as results:
            started_s = time.perf_counter()
            async for made in results:
                took_s = time.perf_counter() - started_s
                if control.is_cancelled:
                    break
                self._take(source.name, made, took_s, rows, failures)
                yield self._framed(await self._follow(source.name, made, took_s, after, turn))
                if not self._unanswered:
                    return
                if self._part.note.warmup:  # one is enough, of what may have no end
                    break
                del made  # the next one may be long in coming
                started_s = time.perf_counter()
        if control.is_cancelled:
            return
        yield self._framed([(Piece(head, len(self._wanted[head]), 0), []) for head in self._unanswered])

    def failed(self, report: RowReport) -> Array:
        """The end of all heads whose last word has not left: every row fails."""
        said: list[_Said] = []
        for head in self._unanswered:
            self._results[head] = _Result([], {}, dict.fromkeys(self._wanted[head], report))
            said.append(self._said(head, {}))
        return self._framed(said)

    async def _follow(
        self, source: str, made: Made, took_s: float, after: Sequence[PlannedStep], turn: asyncio.Lock
    ) -> list[_Said]:  # fmt: skip
        """What the heads say of one yield of the step that streams."""
        said = [self._said(source, made.arrays, took_s, is_last=False)] if source in self._unanswered else []
        needed = [step for step in after if any(step.name in self._ancestors[head] for head in self._unanswered)]
        if needed:
            async with turn:
                for planned in needed:
                    one = await self._step(self._steps[planned.name], is_last=False)
                    if one is not None:
                        said.append(one)
        return said

    async def _step(self, step: Step, pace: Pace | None = None, *, is_last: bool = True) -> _Said | None:
        """Run one step, whose parents have run, on the rows that need it; of a head, gives what it says."""
        until_s = max(self._until_s[head] for head in self._wanted if step.name in self._ancestors[head])
        if until_s <= time.monotonic():
            return self._late(step.name)
        given, rows, failures = await self._given(step)
        given = given._replace(until_s=until_s)
        made = Made()
        took_s = 0.0
        if rows:
            started_s = time.perf_counter()
            made = await step.run(given)
            took_s = time.perf_counter() - started_s
            if pace is not None:
                pace.note(step.name, took_s)
        for wire in step.planned.wires:
            if wire.input in made.spoiled:
                self._spoilers.setdefault(wire.step, step.name)
        self._take(step.name, made, took_s, rows, failures)
        return self._said(step.name, made.arrays, took_s, is_last=is_last) if step.name in self._unanswered else None

    def _late(self, name: str) -> _Said | None:
        """A step isn't run, because nobody waits for it any more, nor for what takes its outputs."""
        failures = dict.fromkeys(self._needed[name], RowReport(Status.RAISED, LATE))
        self._results[name] = _Result([], {}, failures)
        return self._said(name, {}) if name in self._unanswered else None

    async def _given(
        self, step: Step, *, is_private: bool = False
    ) -> tuple[Given, list[int], dict[int, RowReport]]:  # fmt: skip
        """What a step is called with, for which rows of the batch, and why the others that need it can't be.

        Args:
            step: whose parents have run.
            is_private: whether it gets values in memory of their own.
        """
        for parent in step.planned.parents:
            await self._renew(parent)
        lost: dict[int, RowReport] = {}
        for parent in step.planned.parents:
            lost = {**self._results[parent].failures, **lost}
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
        given = Given(inputs, len(rows), part.batch_parameters, per_row, part.note.warmup, frozenset(shared))
        return given, rows, {row: lost[row] for row in needed if row in lost}

    async def _renew(self, name: str) -> None:
        """Make a step's outputs anew if another has written into them; if that can't be done, their rows fail."""
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
        given, rows, failures = await self._given(step)
        started_s = time.perf_counter()
        made = await step.run(given, is_retry=True)
        self._take(name, made, time.perf_counter() - started_s, rows, failures)

    def _take(
        self, name: str, made: Made, took_s: float, rows: Sequence[int], failures: Mapping[int, RowReport]
    ) -> None:  # fmt: skip
        """Keep and count what a step made of these rows of the batch; the others failed before."""
        failed = {rows[row]: report for row, report in made.failures.items()}
        self._results[name] = _Result([rows[row] for row in made.good], made.values, {**failures, **failed})
        self._spoilers.pop(name, None)
        self._count(name, made.calls, made.retries, took_s)

    def _count(self, name: str, calls: int, retries: int, took_s: float) -> None:
        count = self._counts.setdefault(name, StepCount(name, 0, 0, 0))
        count.calls += calls
        count.retries += retries
        count.compute_us += int(took_s * 1e6)

    def _is_lost(self, head: str) -> bool:
        """Whether a row of a head that streams failed before the stream; the failures are then the head's result."""
        lost: dict[int, RowReport] = {}
        for step in self._plan.steps:
            if step.name in self._ancestors[head] and step.name in self._results:
                lost = {**self._results[step.name].failures, **lost}
        self._results[head] = _Result([], {}, lost)
        return any(row in lost for row in self._wanted[head])

    def _keep(self, names: Iterable[str]) -> None:
        """Copy these steps' results, which are needed while other batches run: a model may reuse its own memory."""
        for name in names:
            if name in self._results:
                rows, values, failures = self._results[name]
                kept = {output: settled(copied(value)) for output, value in values.items()}
                self._results[name] = _Result(rows, kept, failures)

    def _waits(self, ready: Sequence[_Said], pace: Pace, since_s: float, steps: Sequence[str]) -> bool:
        """Whether answers that are ready since then go with the next one; it takes these steps, or there is none."""
        waited_s = time.perf_counter() - since_s
        return waited_s < self._patience_s(ready) or pace.allows(waited_s, steps)

    def _left_s(self, ready: Sequence[_Said], pace: Pace, since_s: float) -> float:
        """How long answers that are ready since then may go on to wait."""
        waited_s = time.perf_counter() - since_s
        return max(self._patience_s(ready) - waited_s, pace.left_s(waited_s))

    def _patience_s(self, ready: Sequence[_Said]) -> float:
        """How long nobody wants these answers without the others. Each frame that leaves while a step computes costs
        that step time."""
        return 0 if any(piece.failures for piece, _ in ready) else self._part.note.patience_s

    def _until_next_head(self, names: Sequence[str]) -> Sequence[str]:
        """Of these steps, those up to the first whose answer is wanted."""
        for place, name in enumerate(names, start=1):
            if name in self._wanted:
                return names[:place]
        return ()

    def _said(self, head: str, arrays: Mapping[str, Array], took_s: float = 0.0, *, is_last: bool = True) -> _Said:
        """What a head says by its result for the rows that wanted it, as it travels.

        Args:
            head: its name.
            arrays: its outputs in wire form; of the rows that succeeded, in order.
            took_s: how long its step took.
            is_last: whether it has nothing more to say; a head that streams has not either once a row failed.
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
        for spec in self._steps[head].planned.signature.outputs if good else ():
            array = arrays[spec.name]
            if len(good) < len(wanted):
                whole = zeros(spec, (len(wanted), *array.shape[1:]))
                whole[good] = array[order]
                array = whole
            elif len(order) < len(array):
                array = array[order]
            raw = tensor_bytes(spec, array)
            piece.tensors.append(FrameTensor(spec.name, spec.datatype, array.shape, len(raw)))
            data.append(raw)
        return piece, data

    def _framed(self, said: Sequence[_Said]) -> Array:
        """A frame of these, and of what was counted since the last one."""
        frame = Frame([piece for piece, _ in said], list(self._counts.values()))
        encoded = encode_frame(frame, [raw for _, data in said for raw in data])
        self._counts = {}
        for piece in frame.pieces:
            if piece.is_last:
                self._unanswered.pop(piece.head, None)
        return encoded


async def _ends_within(task: asyncio.Future[Any], timeout_s: float) -> bool:
    await asyncio.wait({task}, timeout=timeout_s)
    return task.done()


def _wanted(plan: Plan, part: Part) -> dict[str, list[int]]:
    """Rows that want a head, by its name; only of heads that are wanted at all."""
    heads = [head.name for head in plan.signature.heads]
    runs = part.note.heads or [((1 << len(heads)) - 1, part.rows)]
    told = sum(rows for _, rows in runs)
    if told != part.rows or any(rows < 0 for _, rows in runs):
        raise DeclarationError(f"heads: expected masks of {part.rows} rows, got {told}")
    masks = [mask for mask, rows in runs for _ in range(rows)]
    wanted = {head: [row for row, mask in enumerate(masks) if mask >> bit & 1] for bit, head in enumerate(heads)}
    return {head: rows for head, rows in wanted.items() if rows}


def _text(message: str) -> str:
    """A message as it can travel: not too long, and without halves of surrogate pairs."""
    return message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
