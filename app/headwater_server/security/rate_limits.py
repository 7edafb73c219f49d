"""Rate limits of API keys over all workers of a server (on a cluster: of a gateway): requests per second, requests at
once, tokens per minute.

Each key with limits has a small file that all workers map into memory. So a client with a single connection, which
reaches a single worker, gets everything that its key allows, and not only a worker's share of it.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from headwater_server.errors import RateLimited
from headwater_server.file_lock import briefly_locked
from headwater_server.security.keys import Key

__all__ = ["KeyLimits", "LimitFiles"]

_REQUESTS_FULL, _TOKENS_FULL, _FIRST_WORKER = 0, 1, 2
"""Indexes of a file's cells. The first two cells hold the times, on the monotonic clock, at which the buckets will be
full; a bucket has no other state. Each further cell holds a worker's number of requests in flight."""


class KeyLimits:
    """The usage of one key, shared by all workers.

    A request is admitted with `enter`, and ends with `leave`. There are two token buckets: a second's worth of
    requests, but at least a single request; and a minute's worth of language-model tokens. Tokens are counted after
    use, since an answer's length is not known before: the bucket may be overdrawn, and then `check_tokens` refuses
    requests to language models until it has recovered.

    Args:
        key: the key.
        path: the key's file; created if missing.
        worker: this worker's index, from 0.
        workers: the number of workers.
        clock: returns the time in seconds; all workers must use the same clock.
    """

    def __init__(
        self, key: Key, path: Path, worker: int, workers: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.key = key
        self._clock = clock
        self._own = _FIRST_WORKER + worker
        self._end = _FIRST_WORKER + workers
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._handle)
        size = 8 * self._end
        if os.fstat(self._handle).st_size < size:
            os.ftruncate(self._handle, size)
        self._cells = memoryview(mmap.mmap(self._handle, size)).cast("d")
        self._cells[self._own] = 0  # discard the count of an earlier worker with this index

    def enter(self) -> None:
        """Admit a request by the limits ``concurrent`` and ``requests_per_second``.

        Raises:
            RateLimited: a limit is reached; the error says when to retry.
        """
        key = self.key
        with briefly_locked(self._handle):  # without the lock, a request may exceed the limit
            cells = self._cells
            if key.concurrent is not None:
                under_way = int(sum(cells[_FIRST_WORKER : self._end]))
                if under_way >= key.concurrent:
                    raise _refusal(f"at most {key.concurrent} requests at once (concurrent)", 1)
            if key.requests_per_second is not None:
                now, rate = self._clock(), key.requests_per_second
                full = max(now, cells[_REQUESTS_FULL])
                wait_s = full + 1 / rate - now - max(1.0, 1 / rate)
                if wait_s > 1e-9:
                    raise _refusal(f"at most {rate:g} requests a second (requests_per_second)", wait_s)
                cells[_REQUESTS_FULL] = full + 1 / rate
            cells[self._own] += 1

    def leave(self) -> None:
        """End an admitted request. Needs no lock: no other worker writes this cell."""
        self._cells[self._own] -= 1

    def check_tokens(self) -> None:
        """Check that tokens are left.

        Raises:
            RateLimited: no tokens are left; the error says when to retry.
        """
        per_minute = self.key.tokens_per_minute
        if per_minute is None:
            return
        wait_s = self._cells[_TOKENS_FULL] - self._clock() - 60
        if wait_s >= 0:
            raise _refusal(f"at most {per_minute} tokens a minute (tokens_per_minute)", wait_s)

    def spend_tokens(self, count: int) -> None:
        """Count tokens that were used."""
        per_minute = self.key.tokens_per_minute
        if per_minute is None or not count:
            return
        with briefly_locked(self._handle):
            full = max(self._clock(), self._cells[_TOKENS_FULL])
            self._cells[_TOKENS_FULL] = full + count * 60 / per_minute


class LimitFiles:
    """The limits of all keys that have limits.

    Args:
        folder: the folder of the files, shared by all workers of the server; created if missing.
        worker: this worker's index.
        workers: the number of workers.
    """

    def __init__(self, folder: Path, worker: int, workers: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._worker = worker
        self._workers = workers
        # Requests in flight hold references to their key's limits, so a key that is removed and added again still has
        # their count.
        self._open: weakref.WeakValueDictionary[str, KeyLimits] = weakref.WeakValueDictionary()

    def of(self, key: Key) -> KeyLimits | None:
        """The limits of a key; None if the key is unlimited."""
        if not key.is_limited:
            return None
        limits = self._open.get(key.sha256)
        if limits is None:
            # A prefix of the hash suffices as file name, and reveals less.
            limits = KeyLimits(key, self._folder / key.sha256[:32], self._worker, self._workers)
            self._open[key.sha256] = limits
        else:
            limits.key = key  # its limits may have changed
        return limits


def _refusal(expected: str, wait_s: float) -> RateLimited:
    return RateLimited(f"API key: expected {expected}, got more; retry later", retry_after_s=max(1, math.ceil(wait_s)))
