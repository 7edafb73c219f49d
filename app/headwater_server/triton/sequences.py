"""Sequences of the models of a repository: which replica has which, over all workers.

Source: Triton's sequence extension. A sequence whose model keeps its own state stays with the replica that it began at.
The implicit states of other sequences are kept in files that all replicas of the deployment read
(`headwater.triton.sequence_state`), so that any replica takes their next step.
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

from headwater.wire.sequence_step import MOVED, STEP
from headwater_server.errors import BadRequest, Conflict, QueueFull
from headwater_server.file_lock import briefly_locked

__all__ = ["SequenceRequest", "SequenceTable", "SequenceTurn", "sequence_of"]

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
    """Whether the model has implicit states."""


def sequence_of(model: str, parameters: Mapping[str, Any], *, has_state: bool) -> SequenceRequest | None:
    """What a request's parameters say of its sequence; None: it belongs to none, or Triton refuses it."""
    id = parameters.get("sequence_id")
    if not id or isinstance(id, bool) or not isinstance(id, (int, str)):
        return None
    start, end = parameters.get("sequence_start", False), parameters.get("sequence_end", False)
    return SequenceRequest(model, id, start is True, end is True, has_state)


class _SequencePlace(NamedTuple):
    """A sequence in the table."""

    offset: int
    replica: bytes
    steps: int
    holder: int


class SequenceTable:
    """The sequences of all repositories, shared by all workers of a server.

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
    async def turn(self, deployment: str, request: SequenceRequest) -> AsyncIterator[None]:
        """A context in which no other request of a sequence is sent, by any worker."""
        digest = _digest(deployment, request)
        async with self._turns.setdefault(digest, asyncio.Lock()):
            while not self._take(digest):  # noqa: ASYNC110 - another process has it
                await asyncio.sleep(TURN_EVERY_S)
            try:
                yield
            finally:
                self._leave(digest)

    def _take(self, digest: bytes) -> bool:
        with briefly_locked(self._handle):
            place = self._find(digest)
            if place is None:
                return True
            if place.holder not in (0, self._pid) and _is_alive(place.holder):
                return False
            self._write(place.offset, digest, place.replica, place.steps, self._pid)
            return True

    def _leave(self, digest: bytes) -> None:
        with briefly_locked(self._handle):
            place = self._find(digest)
            if place is not None and place.holder == self._pid:
                self._write(place.offset, digest, place.replica, place.steps, 0)

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


class SequenceTurn:
    """A request of a sequence while it is sent, maybe to several replicas one after another.

    Args:
        table: has the sequences.
        deployment: the name of the deployment.
        request: what the request says of its sequence.
    """

    def __init__(self, table: SequenceTable, deployment: str, request: SequenceRequest) -> None:
        self._table = table
        self._deployment = deployment
        self.request = request
        self._number = 0
        """The request's number in its sequence; 0: not known yet."""
        self._is_moved = False

    def owner(self, replicas: Mapping[str, Any]) -> str | None:
        """The id of the replica that must get the request; None: any replica may.

        Args:
            replicas: the replicas that can be reached, by id.

        Raises:
            BadRequest: see `SequenceTable.replica_of`.
            Conflict: the replica with the sequence has ended, and the sequence's state with it.
        """
        if self.request.is_start:
            return None
        owner = self._table.replica_of(self._deployment, self.request, replicas)
        if owner is None and not self.request.has_state:
            self._table.end(self._deployment, self.request)
            raise Conflict(
                f"sequence {self.request.id} of model `{self.request.model}` is lost: the replica that had its state "
                "has ended; begin it again with sequence_start"
            )
        return owner

    def note(self, replica: str, *, is_owner: bool) -> None:
        """Note the replica that gets the request. Raises as `SequenceTable.begin` and `replica_of`."""
        if self.request.is_start:
            self._table.begin(self._deployment, self.request, replica)
            self._number = 1
            return
        self._is_moved = not is_owner
        if self._number:
            self._table.move(self._deployment, self.request, replica)
        else:
            self._number = self._table.step(self._deployment, self.request, replica)

    def end(self) -> None:
        """Note that the request was answered."""
        if self.request.is_end:
            self._table.end(self._deployment, self.request)

    def give_up(self) -> None:
        """Note that the request was not answered, and so has no effect: the next request of the sequence has its
        number, and starts from the states before it."""
        if self._number:
            self._table.take_back(self._deployment, self.request, self._number)

    @property
    def parameters(self) -> Mapping[str, Any]:
        """What the request's parameters must say beyond what they say already. Triton takes a request of a sequence
        that it doesn't know only as its first."""
        if not self.request.has_state:
            return {}
        moved = {"sequence_start": True, MOVED: True} if self._is_moved else {}
        return {STEP: self._number, **moved}
