"""Sends copies of requests to a shadow version, and compares its answers with the answers that clients got.

The shadow's answers go to no client. A copy is made when the client's answer is known, and only if there is capacity
for it. No client waits for a copy, and if a client's request doesn't fit in a queue, copies are removed first.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headwater.datatypes import DATATYPES, bf16_to_float32, unpack_bytes
from headwater.signature import Signature, TensorSpec
from headwater_server.codecs.tensors import Answer, InferRequest, Outputs, RawTensor
from headwater_server.dispatch.queue import LAST_PRIORITY
from headwater_server.errors import HeadwaterError, QueueFull, ReplicaLost, Unavailable
from headwater_server.telemetry.catalogue import ShadowDrop
from headwater_server.telemetry.recorder import recorder

__all__ = ["COPIES_LIMIT", "HELD_LIMIT_BYTES", "Difference", "Shadow", "Target", "difference"]

logger = logging.getLogger("headwater.dispatch")

COPIES_LIMIT: Final = 64
"""The most copies of a shadow in flight in a gateway worker."""
HELD_LIMIT_BYTES: Final = 16 * 1024 * 1024
"""The most bytes held by these copies: their inputs, and the client's answers to compare with."""
_LARGE_BYTES: Final = 256 * 1024
"""Answers of at least this size are compared in a thread."""
_DIFFERENCE_LIMIT: Final = 1e4
"""Differences above this, including infinite differences, count as this in the sum of a histogram."""
_CHUNK: Final = 1 << 16
"""Elements that are converted to FP64 and compared at once."""
_Both = tuple[Signature, Signature]
"""The signatures of the version that answered, and of the shadow."""


class Target(Protocol):
    """The version that gets the copies."""

    @property
    def is_crowded(self) -> bool:
        """Whether more rows wait than the next call takes."""
        ...

    def check_ready(self) -> Signature:
        """The signature; raises `Unavailable` if no requests are accepted now."""
        ...

    async def compute(self, request: InferRequest) -> Answer:
        """Answer a request, never from a cache; raises `HeadwaterError`."""
        ...


class Difference(NamedTuple):
    """How two values of an output differ."""

    greatest: float | None
    """The greatest absolute difference of two elements, infinite if unequal elements are not both finite; None for
    texts, and if the outputs differ in form."""
    rows: int = 0
    """Rows that disagree; 0 for numbers without labels, of which only the difference counts."""
    kind: Literal["value", "form"] = "value"
    """Kind of disagreement: ``value``, in the label with the greatest number or in the text; ``form``, in shape or
    datatype, or because the other version omitted the output. With ``form``, all rows disagree."""


class Shadow:
    """Sends copies to one version.

    Args:
        name: the version's deployment.
        find: finds the version's dispatcher; returns None if the version is gone.
    """

    def __init__(self, name: str, find: Callable[[], Target | None]) -> None:
        self.name = name
        self._find = find
        self._meter = recorder().shadow(name)
        self._tasks: set[asyncio.Task[None]] = set()
        self.held_bytes = 0
        """Bytes that the copies in flight hold; see `HELD_LIMIT_BYTES`."""

    @property
    def in_flight(self) -> int:
        """The number of copies in flight."""
        return len(self._tasks)

    def offer(
        self, request: InferRequest, answer: Answer, signature: Signature, took_s: float, *, is_crowded: bool
    ) -> None:
        """Send a copy of a request. It is dropped instead if there is no capacity for it, or if the shadow is not ready
        or takes other requests than the version that answered.

        Args:
            request: the request.
            answer: the client's answer.
            signature: the signature of the version that answered.
            took_s: seconds that the answer took.
            is_crowded: whether more rows wait for that version than its next call takes.
        """
        size_bytes = _size_bytes(request.inputs) + _size_bytes(answer.outputs)
        if self.in_flight >= COPIES_LIMIT:
            self.drop("in_flight")
        elif self.held_bytes + size_bytes > HELD_LIMIT_BYTES:
            self.drop("bytes")
        elif (shadow := self._ready()) is None:
            self.drop("unavailable")
        elif not _takes_the_same(shadow[1], signature):
            self.drop("signature")
        elif is_crowded or shadow[0].is_crowded:
            self.drop("load")
        else:
            target, shadow_signature = shadow
            output_names = {spec.name for spec in shadow_signature.outputs}
            copy = msgspec.structs.replace(
                request, id="", outputs=[output for output in request.outputs if output.name in output_names],
                priority=LAST_PRIORITY, timeout_us=0, cancel_id="", owner="", is_copy=True,
            )  # fmt: skip
            self._send(target, copy, answer.outputs, (signature, shadow_signature), took_s, size_bytes)

    def _ready(self) -> tuple[Target, Signature] | None:
        target = self._find()
        try:
            return None if target is None else (target, target.check_ready())
        except Unavailable:
            return None

    def _send(
        self, target: Target, copy: InferRequest, outputs: Outputs, signatures: _Both, took_s: float, size_bytes: int
    ) -> None:
        self.held_bytes += size_bytes
        # An empty context keeps the copy out of the request's trace, which ends without it.
        task = contextvars.Context().run(asyncio.create_task, self._compare(target, copy, outputs, signatures, took_s))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self.held_bytes -= size_bytes
            if task.cancelled():
                self.drop("ended")

        task.add_done_callback(end)

    def drop(self, reason: ShadowDrop) -> None:
        """Count a request that is not copied, or a copy that is given up, by the reason."""
        self._meter.dropped(reason).add()

    def cancel(self) -> None:
        """Give up the copies in flight."""
        for task in self._tasks:
            task.cancel()

    async def _compare(
        self, target: Target, copy: InferRequest, outputs: Outputs, signatures: _Both, took_s: float
    ) -> None:
        began_s = time.monotonic()
        try:
            shadow_outputs = (await target.compute(copy)).outputs
            copy_s = time.monotonic() - began_s
            if _size_bytes(outputs) < _LARGE_BYTES:
                differences = _differences(signatures, outputs, shadow_outputs)
            else:
                differences = await asyncio.to_thread(_differences, signatures, outputs, shadow_outputs)
        except QueueFull:
            self.drop("load")
        except HeadwaterError as error:
            if isinstance(error, Unavailable) and not isinstance(error, ReplicaLost):
                self.drop("unavailable")
            else:
                self._meter.failed.add()
        except Exception:
            logger.exception("model %s: an answer to a copied request could not be compared", self.name)
            self._meter.failed.add()
        else:
            self._note(copy.rows, differences, took_s, copy_s)

    def _note(self, rows: int, differences: dict[str, Difference], took_s: float, copy_s: float) -> None:
        meter = self._meter
        meter.compared.add()
        meter.rows.add(rows)
        meter.answer_seconds.observe(round(took_s * 1e9))
        meter.seconds.observe(round(copy_s * 1e9))
        for name, output_difference in differences.items():
            meter.disagreements(name, output_difference.kind).add(output_difference.rows)
            if output_difference.greatest is not None:
                meter.difference(name).observe(math.ceil(min(output_difference.greatest, _DIFFERENCE_LIMIT) * 1e6))


