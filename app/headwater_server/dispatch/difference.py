"""How two answers to the same request differ, output by output."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.datatypes import DATATYPES, bf16_to_float32, unpack_bytes
from headwater.signature import TensorSpec
from headwater_server.codecs.tensors import RawTensor

__all__ = ["Difference", "difference"]

_CHUNK: Final = 1 << 16
"""Elements that are compared at once, as FP64."""


class Difference(NamedTuple):
    """How one output differs."""

    greatest: float | None
    """The greatest absolute difference of two numbers, infinite where only one of them is; None: nothing to measure."""
    rows: int = 0
    """Rows that disagree."""
    kind: Literal["value", "form"] = "value"
    """In what: the greatest label or the texts; or shape and datatype."""


def difference(spec: TensorSpec, other_spec: TensorSpec, answer: RawTensor, other: RawTensor | None) -> Difference:
    """Compare an output.

    Args:
        spec: of the output of which ``answer`` is, with labels or without.
        other_spec: the same of the version that is compared; its labels may stand in another order.
        answer: what the client got.
        other: what the other version gave; None: it left the output out.
    """
    rows = answer.shape[0]
    if other is None or (other.datatype, other.shape) != (answer.datatype, answer.shape):
        return Difference(None, rows, "form")
    if answer.datatype == "BYTES":
        one, two = (np.array(unpack_bytes(tensor.data), object).reshape(rows, -1) for tensor in (answer, other))
        return Difference(None, int((one != two).any(axis=1).sum()))
    left, right = _numbers(answer), _numbers(other)
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
    found = np.frombuffer(tensor.data, DATATYPES[tensor.datatype].numpy)
    return bf16_to_float32(found) if tensor.datatype == "BF16" else found


def _greatest(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """The greatest difference; what is NaN, or the same infinity, in both is equal."""
    is_same = one == other
    one, other = one.astype(np.float64), other.astype(np.float64)
    is_same |= np.isnan(one) & np.isnan(other)
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(one - other)
    gaps[np.isnan(gaps)] = np.inf
    gaps = np.maximum(gaps, np.finfo(np.float64).tiny)  # large integers may be equal only as floats
    gaps[is_same] = 0
    return float(gaps.max())
