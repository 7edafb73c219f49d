"""Decode steps as CUDA graphs: the kernels of a step are recorded once and then launched together.

A step of a few sequences is short: launching its kernels separately takes the CPU longer than computing them takes the
GPU.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headwater.lm.slot_cache import SlotCache
from headwater.runtime.failure_log import text_of

__all__ = ["DecodeGraphs", "Record", "Recording", "StepInputs", "recorder_of"]

logger = logging.getLogger(__name__)

GRAPHS: Final = 64
"""The most entries of `DecodeGraphs._graphs`; the least recently used entry is dropped."""
EACH_ROWS: Final = (1, 2, 4)
"""Numbers of rows are rounded up to the next of these numbers; larger numbers, to a multiple of `ROWS`."""
ROWS: Final = 8
TOKENS: Final = 256
"""Lengths are rounded up to a multiple of this, or of an eighth of the next power of two if that is larger."""


class Recording(NamedTuple):
    """A recorded computation."""

    repeat: Callable[[], object]
    """Repeats the computation with the present content of the inputs' memory."""
    result: Tensor
    """The result. Each repeat of a recording of the same `Record` overwrites it."""


Record: TypeAlias = Callable[[Callable[[], Tensor]], Recording]
"""Records a computation that reads and writes the same memory each time, and that has run before. All recordings of a
`Record` share the memory for intermediate results."""


class StepInputs(NamedTuple):
    """The inputs of a decode step, int64 [rows] each."""

    rows: Tensor
    """The cache's rows: 0, 1, 2, ..."""
    tokens: Tensor
    """The new token of each row."""
    cached: Tensor
    """Each row's number of cached tokens, after which the new token is written; `SlotCache.spare_token` for a row
    without a sequence."""
    positions: Tensor
    """The new token's position for the model."""


Step: TypeAlias = Callable[[SlotCache, StepInputs, int], Tensor]
"""Computes logits [rows, vocab]; the integer is the number of tokens that are read of each row of the cache."""


class DecodeGraphs:
    """Computes decode steps with CUDA graphs.

    A graph is valid for a number of rows and a number of tokens that each row reads, so both numbers are rounded up.
    Rows beyond the sequences write to the cache's spare token, which no row reads. The first step of a size is computed
    kernel by kernel, the second is recorded. When the cache is reallocated, its graphs are dropped.

    Args:
        step: computes a step.
        recorder: makes a `Record` for the graphs of a cache's present memory.
        device: the model's device.
    """

    def __init__(self, step: Step, recorder: Callable[[], Record], device: torch.device) -> None:
        self._step = step
        self._recorder = recorder
        self._device = device
        self._can_record = True
        self._record: Record
        """Records the graphs in `_graphs`."""
        self._first: Recording | None = None
        """The first recording. It is kept as long as the other graphs, because torch can't reuse their memory once no
        graph is left."""
        self._inputs: dict[int, Tensor] = {}
        """Memory of the inputs by number of rows: int64 [4, rows], in the order of `StepInputs`."""
        self._buffers: object = None
        """`SlotCache.buffers` of the cache that the graphs use."""
        self._graphs: OrderedDict[tuple[int, int], Recording | None] = OrderedDict()
        """Graphs by rows and length; None: a step was computed once, kernel by kernel."""

    def run(
        self, cache: SlotCache, tokens: Sequence[int], cached: Sequence[int], positions: Sequence[int]
    ) -> Tensor | None:
        """Compute a step.

        Args:
            cache: the keys and values, with a spare token.
            tokens: the new token of each sequence, in the cache's first rows.
            cached: each sequence's number of cached tokens.
            positions: each new token's position for the model.

        Returns:
            Logits [sequences, vocab], overwritten by the next call; None if steps can't be recorded.
        """
        if not self._can_record:
            return None
        if cache.buffers is not self._buffers:
            self._graphs.clear()
            self._record, self._first = self._recorder(), None
            self._buffers = cache.buffers
        count = len(tokens)
        rows = min(_padded_rows(count), cache.shape[0])
        length = min(_padded_length(max(cached) + 1), cache.shape[1])
        compute = partial(self._step, cache, self._set(rows, cache, tokens, cached, positions), length)
        if (rows, length) not in self._graphs:
            logits = compute()
            self._graphs[rows, length] = None
            if len(self._graphs) > GRAPHS:
                self._graphs.popitem(last=False)
            return logits[:count]
        recording = self._graphs[rows, length]
        if recording is None:
            try:
                recording = self._graphs[rows, length] = self._record(compute)
            except Exception as error:
                self._give_up(error)
                return None
            self._first = self._first or recording
        self._graphs.move_to_end((rows, length))
        recording.repeat()
        return recording.result[:count]

    def _set(
        self, rows: int, cache: SlotCache, tokens: Sequence[int], cached: Sequence[int], positions: Sequence[int]
    ) -> StepInputs:
        """Write a step's inputs into the memory that graphs for this number of rows read."""
        extra = rows - len(tokens)
        columns = [
            [*range(rows)],
            [*tokens, *[0] * extra],
            [*cached, *[cache.spare_token] * extra],
            [*positions, *[0] * extra],
        ]
        if rows not in self._inputs:
            self._inputs[rows] = torch.zeros(4, rows, dtype=torch.int64, device=self._device)
        return StepInputs(*self._inputs[rows].copy_(torch.tensor(columns)))

    def _give_up(self, error: Exception) -> None:
        self._can_record, self._first = False, None
        self._graphs.clear()
        reason = f"{type(error).__name__}: {text_of(error)[:300]}"
        logger.warning("decode steps are launched kernel by kernel, since CUDA can't record them: %s", reason)


def recorder_of(device: torch.device) -> Callable[[], Record] | None:
    """A function that makes a `Record` for a GPU; None for a device that has no graphs."""
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda  # torch declares no types for streams
    return partial(_cuda_record, cuda.Stream(device))


def _cuda_record(stream: Any) -> Record:
    cuda: Any = torch.cuda
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # The outer context restores the current stream even if the recording fails. With the mode thread_local, other
        # threads may use the GPU during the recording.
        with (
            cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = compute()
        return Recording(graph.replay, result)

    return record


def _padded_rows(count: int) -> int:
    return next((rows for rows in EACH_ROWS if count <= rows), -(-count // ROWS) * ROWS)


def _padded_length(length: int) -> int:
    """The length rounded up to a multiple of `TOKENS`; a long length grows by at most a fourth."""
    multiple = max(TOKENS, (1 << (length - 1).bit_length()) // 8)
    return -(-length // multiple) * multiple
