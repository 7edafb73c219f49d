"""Runs a callable on the requests that Triton merged, with a report for every row.

`Runner.handle` raises no exception, since PyTriton would answer the whole batch with it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from inference.errors import BadOutput, DeclarationError
from inference.model import Model
from inference.runtime.isolation import Errors, Isolation, RaggedPieces
from inference.runtime.request import Part, TritonRequest, read_request
from inference.runtime.watchdog import WatchCall
from inference.signature import Signature
from inference.wire.arrays import Array, argument, wire, zeros
from inference.wire.report import REPORT, RowReport, Status, encode_reports, placeholder_shape
from inference.wire.shared_memory import MappedCall, stand_in_shape

__all__ = ["Runner"]

Arrays = dict[str, Array]
_Piece = tuple[list[int], Arrays]
"""The rows of a call and their outputs."""


class _Outcome(NamedTuple):
    """The result of a group of rows. Outputs hold zeros in the rows that failed."""

    outputs: Arrays
    reports: list[RowReport]


class Runner:
    """Calls one model.

    Args:
        model: the model, loaded.
        signature: its declarations.
        device: the device of torch tensors.
        on_broken: called once the model's device is unusable; the replica then ends.
        watch: the context in which each call of the model runs.
    """

    def __init__(
        self,
        model: Model,
        signature: Signature,
        device: str,
        on_broken: Callable[[str], None] = lambda reason: None,
        watch: WatchCall = contextlib.nullcontext,
    ) -> None:
        self._model = model
        self._watch = watch
        self._signature = signature
        self._device = device
        self._errors = Errors(device, on_broken)
        self._takes_parameters = bool(signature.parameters)
        self._is_async = inspect.iscoroutinefunction(type(model).__call__)
        self._grad_off = False
        self.calls = 0
        """Calls of the model without retries and warm-up."""
        self.retries = 0
        """Calls to isolate the rows of a failed call."""
        self.warmups = 0
        """Warm-up calls."""

    async def handle(self, requests: Sequence[TritonRequest]) -> list[Arrays]:
        """Answer the requests that Triton merged: one dict of outputs per request, including the hidden report."""
        self._turn_grad_off()
        answers: list[Arrays] = [{}] * len(requests)
        groups: dict[object, list[int]] = {}
        parts: list[Part | None] = []
        failures: dict[int, tuple[int, RowReport]] = {}
        for index, request in enumerate(requests):
            try:
                part = read_request(self._signature, request)
            except DeclarationError as error:  # only a client that talks to Triton directly gets here
                rows = len(next(iter(request.data.values())))
                failures[index] = (rows, RowReport(Status.BAD_INPUT, str(error)))
                parts.append(None)
                continue
            except OSError as error:  # see `inference.wire.shared_memory`
                rows = len(next(iter(request.data.values())))
                failures[index] = (rows, RowReport(Status.UNSHARED, f"{type(error).__name__}: {error}"))
                parts.append(None)
                continue
            parts.append(part)
            groups.setdefault(_group_key(part), []).append(index)
        for members in groups.values():
            group = [part for part in (parts[index] for index in members) if part is not None]
            started = time.perf_counter_ns()
            outcome = await self._run_group(group)
            if len(groups) > 1:  # the next group's call may reuse the memory of these outputs
                outcome = _Outcome(_copied(outcome.outputs), outcome.reports)
            compute_us = (time.perf_counter_ns() - started) // 1000
            start = 0
            for index, part in zip(members, group, strict=True):
                end = start + part.rows
                piece = _Outcome(
                    {name: array[start:end] for name, array in outcome.outputs.items()}, outcome.reports[start:end]
                )
                answers[index] = self._answer(piece, compute_us, part.memory, is_merged=start > 0)
                start = end
        for index, (rows, report) in failures.items():
            answers[index] = self._answer(_Outcome(self._blank(rows), [report] * rows), 0)
        return answers

    def _turn_grad_off(self) -> None:
        # Gradient mode is per thread, and PyTriton calls us in a thread of its own.
        if not self._grad_off and "torch" in sys.modules:
            sys.modules["torch"].set_grad_enabled(False)
            self._grad_off = True

    async def _run_group(self, group: Sequence[Part]) -> _Outcome:
        """Run parts that may share a call."""
        first = group[0]
        if len(group) == 1:
            inputs, per_row = first.inputs, first.row_parameters
        else:
            inputs = {name: np.concatenate([part.inputs[name] for part in group]) for name in first.inputs}
            per_row = {name: [v for part in group for v in part.row_parameters[name]] for name in first.row_parameters}
        rows = sum(part.rows for part in group)
        batch = _Batch(inputs, first.batch_parameters, per_row, first.note.warmup)
        isolation = Isolation(functools.partial(self._call, batch), self._errors, may_split=self._signature.idempotent)
        outputs = await isolation.run(rows, functools.partial(self._join, rows))
        reports = [RowReport(Status.OK)] * rows
        for row, report in isolation.failures.items():
            reports[row] = report
        return _Outcome(outputs, reports)

    async def _call(self, batch: _Batch, rows: list[int], is_retry: bool) -> _Piece:
        if batch.is_warmup:
            self.warmups += 1
        elif is_retry:
            self.retries += 1
        else:
            self.calls += 1
        arguments: dict[str, Any] = {}
        for spec in self._signature.inputs:
            array = batch.inputs.get(spec.name)
            # A copy, because the callable may write into it and the rows may be needed again.
            if array is not None:
                array = argument(
                    spec, array.copy() if len(rows) == len(array) else array[rows], self._model.arrays, self._device
                )
            arguments[spec.name] = array
        if self._takes_parameters:
            per_row = {name: [values[row] for row in rows] for name, values in batch.row_parameters.items()}
            arguments["parameters"] = {**batch.parameters, **per_row}
        with self._watch():
            result = self._model(**arguments)
            if self._is_async or inspect.isawaitable(result):
                result = await result
        outputs = self._check(result, len(rows))
        # A copy, because a later call may reuse the memory.
        return rows, _copied(outputs) if is_retry else outputs

    def _check(self, result: object, rows: int) -> Arrays:
        """Check the callable's result against its declarations, and convert it to wire form.

        Raises:
            BadOutput: they differ; the message names the tensor, the expected and the actual.
        """
        kind = type(self._model).__name__
        if not isinstance(result, Mapping):
            raise BadOutput(f"{kind} returned {type(result).__name__}, expected a dict of output name to array")
        declared = [spec.name for spec in self._signature.outputs]
        for name in result:
            if name not in declared:
                raise BadOutput(f"{kind} returned an output {name!r}, expected {', '.join(declared)}")
        outputs: Arrays = {}
        for spec in self._signature.outputs:
            if spec.name not in result:
                raise BadOutput(f"{kind} returned no output {spec.name!r}, expected {', '.join(declared)}")
            outputs[spec.name] = wire(spec, result[spec.name], rows)
        return outputs

    def _join(self, rows: int, pieces: Sequence[_Piece]) -> Arrays:
        """One array of all rows for each output; zeros where a row is in no piece.

        Raises:
            RaggedPieces: the pieces' shapes differ.
        """
        if len(pieces) == 1 and len(pieces[0][0]) == rows:
            return pieces[0][1]
        if not pieces:
            return self._blank(rows)
        joined: Arrays = {}
        for spec in self._signature.outputs:
            tails = {outputs[spec.name].shape[1:] for _, outputs in pieces}
            if len(tails) > 1:
                raise RaggedPieces
            joined[spec.name] = array = zeros(spec, (rows, *tails.pop()))
            for members, outputs in pieces:
                array[members] = outputs[spec.name]
        return joined

    def _answer(
        self, outcome: _Outcome, compute_us: int, memory: MappedCall | None = None, *, is_merged: bool = False
    ) -> Arrays:
        """Outputs and report as sent to Triton. Outputs without elements, whose shape is in the report, and outputs in
        shared memory are replaced with placeholders."""
        outputs = dict(outcome.outputs)
        reports = outcome.reports
        if memory is not None:
            left = memory.leave(outputs)
            for spec in self._signature.outputs:
                if spec.name in left:
                    outputs[spec.name] = zeros(spec, tuple(stand_in_shape(spec, len(reports))))
        empty = {spec.name: outputs[spec.name].shape for spec in self._signature.outputs if not outputs[spec.name].size}
        if empty:
            for spec in self._signature.outputs:
                if spec.name in empty:
                    outputs[spec.name] = zeros(spec, tuple(placeholder_shape(len(reports), spec.shape)))
            text = msgspec.json.encode(empty).decode()
            reports = [RowReport(Status.OK, text) if report.status is Status.OK else report for report in reports]
        outputs[REPORT] = encode_reports(reports, compute_us, is_merged=is_merged)
        return outputs

    def _blank(self, rows: int) -> Arrays:
        return {spec.name: zeros(spec, tuple(placeholder_shape(rows, spec.shape))) for spec in self._signature.outputs}


class _Batch(NamedTuple):
    """Rows that may share a call. The arrays are read only."""

    inputs: Arrays
    parameters: dict[str, Any]
    row_parameters: dict[str, list[Any]]
    is_warmup: bool


def _copied(outputs: Arrays) -> Arrays:
    return {name: array.copy() for name, array in outputs.items()}


def _group_key(part: Part) -> object:
    if part.note.alone:
        return id(part)
    shapes = tuple((name, array.shape[1:]) for name, array in part.inputs.items())
    return shapes, tuple(part.batch_parameters.items())
