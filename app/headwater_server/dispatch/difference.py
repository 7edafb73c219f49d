"""Compares two answers to the same request, output by output."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.datatypes import DATATYPES, bf16_to_float32, unpack_bytes
from headwater.signature import TensorSpec
from headwater_server.codecs.tensors import RawTensor

__all__ = ["Difference", "difference"]

_CHUNK: Final = 1 << 16
"""Elements that are converted to FP64 and compared at once."""


class Difference(NamedTuple):
    """How two values of an output differ."""

    greatest: float | None
    """The greatest absolute difference of two elements, infinite if only one element is finite; None for texts, and if
    the outputs differ in form."""
    rows: int = 0
    """Rows that disagree; 0 for numbers without labels, of which only the difference counts."""
    kind: Literal["value", "form"] = "value"
    """Kind of disagreement: ``value``, in the label with the greatest number or in the text; ``form``, in shape or
    datatype, or because the other version omitted the output. With ``form``, all rows disagree."""


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