def _takes_the_same(signature: Signature, other_signature: Signature) -> bool:
    """Whether versions with these signatures accept the same requests; False if the first version streams."""
    if signature.streams or (signature.inputs, signature.parameters) != (
        other_signature.inputs,
        other_signature.parameters,
    ):
        return False
    return [head.name for head in signature.heads] == [head.name for head in other_signature.heads]


def _differences(signatures: _Both, outputs: Outputs, shadow_outputs: Outputs) -> dict[str, Difference]:
    specs, shadow_specs = ({spec.name: spec for spec in signature.outputs} for signature in signatures)
    return {
        name: difference(specs[name], shadow_specs.get(name, specs[name]), tensor, shadow_outputs.get(name))
        for name, tensor in outputs.items()
    }


def difference(
    spec: TensorSpec, other_spec: TensorSpec, answer: RawTensor, other_answer: RawTensor | None
) -> Difference:
    """Compare an output.

    Args:
        spec: the output's declaration in the version that answered the client, with or without labels.
        other_spec: the output's declaration in the other version; its labels may be in another order.
        answer: the output that the client got.
        other_answer: the output of the other version; None if that version omitted the output.
    """
    rows = answer.shape[0]
    if other_answer is None or (other_answer.datatype, other_answer.shape) != (answer.datatype, answer.shape):
        return Difference(None, rows, "form")
    if answer.datatype == "BYTES":
        texts, other_texts = (
            np.array(unpack_bytes(tensor.data), object).reshape(rows, -1) for tensor in (answer, other_answer)
        )
        return Difference(None, int((texts != other_texts).any(axis=1).sum()))
    left, right = _numbers(answer), _numbers(other_answer)
    greatest = max((_greatest(left[at : at + _CHUNK], right[at : at + _CHUNK]) for at in range(0, len(left), _CHUNK)),
                   default=0.0)  # fmt: skip
    if not spec.labels or not other_spec.labels:
        return Difference(greatest)
    best, other_best = (
        np.array(labels)[numbers.reshape(rows, -1, len(labels)).argmax(axis=2)]
        for labels, numbers in ((spec.labels, left), (other_spec.labels, right))
    )
    return Difference(greatest, int((best != other_best).any(axis=1).sum()))


def _numbers(tensor: RawTensor) -> npt.NDArray[Any]:
    """A tensor's elements, in one dimension."""
    elements = np.frombuffer(tensor.data, DATATYPES[tensor.datatype].numpy)
    return bf16_to_float32(elements) if tensor.datatype == "BF16" else elements


def _greatest(numbers: npt.NDArray[Any], other_numbers: npt.NDArray[Any]) -> float:
    """The greatest absolute difference. Two NaN count as equal, and so do two equal infinities."""
    is_same = numbers == other_numbers
    numbers, other_numbers = numbers.astype(np.float64), other_numbers.astype(np.float64)
    is_same |= np.isnan(numbers) & np.isnan(other_numbers)
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(numbers - other_numbers)
    gaps[np.isnan(gaps)] = np.inf
    gaps = np.maximum(gaps, np.finfo(np.float64).tiny)  # different large integers may become equal floats
    gaps[is_same] = 0
    return float(gaps.max())


def _size_bytes(tensors: Outputs) -> int:
    return sum([len(tensor.data) for tensor in tensors.values()])
