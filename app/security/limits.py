"""What a key's requests may take: per second, at once, and in tokens per minute, over all gateway workers together.

Each key that has limits has a small file that all workers map. So a client gets all that its key allows over one
connection too, which leads to one worker only; with a share for each worker it would get that share.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

from app.errors import RateLimited
from app.security.keys import Key

__all__ = ["KeyLimits", "LimitFiles"]

LOCK_TRIES: Final = 200
"""Some 100 µs: whoever holds a lock for longer is stopped, and requests don't wait for that."""
_REQUESTS_FULL, _TOKENS_FULL, _FIRST_WORKER = 0, 1, 2
"""Places in a file. The first two say when a bucket will be full, on the machine's monotonic clock: that one number is
all its state. From the third on stands how many requests each worker has under way."""


class KeyLimits:
    """What one key's requests take, as all workers see it.

    A request is admitted with `enter`; `leave` follows when it is over. Buckets are token buckets: of requests one
    second's worth, and of tokens one minute's. Tokens are counted when they were used, since nobody knows before how
    many an answer will take: the bucket may be overdrawn, and then nothing is admitted until that is made good.

    Args:
        key: whose.
        path: of its file, to be made if it isn't there.
        worker: which of the workers this is.
        workers: how many there are.
        clock: the time in seconds, the same in all workers.
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
        self._cells[self._own] = 0  # of the worker that was in our place before

    def enter(self) -> None:
        """Admit a request.

        Raises:
            RateLimited: the key has no more; it says when it will.
        """
        key = self.key
        is_locked = self._lock()
        try:
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
        finally:
            if is_locked:
                fcntl.flock(self._handle, fcntl.LOCK_UN)

    def leave(self) -> None:
        """A request that was admitted is over. Nobody else writes where it is counted."""
        self._cells[self._own] -= 1

    def check_tokens(self) -> None:
        """See whether tokens are left.

        Raises:
            RateLimited: none are; it says when some will be.
        """
        per_minute = self.key.tokens_per_minute
        if per_minute is None:
            return
        wait_s = self._cells[_TOKENS_FULL] - self._clock() - 60
        if wait_s >= 0:
            raise _refusal(f"at most {per_minute} tokens a minute (tokens_per_minute)", wait_s)

    def spend_tokens(self, count: int) -> None:
        """Tokens were used."""
        per_minute = self.key.tokens_per_minute
        if per_minute is None or not count:
            return
        is_locked = self._lock()
        try:
            full = max(self._clock(), self._cells[_TOKENS_FULL])
            self._cells[_TOKENS_FULL] = full + count * 60 / per_minute
        finally:
            if is_locked:
                fcntl.flock(self._handle, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        """Keep the other workers out. False: one holds it that doesn't go on; then a request too many may pass."""
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
        return False


class LimitFiles:
    """The limits of all keys that have some.

    Args:
        folder: for the files, of this server and all its workers.
        worker: which of the workers this is.
        workers: how many there are.
    """

    def __init__(self, folder: Path, worker: int, workers: int) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._worker = worker
        self._workers = workers
        # Requests under way keep theirs: a key that is removed and comes back must find what it has under way.
        self._open: weakref.WeakValueDictionary[str, KeyLimits] = weakref.WeakValueDictionary()

    def of(self, key: Key) -> KeyLimits | None:
        """Those of a key, if it has any."""
        if not key.is_limited:
            return None
        found = self._open.get(key.sha256)
        if found is None:
            # Not the whole hash, which would fit a file name: this says no more than it must.
            found = KeyLimits(key, self._folder / key.sha256[:32], self._worker, self._workers)
            self._open[key.sha256] = found
        else:
            found.key = key  # with other limits, perhaps
        return found


def _refusal(expected: str, wait_s: float) -> RateLimited:
    return RateLimited(
        f"API key: expected {expected}, got more; come again later", retry_after_s=max(1, math.ceil(wait_s))
    )
