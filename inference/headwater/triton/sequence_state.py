"""The implicit state of sequences (``sequence_batching.state``), which Triton's Python backend passes in, but drops.

Triton gives all requests of a sequence to the same instance, so the bridge of an instance keeps the states of its
sequences: it puts them in place of what Triton passes, and takes them out of the responses. It also writes them to
files, from which another replica goes on when this one is lost. A sequence has two files, written in turn: a request
that is sent again finds what it found the first time, and a process that is killed while it writes spoils only what is
not needed any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from headwater.triton.call_codec import Told
from headwater.wire.sequence_step import FILE_IDLE_S, MOVED, STEP

__all__ = ["SequenceStates", "StateFault", "StateRequest"]

START: Final = 1
END: Final = 2
DEFAULT_IDLE_US: Final = 1_000_000
"""Triton's default of ``max_sequence_idle_microseconds``."""
_HEAD: Final = struct.Struct("<QQ")
"""The head of a file: the number of the request that left the states, 0 while they are written; and the length of the
JSON that tells them."""
ENDED_S: Final = 60.0
"""Seconds that the file of an ended sequence is kept."""
MAX_BYTES: Final = 4 * 1024**3
"""Most bytes of the states of an instance together."""
_DTYPES: Final[Mapping[str, Any]] = {
    "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8, "TYPE_UINT16": np.uint16, "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64, "TYPE_INT8": np.int8, "TYPE_INT16": np.int16, "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64,
}  # fmt: skip
Array = np.ndarray[Any, np.dtype[Any]]


class StateFault(Exception):
    """A state can't be kept; the message names it."""


class StateRequest(NamedTuple):
    """What a request says of its sequence."""

    sequence: int | str
    """Its id; 0 or empty: the request belongs to none."""
    flags: int
    """As the model sees them."""
    step: int = 0
    """See `headwater.wire.sequence_step.STEP`; 0: the gateway didn't number the request."""
    is_moved: bool = False
    """See `headwater.wire.sequence_step.MOVED`."""

    @classmethod
    def read(cls, sequence: int | str, flags: int, parameters: str) -> tuple[StateRequest, str]:
        """Read what Triton passes. Returns also the parameters (JSON) without the gateway's own."""
        if STEP not in parameters:
            return cls(sequence, flags), parameters
        values = json.loads(parameters)
        step, is_moved = int(values.pop(STEP, 0)), bool(values.pop(MOVED, False))
        return cls(sequence, flags & ~START if is_moved else flags, step, is_moved), json.dumps(values)


class _Kept(NamedTuple):
    """The states after a request of a sequence."""

    used_s: float
    step: int
    states: dict[str, Array]
    place: int
    """The number of the file that has them; -1: none has."""


class _Found(NamedTuple):
    """The states that a request finds."""

    states: dict[str, Array]
    place: int
    """See `_Kept.place`."""


