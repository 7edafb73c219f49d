"""A fused replica's cache of a step's output rows, on the step's device, keyed by the inputs of each row."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.datatypes import pack_bytes
from headwater.pipeline import PlannedStep
from headwater.runtime.step import Given, Made, Step
from headwater.runtime.values import copied, joined, settled
from headwater.wire.arrays import Array
from headwater.wire.frame import CacheCount

__all__ = ["FeatureCache"]

ROW_BYTES: Final = 1024
"""Upper bound of the memory that Python and torch take for a row, without its data."""
THREAD_BYTES: Final = 256 * 1024
"""Inputs from this size on are hashed in a thread, because hashing them takes a quarter of a millisecond."""


class _CachedRow(NamedTuple):
    values: Mapping[str, Any]
    """Values by output, with a batch axis of 1."""
    size_bytes: int
    """Memory of the values, and `ROW_BYTES`."""
    ends_s: float
    """Time from which the row isn't used, on the clock of `time.monotonic`; infinite without a limit."""


class FeatureCache:
    """Caches rows up to a number of bytes, and evicts the least recently used rows first.

    Rows are independent, as everywhere, so only the rows of a batch that are not cached are computed. Where a dimension
    of the outputs varies, rows can be joined only if the dimension is equal in all of them. Then cached rows are used
    only if the whole batch is cached with equal shapes.

    Args:
        planned: the step, with its ``cache``; it reads only the pipeline's inputs.
    """

    def __init__(self, planned: PlannedStep) -> None:
        assert planned.spec.cache is not None
        self._spec = planned.spec.cache
        self._parameters = [(parameter.name, parameter.per) for parameter in planned.signature.parameters]
        self._varies = any(dim < 0 for tensor in planned.signature.outputs for dim in tensor.shape)
        self._rows: OrderedDict[bytes, _CachedRow] = OrderedDict()
        self._secret = secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE)
        self._size_bytes = 0
        self._count = CacheCount()

    def counted(self) -> CacheCount:
        """The counts since the last call of this method, and the memory of all cached rows now."""
        count, self._count = self._count, CacheCount()
        count.size_bytes = self._size_bytes
        return count

    async def run(self, step: Step, step_input: Given) -> Made:
        """Like `Step.run`, with cached rows. Callers make one call at a time. A warm-up doesn't use the cache."""
        if step_input.is_warmup:
            return await step.run(step_input)
        if sum(array.nbytes for array in step_input.inputs.values()) < THREAD_BYTES:
            keys = self._keys(step_input)
        else:
            keys = await asyncio.to_thread(self._keys, step_input)
        cached_rows = [self._get(key) for key in keys]
        if self._varies and not _fit(cached_rows):
            cached_rows = [None] * len(cached_rows)
        missing = [row for row, cached in enumerate(cached_rows) if cached is None]
        self._count.hits += step_input.rows - len(missing)
        self._count.misses += len(missing)
        if len(missing) == step_input.rows:
            step_result = await step.run(step_input)
            self._keep([keys[row] for row in step_result.good], step_result)
            return step_result
        step_result = Made()
        if missing:
            step_result = await step.run(_part(step_input, missing))
            self._keep([keys[missing[row]] for row in step_result.good], step_result)
        return _completed(step_result, missing, cached_rows)

    def _keys(self, step_input: Given) -> list[bytes]:
        """The cache key of each row: a digest of everything that the row's outputs depend on.

        The digest uses a secret key, because a client who could make two rows with the same digest could read another
        client's features.
        """
        inputs = sorted(step_input.inputs.items())
        batch = [(name, step_input.parameters[name]) for name, per in self._parameters if per == "batch"]
        per_row = [(name, step_input.row_parameters[name]) for name, per in self._parameters if per == "row"]
        shapes = [(name, str(array.dtype), array.shape[1:]) for name, array in inputs]
        keys = []
        for row in range(step_input.rows):
            owner = step_input.owners[row] if self._spec.per_key and step_input.owners else ""
            parts = [_bytes(array[row : row + 1]) for _, array in inputs]
            row_values = [(name, values[row]) for name, values in per_row]
            head = repr((owner, shapes, batch, row_values, [len(part) for part in parts])).encode()
            digest = hashlib.blake2b(b"%d:" % len(head), digest_size=32, key=self._secret)
            for part in (head, *parts):
                digest.update(part)
            keys.append(digest.digest())
        return keys

    def _get(self, key: bytes) -> _CachedRow | None:
        row = self._rows.get(key)
        if row is None:
            return None
        if row.ends_s < time.monotonic():
            self._drop(key)
            return None
        self._rows.move_to_end(key)
        return row

    def _keep(self, keys: Sequence[bytes], step_result: Made) -> None:
        ends_s = time.monotonic() + self._spec.ttl_s if self._spec.ttl_s else float("inf")
        for place, key in enumerate(keys):
            values = {name: value[place : place + 1] for name, value in step_result.values.items()}
            size_bytes = ROW_BYTES + sum(_size_bytes(value) for value in values.values())
            self._drop(key)
            if size_bytes > self._spec.max_bytes:
                continue
            self._size_bytes += size_bytes
            while self._size_bytes > self._spec.max_bytes:
                self._drop(next(iter(self._rows)))
                self._count.evictions += 1
            # A copy: a head may write into its input, and a row would keep the memory of its whole batch.
            self._rows[key] = _CachedRow({name: copied(value) for name, value in values.items()}, size_bytes, ends_s)

    def _drop(self, key: bytes) -> None:
        row = self._rows.pop(key, None)
        if row is not None:
            self._size_bytes -= row.size_bytes


def _bytes(array: Array) -> bytes:
    return pack_bytes(array.ravel().tolist()) if array.dtype.hasobject else array.tobytes()


def _size_bytes(value: Any) -> int:
    texts = value.ravel().tolist() if isinstance(value, np.ndarray) and value.dtype.hasobject else ()
    size_bytes: int = value.nbytes + sum(map(sys.getsizeof, texts))
    return size_bytes


def _fit(cached_rows: Sequence[_CachedRow | None]) -> bool:
    """Whether all rows are cached, and their values can be joined."""
    shapes = [None if row is None else {name: value.shape for name, value in row.values.items()} for row in cached_rows]
    return None not in shapes and all(row_shapes == shapes[0] for row_shapes in shapes)


def _part(step_input: Given, rows: Sequence[int]) -> Given:
    """The arguments of some of the rows."""
    return step_input._replace(
        inputs={name: array[list(rows)] for name, array in step_input.inputs.items()},
        rows=len(rows),
        row_parameters={name: [values[row] for row in rows] for name, values in step_input.row_parameters.items()},
        owners=[step_input.owners[row] for row in rows] if step_input.owners else (),
    )


def _completed(step_result: Made, missing: Sequence[int], cached_rows: Sequence[_CachedRow | None]) -> Made:
    """The result for all rows: the computed result of the missing rows together with the cached rows."""
    places = {missing[row]: place for place, row in enumerate(step_result.good)}
    good = [row for row, cached in enumerate(cached_rows) if cached is not None or row in places]

    def value(row: int, name: str) -> Any:
        cached = cached_rows[row]
        return step_result.values[name][places[row] : places[row] + 1] if cached is None else cached.values[name]

    names = next(cached.values for cached in cached_rows if cached is not None)
    # Copy even a single row: a head may write into its input.
    values = {
        name: settled(joined([value(row, name) for row in good]) if len(good) > 1 else copied(value(good[0], name)))
        for name in names
    }
    step_result.failures = {missing[row]: report for row, report in step_result.failures.items()}
    step_result.good, step_result.values = good, values
    return step_result
