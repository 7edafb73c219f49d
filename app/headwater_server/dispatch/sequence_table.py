"""The open sequences of all deployments, and which replica has a sequence, in a table that all workers share.

Source: Triton's sequence extension.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import os
import struct
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from headwater_server.errors import BadRequest, DeadlineExceeded, QueueFull
from headwater_server.file_lock import briefly_locked

__all__ = ["SEQUENCES", "SequenceRequest", "SequenceTable"]

SEQUENCES: Final = "sequences"
"""The table's file in the server's folder."""
IDLE_S: Final = 3600.0
"""Seconds after its last request in which a sequence is kept, if its place is wanted."""
BUCKETS: Final = 16_384
WAYS: Final = 32
"""Places in a bucket. 100,000 sequences leave no bucket full."""
_ENTRY: Final = struct.Struct("<16s8sQdQ")
"""A sequence: its digest, its replica's, the number of its steps, the time of its last request, and the process id of
the worker that sends a request of it now. All zero: free."""
TURN_EVERY_S: Final = 0.002
"""Time between two looks whether another worker has the answer to the request before."""
_FREE: Final = bytes(16)


class SequenceRequest(NamedTuple):
    """What a request says of its sequence."""

    model: str
    id: int | str
    is_start: bool
    is_end: bool
    has_state: bool
    """Whether the sequence's states are kept outside the model, so that any replica can take its next request."""


class _SequencePlace(NamedTuple):
    """A sequence in the table."""

    offset: int
    replica: bytes
    steps: int
    holder: int