class SequenceStates:
    """The states of an instance's sequences.

    Args:
        config: the model's configuration.
        folder: the model's folder, which may have files of initial states.
        store: the folder of the files of all replicas' states.

    Raises:
        StateFault: the configuration's states can't be kept.
        OSError: a file can't be read.
    """

    def __init__(self, config: Mapping[str, Any], folder: str, store: str) -> None:
        batching = config.get("sequence_batching", {})
        is_batched = config.get("max_batch_size", 0) > 0
        self._model = str(config.get("name", ""))
        self._store = store
        self._initial: dict[str, Array] = {}
        """By the name of the input."""
        self._inputs: dict[str, str] = {}
        """The input of each output."""
        self._kept: OrderedDict[Any, _Kept] = OrderedDict()
        """By sequence; the latest last."""
        self._before: dict[Any, _Found] = {}
        """The states of the requests that are computed now, by sequence."""
        self._size = 0
        idle_us = int(batching.get("max_sequence_idle_microseconds") or DEFAULT_IDLE_US)
        self._idle_s = idle_us / 1e6 + 1
        for state in batching.get("state", []):
            self._initial[state["input_name"]] = _initial(state, folder, is_batched=is_batched)
            self._inputs[state["output_name"]] = state["input_name"]
        if self._initial and config.get("model_transaction_policy", {}).get("decoupled"):
            raise StateFault("sequence_batching.state: not supported for a decoupled model; keep it in the model")

    @property
    def are_there(self) -> bool:
        """Whether the model has states."""
        return bool(self._initial)

    def begin_call(self) -> None:
        """Begin a call, of which each request is first `put` and, if the model answered it, later `take`."""
        self._before.clear()

    def put(self, inputs: list[Told], request: StateRequest) -> list[Told]:
        """The inputs of a request, with the states of its sequence; the initial states if the sequence begins.
        A request without a sequence has no states.

        Raises:
            StateFault: the states are not known.
        """
        if not self._initial or not request.sequence:
            return inputs
        found = self._before[request.sequence] = self._found(request)
        return [(name, found.states.get(name, array)) for name, array in inputs]

    def take(self, outputs: list[Told], request: StateRequest) -> list[Told]:
        """Keep the states among the outputs of a request's response, and return the others. An end of the sequence
        drops its states.

        Raises:
            StateFault: a state has another datatype than its input, can't be written, or all states together are too
                large.
        """
        if not self._initial or not request.sequence:
            return outputs
        now_s = time.monotonic()
        before = self._before.pop(request.sequence)
        states = dict(before.states)
        for name, array in outputs:
            input_name = self._inputs.get(name)
            if input_name is None:
                continue
            if array.dtype != self._initial[input_name].dtype:
                expected = self._initial[input_name].dtype
                raise StateFault(f"state {name!r}: expected the datatype {expected}, got {array.dtype}")
            states[input_name] = array.copy()  # a view of the whole message
        place = 0 if before.place < 0 else 1 - before.place
        if request.step:
            self._write(request, place, states, begins=before.place < 0)
        self._forget(request.sequence)
        if not request.flags & END:
            self._size += _bytes(states)
            self._kept[request.sequence] = _Kept(now_s, request.step, states, place if request.step else -1)
        self._drop_idle(now_s)
        if self._size > MAX_BYTES:
            raise StateFault(f"the states of {len(self._kept)} sequences: expected at most {MAX_BYTES} bytes together")
        return [told for told in outputs if told[0] not in self._inputs]

    def _found(self, request: StateRequest) -> _Found:
        if request.flags & START:
            return _Found(self._initial, -1)
        kept = self._kept.get(request.sequence)
        if not request.step:
            return _Found(self._initial if kept is None else kept.states, -1)
        if kept is not None and not request.is_moved and kept.step < request.step:
            return _Found(kept.states, kept.place)
        found: dict[int, _Found] = {}
        why = "no file has them"
        for place in (0, 1):
            try:
                step, states = _read(f"{self._file(request.sequence)}.{place}")
            except (OSError, ValueError, KeyError) as error:
                why = str(error)
            else:
                found[step] = _Found(states, place)
        if max(found, default=0) > request.step:
            raise StateFault(f"sequence {request.sequence}: a later request was answered already")
        found.pop(request.step, None)
        if not found:
            raise StateFault(f"the states of sequence {request.sequence} are gone: {why}; begin it again")
        return found[max(found)]

    def _write(self, request: StateRequest, place: int, states: Mapping[str, Array], *, begins: bool) -> None:
        path = self._file(request.sequence)
        about = json.dumps([(name, array.dtype.str, array.shape) for name, array in states.items()]).encode()
        data = [about, *(np.ascontiguousarray(array).ravel().view(np.uint8).data for array in states.values())]
        try:
            if begins:  # of an earlier sequence with this id
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{path}.{1 - place}")
            handle = os.open(f"{path}.{place}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(handle, _HEAD.pack(0, 0), 0)
                _write_all(handle, data)
                os.pwrite(handle, _HEAD.pack(request.step, len(about)), 0)
            finally:
                os.close(handle)
            if request.flags & END:  # kept for as long as the gateway may send the request again
                ended_s = time.time() - FILE_IDLE_S + ENDED_S
                for one in (0, 1):
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(f"{path}.{one}", (ended_s, ended_s))
        except OSError as error:
            raise StateFault(f"the states of sequence {request.sequence} can't be written: {error}") from None

    def _file(self, sequence: int | str) -> str:
        text = f"{self._model}\0{type(sequence).__name__}\0{sequence}"
        return os.path.join(self._store, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32])

    def _forget(self, sequence: int | str) -> None:
        if (kept := self._kept.pop(sequence, None)) is not None:
            self._size -= _bytes(kept.states)

    def _drop_idle(self, now_s: float) -> None:
        """Drop the states of sequences that Triton has ended, because they were idle."""
        while self._kept:
            sequence, kept = next(iter(self._kept.items()))
            if now_s - kept.used_s < self._idle_s:
                return
            self._forget(sequence)


def _write_all(handle: int, data: list[Any]) -> None:
    """Write what follows the head of a file."""
    at = _HEAD.size
    for piece in data:
        view = memoryview(piece)
        while view:
            written = os.pwrite(handle, view, at)
            at += written
            view = view[written:]


def _read(path: str) -> tuple[int, dict[str, Array]]:
    """A file's step, and its states. Raises `OSError`, `ValueError` and `KeyError`."""
    with open(path, "rb") as file:
        data = file.read()
    if len(data) < _HEAD.size:
        raise ValueError(f"{path}: cut short")
    step, length = _HEAD.unpack_from(data)
    if not step:
        raise ValueError(f"{path}: its writer was killed")
    start = _HEAD.size + length
    states = {}
    for name, dtype, shape in json.loads(data[_HEAD.size : start]):
        count = int(np.prod(shape))
        array = np.frombuffer(data, dtype, count, start).reshape(shape) if count else np.zeros(shape, dtype)
        states[name] = array
        start += array.nbytes
    return step, states


def _bytes(states: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in states.values())


def _initial(state: Mapping[str, Any], folder: str, *, is_batched: bool) -> Array:
    """The initial value of a state: zeros, or the content of a file."""
    name = state["input_name"]
    given = (state.get("initial_state") or [{}])[0]
    dims = [int(dim) for dim in given.get("dims") or state["dims"]]
    dtype = _DTYPES.get(state["data_type"])
    if dtype is None:
        raise StateFault(f"state {name!r}: not supported with the datatype {state['data_type']}")
    if any(dim < 0 for dim in dims):
        raise StateFault(f"state {name!r}: expected an initial_state with all dims, got dims {dims}")
    shape = [1, *dims] if is_batched else dims
    file = given.get("data_file")
    if not file:
        return np.zeros(shape, dtype)
    with open(os.path.join(folder, "initial_state", file), "rb") as stream:
        data = stream.read()
    array = np.frombuffer(data, dtype)
    if array.size != np.prod(dims):
        raise StateFault(f"state {name!r}: expected {int(np.prod(dims))} elements in {file}, got {array.size}")
    return array.reshape(shape)
