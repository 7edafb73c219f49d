"""Memory that a gateway worker shares with the replicas of a deployment, for a call's large tensors.

See `inference.wire.shared_memory` for its purpose and layout.
"""

from __future__ import annotations

import asyncio
import math
import mmap
import os
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from app.codecs.tensors import RawTensor
from inference.datatypes import DATATYPES
from inference.signature import Signature
from inference.wire.shared_memory import ANSWER_HEAD_BYTES, SHARED_FROM_BYTES, SharedCall, aligned, placed_outputs

__all__ = ["Segment", "Segments"]

SMALLEST_BYTES: Final = 256 * 1024
KEPT_BYTES: Final = 64 * 1024 * 1024
"""Bytes of unused segments that a deployment keeps, at most."""
KEPT_FOR_S: Final = 10.0
SLACK_BYTES: Final = 1024
"""Space for aligning the outputs."""


class _File:
    """A segment's file. It lives as long as any view of it, here or in a replica."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        fd = os.memfd_create("headwater", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size_bytes)
        self.map = mmap.mmap(fd, size_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.used_s = 0.0
        self.is_spoiled = False
        self.use: weakref.ref[Any] | None = None
        """The present use; calls back when it ends."""


class Segment:
    """One call's large tensors, in the memory of a file that is reused once no view of it is left."""

    def __init__(self, file: _File, memory: memoryview) -> None:
        self._file = file
        self._memory = memory
        self._inputs: dict[str, tuple[int, list[int]]] = {}
        self._end = 0

    def place(self, name: str, shape: list[int], pieces: Sequence[bytes | memoryview]) -> None:
        """Append a copy of an input."""
        at = self._end
        self._inputs[name] = (at, shape)
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)
        self._end = aligned(at)

    def shared(self) -> SharedCall:
        """The segment's description for the replica, once all inputs are in."""
        self._memory[self._end : self._end + 4] = b"\0\0\0\0"  # no outputs yet
        return SharedCall(self._file.path, len(self._memory), self._inputs, self._end)

    def outputs(self, signature: Signature) -> dict[str, RawTensor]:
        """The outputs that the replica left in the segment: views, by name."""
        found: dict[str, RawTensor] = {}
        datatypes = {spec.name: DATATYPES[spec.datatype] for spec in signature.outputs}
        for name, (offset, shape) in placed_outputs(self._memory, self._end).items():
            datatype = datatypes[name]
            data = self._memory[offset : offset + math.prod(shape) * datatype.size_bytes]
            found[name] = RawTensor(datatype.wire, tuple(shape), data)
        return found

    def spoil(self) -> None:
        """Never reuse the memory: the call failed, and the replica may still write."""
        self._file.is_spoiled = True


class Segments:
    """The segments of one deployment.

    An unused segment is kept for `KEPT_FOR_S`, since each page of a new one costs time.
    """

    def __init__(self) -> None:
        self._free: list[_File] = []
        self._used: set[_File] = set()
        """Files that still have views, and so serve no other call."""
        self._row_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, inputs_bytes: int, rows: int) -> Segment | None:
        """A segment for a call; None if neither its inputs nor its expected outputs are large, or none can be created.

        Args:
            inputs_bytes: size of all inputs to place in it, each `aligned`.
            rows: the call's rows.
        """
        answer_bytes = rows * self._row_bytes
        if not inputs_bytes and answer_bytes < SHARED_FROM_BYTES:
            return None
        needed = inputs_bytes + ANSWER_HEAD_BYTES + answer_bytes + SLACK_BYTES
        file = self._free_one(needed)
        if file is None:
            try:
                file = _File(max(SMALLEST_BYTES, 1 << (needed - 1).bit_length()))
            except OSError:  # too many open files, or no memory; inline tensors need neither
                return None
        file.used_s = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEPT_FOR_S, self._trim)
        # An array, since no other owner of a buffer can report when its last view is gone.
        whole = np.frombuffer(file.map, np.uint8, needed)
        self._used.add(file)
        file.use = weakref.ref(whole, lambda _: self._give_back(file))
        return Segment(file, whole.data)

    def note_answer(self, outputs: Iterable[RawTensor], rows: int) -> None:
        """Record the size of a call's outputs, which the next segment will have space for."""
        given = sum(aligned(len(one.data)) for one in outputs if len(one.data) >= SHARED_FROM_BYTES)
        # The estimate decays, so that one large answer isn't reserved for forever.
        self._row_bytes = max(-(-given // rows), self._row_bytes - self._row_bytes // 64 - 1, 0)

    def _free_one(self, needed: int) -> _File | None:
        """The smallest free file that is large enough."""
        fitting = [file for file in self._free if file.size_bytes >= needed]
        found = min(fitting, key=lambda file: file.size_bytes, default=None)
        if found is not None:
            self._free.remove(found)
        return found

    def _give_back(self, file: _File) -> None:
        """The last view is gone. Called in the thread that dropped it."""
        file.use = None
        self._used.discard(file)
        if not file.is_spoiled and sum([one.size_bytes for one in self._free]) + file.size_bytes <= KEPT_BYTES:
            self._free.append(file)

    def _trim(self) -> None:
        """Drop files that were not used for a while."""
        self._timer = None
        old_s = time.monotonic() - KEPT_FOR_S
        for file in [one for one in self._free if one.used_s < old_s]:
            self._free.remove(file)
        if self._free or self._used:  # files in use now will need trimming later
            self._timer = asyncio.get_running_loop().call_later(KEPT_FOR_S, self._trim)
