"""The states of a model's sequences (`headwater.State`), which the gateway keeps between their requests.

A request gets the states as inputs, and leaves the new states as outputs. The workers share them in a file for each
sequence, so any worker and any replica takes the next request. The requests of a sequence are computed one after
another. A request that fails leaves the states as they were.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES, float32_to_bf16
from headwater.signature import Signature, StateSpec
from headwater.wire.state_files import STATES, sweep_states
from headwater_server.codecs.tensors import Answer, InferRequest, Outputs, OutputWish, RawTensor
from headwater_server.dispatch.sequence_table import SEQUENCES, SequenceRequest, SequenceTable
from headwater_server.errors import BadRequest, Conflict, Unavailable

__all__ = ["SequenceStates"]

SWEEP_EVERY_S: Final = 30.0
THREAD_BYTES: Final = 256 * 1024
"""States of at least this size are read and written in a thread."""
_HEAD: Final = struct.Struct("<16sQ")
"""The head of a file: a digest of the declarations, and which of the file's two copies of the states is valid. A
request writes the other copy, and then the head: a worker that is killed meanwhile leaves the states as they were."""


class _Layout(NamedTuple):
    """The form of a file."""

    states: tuple[StateSpec, ...]
    digest: bytes
    size_bytes: int
    """Bytes of a copy of the states."""

    @classmethod
    def of(cls, states: tuple[StateSpec, ...]) -> _Layout:
        digest = hashlib.blake2b(msgspec.json.encode(states), digest_size=16).digest()
        return cls(states, digest, sum(state.size_bytes for state in states))


class _Found(NamedTuple):
    """The states before a request."""

    data: bytes
    place: int
    """Which copy in the file has them; 1 if there is no file."""


class SequenceStates:
    """The states of a deployment's sequences.

    Args:
        name: the deployment's name.
        folder: the server's folder, with the table of sequences and the files of states that all workers share.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._table = SequenceTable(folder / SEQUENCES)
        self._folder = folder / STATES / name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._swept_s = 0.0

    async def answer(
        self,
        request: InferRequest,
        timeout_s: float,
        compute: Callable[[InferRequest], Awaitable[Answer]],
        check_ready: Callable[[], Signature],
    ) -> Answer:
        """Answer a request of a sequence.

        Args:
            request: the request, without states.
            timeout_s: longest wait for the sequence's earlier requests.
            compute: computes the answer to a request.
            check_ready: returns the present signature; raises `Unavailable`.

        Raises:
            BadRequest: the request names no sequence, a sequence that has not begun or has ended, or several rows.
            Conflict: the states are gone.
            QueueFull: there are too many sequences.
            DeadlineExceeded: the sequence's earlier requests took too long.
            Unavailable: the states can't be written.
            HeadwaterError: the errors of ``compute``.
        """
        sequence = self._sequence(request)
        async with self._table.turn(self._name, sequence, timeout_s):
            layout = _Layout.of(check_ready().states)
            path = self._folder / hashlib.sha256(repr(sequence.id).encode("utf-8", "surrogatepass")).hexdigest()[:32]
            number = self._begin(sequence)
            try:
                found = _Found(_initial(layout), 1)
                if sequence.is_start:
                    path.unlink(missing_ok=True)  # of an earlier sequence with this id
                else:
                    found = await _run(layout, self._read, path, layout, sequence)
                request.inputs.update(_split(layout, found.data))
                wanted = request.outputs
                request.outputs = [*wanted, *(OutputWish(state.output, True) for state in layout.states)]
                answer = await compute(request)
                request.outputs = wanted
                outputs, data = _taken(layout, answer.outputs)
                if sequence.is_end:
                    self._end(path, sequence)
                else:
                    await _run(layout, self._write, path, layout, found, data)
            except BaseException:
                self._table.take_back(self._name, sequence, number)
                raise
        if time.monotonic() - self._swept_s > SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            await asyncio.to_thread(sweep_states, self._folder)
        return msgspec.structs.replace(answer, outputs=outputs)

    def _sequence(self, request: InferRequest) -> SequenceRequest:
        if not request.sequence_id:
            expected = "expected the id of a sequence, an integer from 1 on or a text"
            message = (
                f"parameters.sequence_id: {expected}, got none: model `{self._name}` keeps states between requests"
            )
            raise BadRequest(message, field="parameters.sequence_id")
        if request.rows != 1:
            message = f"inputs: expected one row, as the request belongs to a sequence, got {request.rows}"
            raise BadRequest(message, field="inputs")
        return SequenceRequest(
            self._name, request.sequence_id, request.starts_sequence, request.ends_sequence, has_state=True
        )

    def _begin(self, sequence: SequenceRequest) -> int:
        if sequence.is_start:
            self._table.begin(self._name, sequence, "")
            return 1
        return self._table.step(self._name, sequence, "")

    def _end(self, path: Path, sequence: SequenceRequest) -> None:
        self._table.end(self._name, sequence)
        path.unlink(missing_ok=True)

    def _read(self, path: Path, layout: _Layout, sequence: SequenceRequest) -> _Found:
        try:
            with path.open("rb") as file:
                digest, place = _HEAD.unpack(file.read(_HEAD.size))
                file.seek(place * layout.size_bytes, os.SEEK_CUR)
                data = file.read(layout.size_bytes)
            why = (
                "" if digest == layout.digest and len(data) == layout.size_bytes else "the model's states have changed"
            )
        except (OSError, struct.error) as error:
            why = str(error)
        if why:
            self._table.end(self._name, sequence)
            message = f"the states of sequence {sequence.id} of model `{self._name}` are gone: {why}"
            raise Conflict(f"{message}; begin it again with sequence_start")
        return _Found(data, place)

    def _write(self, path: Path, layout: _Layout, found: _Found, data: bytes) -> None:
        place = 1 - found.place
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _write_all(handle, data, _HEAD.size + place * layout.size_bytes)
                os.pwrite(handle, _HEAD.pack(layout.digest, place), 0)
            finally:
                os.close(handle)
        except OSError as error:
            raise Unavailable(f"model `{self._name}`: the states of a sequence can't be written: {error}") from None


async def _run(layout: _Layout, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that reads or writes a file, in a thread if the states are large. A cancellation is raised once
    the function has returned: until then no other request may use the file."""
    if layout.size_bytes < THREAD_BYTES:
        return function(*arguments)
    called = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(called)
    except asyncio.CancelledError:
        await asyncio.wait([called])
        raise


def _write_all(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        offset += written
        view = view[written:]


def _initial(layout: _Layout) -> bytes:
    pieces = []
    for state in layout.states:
        if state.datatype == "BF16":
            array: np.ndarray[Any, Any] = float32_to_bf16(np.full(state.shape, state.initial, np.float32))
        else:
            array = np.full(state.shape, state.initial, DATATYPES[state.datatype].numpy)
        pieces.append(array.tobytes())
    return b"".join(pieces)


def _split(layout: _Layout, data: bytes) -> dict[str, RawTensor]:
    tensors, start = {}, 0
    for state in layout.states:
        piece = memoryview(data)[start : start + state.size_bytes]
        tensors[state.input] = RawTensor(state.datatype, (1, *state.shape), piece)
        start += state.size_bytes
    return tensors


def _taken(layout: _Layout, outputs: Outputs) -> tuple[Outputs, bytes]:
    """The outputs that the client gets, and the bytes of the new states."""
    names = {state.output for state in layout.states}
    kept = {name: tensor for name, tensor in outputs.items() if name not in names}
    return kept, b"".join(outputs[state.output].data for state in layout.states)
