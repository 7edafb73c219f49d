"""Loads the models that a replica would serve, and calls them once, without Triton."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES
from headwater.errors import ReplicaError
from headwater.replica.served import Served, load_served
from headwater.runtime.fused import FusedPipeline
from headwater.runtime.runner import Runner
from headwater.signature import TensorSpec
from headwater.wire.arrays import Array
from headwater.wire.example_rows import example_hint, example_rows
from headwater.wire.frame import FRAME, decode_frame
from headwater.wire.handshake import ReplicaSpec
from headwater.wire.report import HEADWATER, OF_VALUES, REPORT, CallNote, Status, decode_reports

__all__ = ["try_loading"]


def try_loading(spec: ReplicaSpec) -> str:
    """Load a deployment's models, call them with their example, and unload them. Of a stream only the first frame is
    awaited. A language model is only loaded, which includes a check. Returns a warning if a call with invented values
    failed, else an empty text.

    Raises:
        ModelError: loading failed, or a call with the models' own example; the message says what failed and why.
        Exception: an exception of the models' code.
    """
    served = load_served(spec, lambda stage: None, lambda reason: None)
    try:
        if isinstance(served.runner, FusedPipeline):
            served.loop.wait(_call_in_frames(served, served.runner))
        elif isinstance(served.runner, Sequence):
            for runner in served.runner:
                asyncio.run(_call(served, runner))
    except _TrialFailed as failure:
        if not served.signature.invented:
            raise
        return f"{failure}. {example_hint(served.signature)}"
    finally:
        served.unload()
    return ""


class _TrialFailed(ReplicaError):
    """A model answered the call with an error that other values may change."""


async def _call(served: Served, runner: Runner) -> None:
    (answer,) = await runner.handle([_request(served, CallNote(warmup=True))])
    (report,) = decode_reports(answer[REPORT].tobytes(), 1).rows
    _check(report.status, report.message)


async def _call_in_frames(served: Served, runner: FusedPipeline) -> None:
    note = CallNote(warmup=True, stream="trial" if served.signature.streams else "")
    async with contextlib.aclosing(runner.handle([_request(served, note)])) as answers:
        async for (answer,) in answers:
            for piece in decode_frame(answer[FRAME].tobytes())[0].pieces:
                for _, status, message in piece.failures:
                    _check(Status(status), message)
            if served.signature.streams:
                return


def _request(served: Served, note: CallNote) -> Any:
    row = served.signature.example_row()
    inputs = {spec.name: _example(spec, row[spec.name]) for spec in served.signature.inputs if spec.name in row}
    return SimpleNamespace(data=inputs, parameters={HEADWATER: msgspec.json.encode(note).decode()})


def _check(status: Status, message: str) -> None:
    if status is not Status.OK:
        raise (_TrialFailed if status in OF_VALUES else ReplicaError)(f"warm-up with a batch of 1: {message}")


def _example(tensor: TensorSpec, value: object) -> Array:
    """A row of an input, as Triton would pass it."""
    data, shape = example_rows(tensor, value, 1)
    datatype = DATATYPES[tensor.datatype]
    if datatype.numpy.hasobject:
        texts = np.asarray(value, dtype=object).reshape(shape)
        encode = np.vectorize(lambda text: text.encode() if isinstance(text, str) else text, otypes=[object])
        encoded: Array = encode(texts)
        return encoded
    return np.frombuffer(data, datatype.numpy).reshape(shape).copy()
