"""Memory that a gateway worker shares with the replicas of a deployment, for a call's large tensors.

See `headwater.wire.shared_memory` for its purpose and layout.
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

from headwater.datatypes import DATATYPES
from headwater.signature import Signature
from headwater.wire.shared_memory import (
    ANSWER_HEAD_BYTES,
    ELSEWHERE,
    SHARED_FROM_BYTES,
    SharedCall,
    aligned,
    placed_outputs,
)
from headwater_server.codecs.tensors import RawTensor

__all__ = [
    "KEPT_FOR_S",
    "LARGEST_REMOTE_BYTES",
    "RemoteSegment",
    "RemoteSegments",
    "Segment",
    "SegmentFiles",
    "Segments",
]

SMALLEST_BYTES: Final = 256 * 1024
"""Smallest file of a segment, in bytes. Larger files have a power of two of bytes."""
KEPT_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of unused files that a pool (`SegmentFiles`) keeps."""
LARGEST_REMOTE_BYTES: Final = 1024 * 1024 * 1024
"""Largest segment that a replica's port creates, in bytes."""
KEPT_FOR_S: Final = 10.0
"""Seconds between two checks of a pool, which drop unused files that the last call took at least this long ago."""
SLACK_BYTES: Final = 1024
"""Bytes for the alignment of outputs."""
_NO_ANSWER_BYTES: Final = 4
"""Number of zero bytes that mark a missing answer."""


class SegmentFile:
    """A segment's file. It lives as long as any view of it, in this process or in a replica."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        fd = os.memfd_create("headwater", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size_bytes)
        self.map = mmap.mmap(fd, size_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        """The path at which a replica opens the file."""
        self.used_s = 0.0
        """Monotonic time at which the last call that used the file took it."""
        self.is_spoiled = False
        """Whether a replica may still write to the file after its call failed: then no other call may use it."""
        self.use: weakref.ref[Any] | None = None
        """Reference to the array over the file's memory while a call uses it; None while the file is unused. Its
        callback returns the file to the pool."""


class Segment:
    """The large tensors of a call, in the memory of a file that is reused once no view of it is left."""

    def __init__(self, file: SegmentFile, memory: memoryview) -> None:
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
        """The segment's description for the replica, once all inputs are placed."""
        self._memory[self._end : self._end + _NO_ANSWER_BYTES] = bytes(_NO_ANSWER_BYTES)  # no outputs yet
        return SharedCall(self._file.path, len(self._memory), self._inputs, self._end)

    def outputs(self, signature: Signature) -> dict[str, RawTensor]:
        """The outputs that the replica left in the segment: views, by name. Small outputs are not among them.

        Raises:
            msgspec.DecodeError: the segment holds no valid answer.
        """
        return _views(signature, self._memory, self._end, 0)

    def spoil(self) -> None:
        """Never reuse the memory: the call failed, and the replica may still write to it."""
        self._file.is_spoiled = True


class RemoteSegment:
    """A segment for a replica on another machine. The replica's port creates the file; this object has the inputs to
    send and the outputs that came back.

    Args:
        size_bytes: the file's size.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.pieces: list[bytes | memoryview] = []
        """The inputs' bytes, uncopied, with padding that aligns each input."""
        self.answer = memoryview(b"")
        """Bytes that the replica left in the file behind the inputs; set by the client. Empty: it left no bytes."""
        self._inputs: dict[str, tuple[int, list[int]]] = {}
        self.inputs_bytes = 0
        """Total length of `pieces`."""

    def place(self, name: str, shape: list[int], pieces: Sequence[bytes | memoryview]) -> None:
        """Append an input."""
        at = self.inputs_bytes
        self._inputs[name] = (at, shape)
        end = at + sum(map(len, pieces))
        self.pieces += pieces
        self.inputs_bytes = aligned(end)
        if self.inputs_bytes > end:
            self.pieces.append(bytes(self.inputs_bytes - end))

    def shared(self) -> SharedCall:
        """See `Segment.shared`."""
        return SharedCall(ELSEWHERE, self.size_bytes, self._inputs, self.inputs_bytes)

    def outputs(self, signature: Signature) -> dict[str, RawTensor]:
        """See `Segment.outputs`."""
        return _views(signature, self.answer, 0, self.inputs_bytes) if self.answer else {}

    def spoil(self) -> None:
        """Do nothing: the memory belongs to the port."""


def _views(signature: Signature, memory: memoryview, answer_at: int, first: int) -> dict[str, RawTensor]:
    """The outputs in a segment: views, by name.

    Args:
        signature: the model's signature.
        memory: a part of the segment.
        answer_at: the answer's offset in ``memory``.
        first: the offset of ``memory`` in the segment.
    """
    outputs: dict[str, RawTensor] = {}
    datatypes = {spec.name: DATATYPES[spec.datatype] for spec in signature.outputs}
    for name, (offset, shape) in placed_outputs(memory, answer_at).items():
        datatype = datatypes[name]
        at = offset - first
        outputs[name] = RawTensor(datatype.wire, tuple(shape), memory[at : at + math.prod(shape) * datatype.size_bytes])
    return outputs


