"""Runs a callable on the requests that Triton merged, with a report for every row.

`Runner.handle` raises no exception, because Triton would answer the whole batch with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np

from headwater.errors import DeclarationError
from headwater.model import Model
from headwater.pipeline import PlannedStep, StepSpec
from headwater.runtime.capacity import Capacity
from headwater.runtime.request import Part, TritonRequest, read_request, refusal
from headwater.runtime.step import Given, Made, Step
from headwater.runtime.watchdog import WatchCall
from headwater.signature import Signature
from headwater.wire.arrays import Array, spread, zeros
from headwater.wire.report import REPORT, RowNote, RowReport, Status, encode_reports, placeholder_shape
from headwater.wire.shared_memory import MappedCall, stand_in_shape

__all__ = ["Runner"]

Arrays = dict[str, Array]
_OK = RowReport(Status.OK)


class Runner:
    """Calls a model, in the thread that awaits `handle`.

    Args:
        model: the model, loaded.
        signature: its declarations.
        device: the device of torch tensors.
        on_broken: see `Step`.
        watch: the context in which each call of the model runs.
        capacity: how many rows fit in the device's memory, for all runners of the model.
        sizes: see `Step`.
        stream: the context in which a batch is computed: a stream of the GPU, if several runners share a GPU.
        runners: all runners of the model, this one included; None: there is no other.
    """

    def __init__(
        self,
        model: Model,
        signature: Signature,
        device: str,
        on_broken: Callable[[str], None] = lambda reason: None,
        watch: WatchCall = contextlib.nullcontext,
        capacity: Capacity | None = None,
        sizes: Sequence[int] = (),
        stream: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        runners: Sequence[Runner] | None = None,
    ) -> None:
        self.held_rows = 0
        """Rows of the batch that this runner computes at present."""
        self._runners = (self,) if runners is None else runners
        self._signature = signature
        self._stream = stream
        planned = PlannedStep(StepSpec(signature.name), signature, wires=())
        self.step = Step(
            planned, model, device,
            handovers=(), is_head=True, executor=None, on_broken=on_broken, watch=watch, where="",
            capacity=capacity, sizes=sizes,
        )  # fmt: skip

    async def handle(self, requests: Sequence[TritonRequest]) -> list[Arrays]:
        """Answer the requests that Triton merged: one dict of outputs per request, including the hidden report."""
        answers: list[Arrays] = [{}] * len(requests)
        groups: dict[object, list[tuple[int, Part]]] = {}
        for index, request in enumerate(requests):
            try:
                part = read_request(self._signature, request)
            except (DeclarationError, OSError) as error:
                rows = len(next(iter(request.data.values())))
                answers[index] = self._answer(self._blank(rows), [refusal(error)] * rows, 0)
                continue
            if part.note.cancel:  # the guardian's call, which only shows that the replica answers
                answers[index] = self._answer(self._blank(part.rows), [_OK] * part.rows, 0)
            else:
                groups.setdefault(_group_key(part), []).append((index, part))
        self.held_rows = sum(part.rows for members in groups.values() for _, part in members)
        for members in groups.values():
            group = [part for _, part in members]
            rows = sum(part.rows for part in group)
            started = time.perf_counter_ns()
            with self._stream():
                step_result = await self.step.run(_joined(group, rows))
            outputs = self._whole(step_result, rows)
            if len(groups) > 1:  # the next group's call may reuse the memory of these outputs
                outputs = {name: array.copy() for name, array in outputs.items()}
            reports = (
                [step_result.failures.get(row, _OK) for row in range(rows)] if step_result.failures else [_OK] * rows
            )
            compute_us = (time.perf_counter_ns() - started) // 1000
            held = sum(runner.held_rows for runner in self._runners)
            start = 0
            for index, part in members:
                end = start + part.rows
                piece = {name: array[start:end] for name, array in outputs.items()}
                report = reports[start:end]
                headers = {row - start: step_result.headers[row] for row in step_result.headers if start <= row < end}
                answers[index] = self._answer(
                    piece, report, compute_us, part.memory, is_merged=start > 0, held_rows=held, headers=headers
                )
                start = end
        self.held_rows = 0
        return answers

    def _whole(self, step_result: Made, rows: int) -> Arrays:
        """The outputs of all rows, with zeros in the rows that failed."""
        if not step_result.arrays:
            return self._blank(rows)
        if len(step_result.good) == rows:
            return step_result.arrays
        specs = self._signature.outputs
        return {spec.name: spread(spec, step_result.arrays[spec.name], step_result.good, rows) for spec in specs}

    def _answer(
        self, outputs: Arrays, reports: Sequence[RowReport], compute_us: int, memory: MappedCall | None = None, *,
        is_merged: bool = False, held_rows: int = 0, headers: Mapping[int, dict[str, str]] = {},
    ) -> Arrays:  # fmt: skip
        """Outputs and report as sent to Triton. Outputs without elements, whose shape is in the report, and outputs in
        shared memory are replaced with placeholders."""
        shared_outputs = memory.leave(outputs) if memory is not None else ()
        empty: dict[str, tuple[int, ...]] = {}
        for spec in self._signature.outputs:
            if spec.name in shared_outputs:
                outputs[spec.name] = zeros(spec, tuple(stand_in_shape(spec, len(reports))))
            elif not outputs[spec.name].size:
                empty[spec.name] = outputs[spec.name].shape
                outputs[spec.name] = zeros(spec, tuple(placeholder_shape(len(reports), spec.shape)))
        if empty or headers:
            reports = [
                RowReport(Status.OK, msgspec.json.encode(RowNote(empty, headers.get(row, {}))).decode())
                if report.status is Status.OK
                else report
                for row, report in enumerate(reports)
            ]
        outputs[REPORT] = encode_reports(reports, compute_us, is_merged=is_merged, held_rows=held_rows)
        return outputs

    def _blank(self, rows: int) -> Arrays:
        return {spec.name: zeros(spec, tuple(placeholder_shape(rows, spec.shape))) for spec in self._signature.outputs}


def _joined(group: Sequence[Part], rows: int) -> Given:
    """The arguments of a call that these parts share."""
    first = group[0]
    inputs, per_row = first.inputs, first.row_parameters
    if len(group) > 1:
        inputs = {name: np.concatenate([part.inputs[name] for part in group]) for name in inputs}
        per_row = {name: [value for part in group for value in part.row_parameters[name]] for name in per_row}
    return Given(inputs, rows, first.batch_parameters, per_row, first.note.warmup)


def _group_key(part: Part) -> object:
    if part.note.alone:
        return id(part)
    shapes = tuple((name, array.shape[1:]) for name, array in part.inputs.items())
    return shapes, tuple(part.batch_parameters.items())
