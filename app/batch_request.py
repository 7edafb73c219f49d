"""A batch as a request to a replica's Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from app.tensors import InferRequest, RawTensor, Scalar
from inference.datatypes import DATATYPES
from inference.report import HEADWATER, REPORT, CallNote, placeholder_shape
from inference.signature import Signature

__all__ = ["encode_batch"]

Rows = tuple[InferRequest, dict[str, RawTensor], int]
"""A request, the tensors of those of its rows that are in the batch, and how many these are."""


def encode_batch(signature: Signature, batch: Sequence[Rows]) -> tuple[bytes, list[bytes | memoryview]]:
    """Encode rows that may share a call: shapes, inputs left out and parameters per batch are the same in all.

    Returns:
        The JSON, every tensor binary in both directions; and the inputs' bytes in order, as they came.
    """
    request, first, _ = batch[0]
    rows = sum(count for _, _, count in batch)
    note = CallNote(parameters=request.batch_parameters, rows=_row_parameters(batch))
    data: list[bytes | memoryview] = []
    inputs = []
    for spec in signature.inputs:
        tensor = first.get(spec.name)
        if tensor is None:
            continue
        datatype = DATATYPES[spec.datatype]
        shape = [rows, *tensor.shape[1:]]
        pieces: list[bytes | memoryview]
        if 0 in shape:
            note.shapes[spec.name] = shape
            shape = placeholder_shape(rows, spec.shape)
            pieces = [bytes((datatype.size_bytes or 4) * math.prod(shape))]
        else:
            pieces = [tensors[spec.name].data for _, tensors, _ in batch]
        data += pieces
        inputs.append(
            {
                "name": spec.name,
                "datatype": datatype.wire,
                "shape": shape,
                "parameters": {"binary_data_size": sum(map(len, pieces))},
            }
        )
    wanted = dict.fromkeys(wish.name for request, _, _ in batch for wish in request.outputs)
    head: dict[str, Any] = {
        "inputs": inputs,
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in (*wanted, REPORT)],
    }
    if note.parameters or note.rows or note.shapes:
        head["parameters"] = {HEADWATER: msgspec.json.encode(note).decode()}
    return msgspec.json.encode(head), data


def _row_parameters(batch: Sequence[Rows]) -> dict[str, list[Scalar]]:
    return {
        name: [value for request, _, count in batch for value in [request.row_parameters[name]] * count]
        for name in batch[0][0].row_parameters
    }
