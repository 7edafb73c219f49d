"""Memory that a gateway worker shares with the replicas of a deployment, for a call's large tensors.

See `inference.wire.shared_memory` for what it is for and how it is laid out.
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
"""What a deployment keeps at most of segments that nothing is in."""
KEPT_FOR_S: Final = 10.0
SLACK_BYTES: Final = 1024
"""For aligning the outputs."""


class _File:
    """A segment's file. It ends with the last view of it, here and in replicas."""

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
        """Of its present use; calls back at the end of it."""


class Segment:
    """One call's large tensors. Its memory serves another call once nobody has a view of this one's any more.

    Args:
        file: where they are.
        memory: its bytes.
    """

    def __init__(self, file: _File, memory: memoryview) -> None:
        self._file = file
        self._memory = memory
        self._inputs: dict[str, tuple[int, list[int]]] = {}
        self._end = 0

    def place(self, name: str, shape: list[int], pieces: Sequence[bytes | memoryview]) -> None:
        """Copy an input into it, behind those before it."""
        at = self._end
        self._inputs[name] = (at, shape)
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)
        self._end = aligned(at)

    def shared(self) -> SharedCall:
        """What the replica is told, once all inputs are in."""
        self._memory[self._end : self._end + 4] = b"\0\0\0\0"  # so far it has left nothing
        return SharedCall(self._file.path, len(self._memory), self._inputs, self._end)

    def outputs(self, signature: Signature) -> dict[str, RawTensor]:
        """What the replica left in it: views, by name."""
        found: dict[str, RawTensor] = {}
        placed = placed_outputs(self._memory, self._end)
        if placed:
            datatypes = {spec.name: DATATYPES[spec.datatype] for spec in signature.outputs}
            for name, (offset, shape) in placed.items():
                datatype = datatypes[name]
                data = self._memory[offset : offset + math.prod(shape) * datatype.size_bytes]
                found[name] = RawTensor(datatype.wire, tuple(shape), data)
        return found

    def spoil(self) -> None:
        """Keep its memory from being used for another call: this one went wrong, and the replica may still write."""
        self._file.is_spoiled = True


class Segments:
    """The segments of one deployment.

    What is free is kept for the next call, for `KEPT_FOR_S`: each page of a fresh one costs time.
    """

    def __init__(self) -> None:
        self._free: list[_File] = []
        self._used: set[_File] = set()
        """Nobody else may have one while there are views of it."""
        self._row_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, inputs_bytes: int, rows: int) -> Segment | None:
        """A segment for a call; None if neither what it takes nor what it is expected to give is large, or there is no
        room for another.

        Args:
            inputs_bytes: of all inputs that would be placed in it, each `aligned`.
            rows: how many there are.
        """
        answer_bytes = rows * self._row_bytes
        if not inputs_bytes and answer_bytes < SHARED_FROM_BYTES:
            return None
        needed = inputs_bytes + ANSWER_HEAD_BYTES + answer_bytes + SLACK_BYTES
        file = self._free_one(needed)
        if file is None:
            try:
                file = _File(max(SMALLEST_BYTES, 1 << (needed - 1).bit_length()))
            except OSError:  # too many open files, or no memory: what goes inline needs neither
                return None
        file.used_s = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEPT_FOR_S, self._trim)
        # An array, since nothing else that gives its memory away tells when that has been let go.
        whole = np.frombuffer(file.map, np.uint8, needed)
        self._used.add(file)
        file.use = weakref.ref(whole, lambda _: self._give_back(file))
        return Segment(file, whole.data)

    def note_answer(self, outputs: Iterable[RawTensor], rows: int) -> None:
        """Take note of how much a call gave, for which there will be room in the next one."""
        given = sum(aligned(len(one.data)) for one in outputs if len(one.data) >= SHARED_FROM_BYTES)
        # What was large once isn't reserved for ever.
        self._row_bytes = max(-(-given // rows), self._row_bytes - self._row_bytes // 64 - 1, 0)

    def _free_one(self, needed: int) -> _File | None:
        """The smallest that is large enough."""
        found = None
        for file in self._free:
            if file.size_bytes >= needed and (found is None or file.size_bytes < found.size_bytes):
                found = file
        if found is not None:
            self._free.remove(found)
        return found

    def _give_back(self, file: _File) -> None:
        """Nobody has a view any more. Called wherever the last one went, in whatever thread that was."""
        file.use = None
        self._used.discard(file)
        if not file.is_spoiled and sum([one.size_bytes for one in self._free]) + file.size_bytes <= KEPT_BYTES:
            self._free.append(file)

    def _trim(self) -> None:
        """Let go of what wasn't used for a while."""
        self._timer = None
        old_s = time.monotonic() - KEPT_FOR_S
        for file in [one for one in self._free if one.used_s < old_s]:
            self._free.remove(file)
        if self._free or self._used:  # what is used now has nobody else to free it later
            self._timer = asyncio.get_running_loop().call_later(KEPT_FOR_S, self._trim)
