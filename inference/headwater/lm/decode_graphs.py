"""Decode steps as CUDA graphs: the kernels of a step are recorded once and then launched together.

A step of a few sequences is short, so a processor that launches each of its kernels takes longer than the GPU computes.
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
"""The most graphs that are kept; the longest unused is dropped."""
EACH_ROWS: Final = (1, 2, 4)
"""Numbers of rows that have graphs; more are rounded up to a multiple of `ROWS`."""
ROWS: Final = 8
TOKENS: Final = 256
"""Lengths are rounded up to a multiple of this, and of an eighth of the next power of two."""


class Recording(NamedTuple):
    """A recorded computation."""

    repeat: Callable[[], object]
    """Computes it again, from what its inputs' memory holds now."""
    result: Tensor
    """Overwritten by each repeat of a recording of the same `Record`."""


Record: TypeAlias = Callable[[Callable[[], Tensor]], Recording]
"""Records a computation that reads and writes the same memory each time; it has been computed before. All recordings
of a `Record` share the memory of what is computed on the way."""


class StepInputs(NamedTuple):
    """The inputs of a decode step, int64 [rows] each."""

    rows: Tensor
    """The cache's rows: 0, 1, 2, ..."""
    tokens: Tensor
    """The new token of each row."""
    cached: Tensor
    """Each row's number of cached tokens: the new one is written behind them."""
    positions: Tensor
    """The new token's position for the model."""


Step: TypeAlias = Callable[[SlotCache, StepInputs, int], Tensor]
"""Computes logits [rows, vocab] with a cache of which so many tokens of each row are read."""


class DecodeGraphs:
    """Computes decode steps by graphs.

    A graph is of a number of rows and of tokens that each row reads, so both are rounded up. Rows beyond the sequences
    write to the cache's spare token, which no row reads. The first step of a size is computed kernel by kernel, the
    second is recorded. A cache that was reallocated has new graphs.

    Args:
        step: computes a step.
        recorder: makes a `Record` for the graphs of a cache's present memory.
        device: the model's.
    """

    def __init__(self, step: Step, recorder: Callable[[], Record], device: torch.device) -> None:
        self._step = step
        self._recorder = recorder
        self._device = device
        self._can_record = True
        self._record: Record
        """Of the graphs that are kept."""
        self._first: Recording | None = None
        """Kept with them, because torch can't use their memory again once none of them is left."""
        self._inputs: dict[int, Tensor] = {}
        """int64 [4, rows], as `StepInputs`, by rows."""
        self._buffers: object = None
        """`SlotCache.buffers` of the graphs."""
        self._graphs: OrderedDict[tuple[int, int], Recording | None] = OrderedDict()
        """By rows and length; None: computed once, kernel by kernel."""

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
        """Write a step's inputs into the memory that the graphs of so many rows read."""
        extra = rows - len(tokens)
        given = [
            [*range(rows)],
            [*tokens, *[0] * extra],
            [*cached, *[cache.spare_token] * extra],
            [*positions, *[0] * extra],
        ]
        if rows not in self._inputs:
            self._inputs[rows] = torch.zeros(4, rows, dtype=torch.int64, device=self._device)
        return StepInputs(*self._inputs[rows].copy_(torch.tensor(given)))

    def _give_up(self, error: Exception) -> None:
        self._can_record, self._first = False, None
        self._graphs.clear()
        reason = f"{type(error).__name__}: {text_of(error)[:300]}"
        logger.warning("decode steps are launched kernel by kernel, since CUDA can't record them: %s", reason)


def recorder_of(device: torch.device) -> Callable[[], Record] | None:
    """What makes a `Record` for a GPU; None for a device that has no graphs."""
    if device.type != "cuda":
        return None
    cuda: Any = torch.cuda  # its streams have no types
    return partial(_cuda_record, cuda.Stream(device))


def _cuda_record(stream: Any) -> Record:
    cuda: Any = torch.cuda
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # The outer context returns to the stream that was current even if the recording fails. Other threads may use
        # the GPU meanwhile.
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
    """A multiple of `TOKENS`, at most a fourth more than the length if that is long."""
    multiple = max(TOKENS, (1 << (length - 1).bit_length()) // 8)
    return -(-length // multiple) * multiple
