"""The implicit state of sequences (``sequence_batching.state``), which Triton's Python backend passes in, but drops.

Triton gives all requests of a sequence to the same instance, so the bridge of an instance keeps the states of its
sequences: it puts them in place of what Triton passes, and takes them out of the responses.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from headwater.triton.call_codec import Told

__all__ = ["SequenceStates", "StateFault"]

START: Final = 1
END: Final = 2
DEFAULT_IDLE_US: Final = 1_000_000
"""Triton's default of ``max_sequence_idle_microseconds``."""
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


class SequenceStates:
    """The states of an instance's sequences.

    Args:
        config: the model's configuration.
        folder: the model's folder, which may have files of initial states.

    Raises:
        StateFault: the configuration's states can't be kept.
        OSError: a file can't be read.
    """

    def __init__(self, config: Mapping[str, Any], folder: str) -> None:
        batching = config.get("sequence_batching", {})
        is_batched = config.get("max_batch_size", 0) > 0
        self._initial: dict[str, Array] = {}
        """By the name of the input."""
        self._inputs: dict[str, str] = {}
        """The input of each output."""
        self._kept: OrderedDict[Any, tuple[float, dict[str, Array]]] = OrderedDict()
        """The time of the last request, and the states by input, of each sequence; the latest sequence last."""
        self._size = 0
        idle_us = int(batching.get("max_sequence_idle_microseconds") or DEFAULT_IDLE_US)
        self._idle_s = idle_us / 1e6 + 1
        for state in batching.get("state", []):
            self._initial[state["input_name"]] = _initial(state, folder, is_batched=is_batched)
            self._inputs[state["output_name"]] = state["input_name"]
        if self._initial and config.get("model_transaction_policy", {}).get("decoupled"):
            raise StateFault("sequence_batching.state: not supported for a decoupled model; keep it in the model")

    def put(self, inputs: list[Told], sequence: int | str, flags: int) -> list[Told]:
        """The inputs of a request, with the states of its sequence; the initial states if the sequence begins.
        A request without a sequence (0 or empty) has no states."""
        if not self._initial or not sequence:
            return inputs
        _, states = self._kept.get(sequence, (0.0, self._initial))
        states = self._initial if flags & START else states
        return [(name, states.get(name, array)) for name, array in inputs]

    def take(self, outputs: list[Told], sequence: int | str, flags: int) -> list[Told]:
        """Keep the states among the outputs of a request's response, and return the others. An end of the sequence
        drops its states.

        Raises:
            StateFault: a state has another datatype than its input, or all states together are too large.
        """
        if not self._initial or not sequence:
            return outputs
        now_s = time.monotonic()
        _, before = self._kept.pop(sequence, (0.0, self._initial))
        self._size -= 0 if before is self._initial else _bytes(before)
        states = dict(self._initial if flags & START else before)
        for name, array in outputs:
            input_name = self._inputs.get(name)
            if input_name is None:
                continue
            if array.dtype != self._initial[input_name].dtype:
                expected = self._initial[input_name].dtype
                raise StateFault(f"state {name!r}: expected the datatype {expected}, got {array.dtype}")
            states[input_name] = array.copy()  # a view of the whole message
        if not flags & END:
            self._size += _bytes(states)
            self._kept[sequence] = now_s, states
        self._drop_idle(now_s)
        if self._size > MAX_BYTES:
            raise StateFault(f"the states of {len(self._kept)} sequences: expected at most {MAX_BYTES} bytes together")
        return [told for told in outputs if told[0] not in self._inputs]

    def _drop_idle(self, now_s: float) -> None:
        """Drop the states of sequences that Triton has ended, because they were idle."""
        while self._kept:
            sequence, (used_s, states) = next(iter(self._kept.items()))
            if now_s - used_s < self._idle_s:
                return
            del self._kept[sequence]
            self._size -= _bytes(states)


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