class SegmentFiles:
    """A pool of files for segments. Unused files are kept for a while (`KEPT_FOR_S`, `KEPT_BYTES`), since each page of
    a new file costs time."""

    def __init__(self) -> None:
        self.free: list[SegmentFile] = []
        """Unused files."""
        self.used: set[SegmentFile] = set()
        """Files that still have views, and so can't serve another call."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self, needed: int) -> tuple[SegmentFile, memoryview]:
        """Take a file, and ``needed`` bytes of its memory with arbitrary content. The file is in use until no view of
        this memory is left.

        Raises:
            OSError: there are too many open files, or there is no memory.
        """
        file = self._free_one(needed) or SegmentFile(max(SMALLEST_BYTES, 1 << (needed - 1).bit_length()))
        file.used_s = time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEPT_FOR_S, self._trim)
        # A numpy array, since no other owner of a buffer can report when its last view is gone.
        whole = np.frombuffer(file.map, np.uint8, needed)
        self.used.add(file)
        file.use = weakref.ref(whole, lambda _: self._give_back(file))
        return file, whole.data

    def _free_one(self, needed: int) -> SegmentFile | None:
        """Remove and return the smallest free file that is large enough; None if no file is."""
        fitting = [file for file in self.free if file.size_bytes >= needed]
        smallest = min(fitting, key=lambda file: file.size_bytes, default=None)
        if smallest is not None:
            self.free.remove(smallest)
        return smallest

    def _give_back(self, file: SegmentFile) -> None:
        """Return a file to the pool, since its last view is gone; drop it if it is spoiled or the pool is full. Called
        in the thread that dropped the view."""
        file.use = None
        self.used.discard(file)
        if not file.is_spoiled and sum([spare.size_bytes for spare in self.free]) + file.size_bytes <= KEPT_BYTES:
            self.free.append(file)

    def _trim(self) -> None:
        """Drop the unused files whose last use began at least `KEPT_FOR_S` ago."""
        self._timer = None
        old_s = time.monotonic() - KEPT_FOR_S
        for file in [spare for spare in self.free if spare.used_s < old_s]:
            self.free.remove(file)
        if self.free or self.used:  # files in use now will need trimming later
            self._timer = asyncio.get_running_loop().call_later(KEPT_FOR_S, self._trim)


class Segments:
    """The segments of one deployment."""

    def __init__(self) -> None:
        self._files = SegmentFiles()
        self._row_bytes = 0
        """Estimated bytes of large outputs per row."""

    def needed(self, inputs_bytes: int, rows: int) -> int:
        """The size of a call's segment in bytes; 0 if neither its inputs nor its expected outputs are large.

        Args:
            inputs_bytes: size of all inputs to place in it, each `aligned`.
            rows: the call's rows.
        """
        answer_bytes = rows * self._row_bytes
        if not inputs_bytes and answer_bytes < SHARED_FROM_BYTES:
            return 0
        return inputs_bytes + ANSWER_HEAD_BYTES + answer_bytes + SLACK_BYTES

    def take(self, inputs_bytes: int, rows: int) -> Segment | None:
        """A segment for a call; the arguments are those of `needed`. None: the call doesn't need a segment, or no
        segment can be created."""
        size_bytes = self.needed(inputs_bytes, rows)
        if not size_bytes:
            return None
        try:
            return Segment(*self._files.take(size_bytes))
        except OSError:  # then all tensors go inline, which takes neither a file nor this memory
            return None

    def note_answer(self, outputs: Iterable[RawTensor], rows: int) -> None:
        """Record the size of a call's large outputs, from which the space for the next call's outputs is estimated.

        Args:
            outputs: all outputs of the call.
            rows: the call's rows.
        """
        shared_bytes = sum(aligned(len(output.data)) for output in outputs if len(output.data) >= SHARED_FROM_BYTES)
        # The estimate decays, so that a single large answer doesn't reserve memory forever.
        self._row_bytes = max(-(-shared_bytes // rows), self._row_bytes - self._row_bytes // 64 - 1, 0)


class RemoteSegments:
    """The segments of a deployment's replicas on other machines.

    Args:
        local: the same deployment's segments on this machine, which track how large its answers are.
    """

    def __init__(self, local: Segments) -> None:
        self._local = local

    def take(self, inputs_bytes: int, rows: int) -> RemoteSegment | None:
        """A segment for a call; see `Segments.take`. None also if the call is too large for a segment."""
        size_bytes = self._local.needed(inputs_bytes, rows)
        return RemoteSegment(size_bytes) if 0 < size_bytes <= LARGEST_REMOTE_BYTES else None
