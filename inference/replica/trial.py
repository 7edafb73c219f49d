"""Loads what a replica would serve, and calls it once, without Triton."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from inference.datatypes import DATATYPES
from inference.errors import ReplicaError
from inference.replica.served import Served, load_served
from inference.replica.warmup import example_rows
from inference.runtime.runner import Runner
from inference.signature import TensorSpec
from inference.wire.arrays import Array
from inference.wire.handshake import ReplicaSpec
from inference.wire.report import HEADWATER, REPORT, CallNote, Status, decode_reports

__all__ = ["try_loading"]


def try_loading(spec: ReplicaSpec) -> None:
    """Load a deployment's models and unload them. A language model checks itself; a model that answers whole is called
    with its example.

    Raises:
        ModelError: loading or the call failed; the message says what and why.
        Exception: whatever the models' own code raises.
    """
    served = load_served(spec, lambda stage: None, lambda reason: None)
    try:
        if isinstance(served.runner, Sequence):
            for runner in served.runner:
                asyncio.run(_call(served, runner))
    finally:
        served.unload()


async def _call(served: Served, runner: Runner) -> None:
    row = served.signature.example_row()
    inputs = {one.name: _example(one, row[one.name]) for one in served.signature.inputs if one.name in row}
    note = {HEADWATER: msgspec.json.encode(CallNote(warmup=True)).decode()}
    request: Any = SimpleNamespace(data=inputs, parameters=note)
    (answer,) = await runner.handle([request])
    (report,) = decode_reports(answer[REPORT].tobytes(), 1).rows
    if report.status is not Status.OK:
        raise ReplicaError(f"warm-up with a batch of 1: {report.message}")


def _example(tensor: TensorSpec, value: object) -> Array:
    """One row of an input, as Triton would pass it."""
    data, shape = example_rows(tensor, value, 1)
    datatype = DATATYPES[tensor.datatype]
    if datatype.numpy.hasobject:
        texts = np.asarray(value, dtype=object).reshape(shape)
        encode = np.vectorize(lambda text: text.encode() if isinstance(text, str) else text, otypes=[object])
        encoded: Array = encode(texts)
        return encoded
    return np.frombuffer(data, datatype.numpy).reshape(shape).copy()