class SequenceTable:
    """The open sequences of all deployments, shared by all workers of a server.

    Args:
        path: the table's file, created if missing; None: this process has the table alone.
        clock: returns the time in seconds; all workers must use the same clock.
        pid: this worker's process id; default: this process's.
    """

    def __init__(
        self, path: Path | None = None, clock: Callable[[], float] = time.monotonic, pid: int | None = None
    ) -> None:
        self._clock = clock
        self._pid = pid or os.getpid()
        size = BUCKETS * WAYS * _ENTRY.size
        if path is None:
            self._handle = os.memfd_create("sequences", os.MFD_CLOEXEC)
        else:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        weakref.finalize(self, os.close, self._handle)
        if os.fstat(self._handle).st_size < size:
            os.ftruncate(self._handle, size)
        self._cells = mmap.mmap(self._handle, size)
        self._turns: weakref.WeakValueDictionary[bytes, asyncio.Lock] = weakref.WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def turn(self, deployment: str, request: SequenceRequest, timeout_s: float) -> AsyncIterator[None]:
        """A context in which no other request of a sequence is sent, by any worker.

        Raises:
            DeadlineExceeded: the requests before took longer than ``timeout_s``.
        """
        digest = _digest(deployment, request)
        lock = self._turns.setdefault(digest, asyncio.Lock())
        try:
            with anyio.fail_after(timeout_s):
                await lock.acquire()
        except TimeoutError:
            raise _late(request, timeout_s) from None
        try:
            give_up_s = time.monotonic() + timeout_s
            while not self._take(digest, request):  # another process has it
                if time.monotonic() > give_up_s:
                    raise _late(request, timeout_s)
                await asyncio.sleep(TURN_EVERY_S)
            try:
                yield
            finally:
                self._leave(digest)
        finally:
            lock.release()

    def _take(self, digest: bytes, request: SequenceRequest) -> bool:
        """Note that this worker has the turn, of a sequence that is to begin, too. Returns False if another has it."""
        with briefly_locked(self._handle):
            place = self._find(digest)
            if place is None:
                if request.is_start and (offset := self._free(digest)) is not None:
                    self._write(offset, digest, _FREE[:8], 0, self._pid)
                return True
            if place.holder not in (0, self._pid) and _is_alive(place.holder):
                return False
            self._write(place.offset, digest, place.replica, place.steps, self._pid)
            return True

    def _leave(self, digest: bytes) -> None:
        with briefly_locked(self._handle):
            place = self._find(digest)
            if place is None or place.holder != self._pid:
                return
            if place.steps:
                self._write(place.offset, digest, place.replica, place.steps, 0)
            else:  # it didn't begin
                self._cells[place.offset : place.offset + _ENTRY.size] = bytes(_ENTRY.size)

    def begin(self, deployment: str, request: SequenceRequest, replica: str) -> None:
        """Note that a sequence begins, or begins anew, at a replica.

        Raises:
            QueueFull: there are too many sequences.
        """
        digest = _digest(deployment, request)
        with briefly_locked(self._handle):
            place = self._find(digest)
            offset = self._free(digest) if place is None else place.offset
            if offset is None:
                raise QueueFull(
                    f"model `{request.model}`: too many sequences were begun and not ended; end them by sequence_end",
                    retry_after_s=1,
                )
            self._write(offset, digest, _short(replica), 1, self._pid if request.has_state else 0)

    def replica_of(self, deployment: str, request: SequenceRequest, replicas: Mapping[str, Any]) -> str | None:
        """The id of the replica that has a sequence; None: that replica isn't among ``replicas``.

        Raises:
            BadRequest: the sequence has not begun, has ended, or was idle for too long.
        """
        with briefly_locked(self._handle):
            place = self._known(deployment, request)
        return next((id for id in replicas if _short(id) == place.replica), None)

    def step(self, deployment: str, request: SequenceRequest, replica: str) -> int:
        """Note a further request of a sequence at a replica. Returns the request's number in the sequence, from 1.
        Raises as `replica_of`."""
        with briefly_locked(self._handle):
            place = self._known(deployment, request)
            digest = _digest(deployment, request)
            self._write(place.offset, digest, _short(replica), place.steps + 1, place.holder)
            return place.steps + 1

    def move(self, deployment: str, request: SequenceRequest, replica: str) -> None:
        """Note that another replica has a sequence, without a further request. Raises as `replica_of`."""
        with briefly_locked(self._handle):
            place = self._known(deployment, request)
            digest = _digest(deployment, request)
            self._write(place.offset, digest, _short(replica), place.steps, place.holder)

    def take_back(self, deployment: str, request: SequenceRequest, number: int) -> None:
        """Note that a sequence's last request, which has this number, was not answered: the next has its number."""
        digest = _digest(deployment, request)
        with briefly_locked(self._handle):
            place = self._find(digest)
            if place is not None and place.steps == number:
                self._write(place.offset, digest, place.replica, number - 1, place.holder)

    def end(self, deployment: str, request: SequenceRequest) -> None:
        """Forget a sequence."""
        with briefly_locked(self._handle):
            if (place := self._find(_digest(deployment, request))) is not None:
                self._cells[place.offset : place.offset + _ENTRY.size] = bytes(_ENTRY.size)

    def _known(self, deployment: str, request: SequenceRequest) -> _SequencePlace:
        place = self._find(_digest(deployment, request))
        if place is None:
            raise BadRequest(
                f"inference request for sequence {request.id} to model '{request.model}' must specify the START flag "
                "on the first request of the sequence",
                field="parameters.sequence_start",
            )
        return place

    def _find(self, digest: bytes) -> _SequencePlace | None:
        bucket = _bucket(digest)
        offset = self._cells.find(digest, bucket.start, bucket.stop)
        if offset < 0:
            return None
        _, replica, steps, _, holder = _ENTRY.unpack_from(self._cells, offset)
        return _SequencePlace(offset, replica, steps, holder)

    def _free(self, digest: bytes) -> int | None:
        """The offset of a free place, or of the sequence that was idle longest, if that was too long."""
        oldest, oldest_s = -1, self._clock() - IDLE_S
        for offset in _bucket(digest):
            found, _, _, used_s, _ = _ENTRY.unpack_from(self._cells, offset)
            if found == _FREE:
                return offset
            if used_s < oldest_s:
                oldest, oldest_s = offset, used_s
        return None if oldest < 0 else oldest

    def _write(self, offset: int, digest: bytes, replica: bytes, steps: int, holder: int) -> None:
        _ENTRY.pack_into(self._cells, offset, digest, replica, steps, self._clock(), holder)


def _late(request: SequenceRequest, timeout_s: float) -> DeadlineExceeded:
    text = f"the deadline of {timeout_s:g} s passed while an earlier request of sequence {request.id} was computed"
    return DeadlineExceeded(text)


def _bucket(digest: bytes) -> range:
    start = int.from_bytes(digest[:4], "little") % BUCKETS * WAYS * _ENTRY.size
    return range(start, start + WAYS * _ENTRY.size, _ENTRY.size)


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _digest(deployment: str, request: SequenceRequest) -> bytes:
    text = f"{deployment}\0{request.model}\0{type(request.id).__name__}\0{request.id}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _short(replica: str) -> bytes:
    return hashlib.blake2b(replica.encode(), digest_size=8).digest()
