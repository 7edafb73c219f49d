"""A batch on its way: encoded as a request to a replica's Triton, its answer cut by rows, failed rows turned into
errors."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from headwater.datatypes import DATATYPES, float32_to_bf16
from headwater.signature import REQUEST, Signature, TensorSpec
from headwater.wire.report import (
    CLIENT_FAULTS,
    HEADWATER,
    REPORT,
    CallNote,
    RowNote,
    RowReport,
    Status,
    placeholder_shape,
)
from headwater.wire.shared_memory import SHARED_FROM_BYTES, aligned, stand_in_shape
from headwater_server.codecs.tensors import InferRequest, Outputs, RawTensor, SlicedTensor, resized, sliced_outputs
from headwater_server.errors import (
    RETRY_AFTER_LOST_S,
    BadRequest,
    CallableFailed,
    HeadwaterError,
    OutOfMemory,
    ReplicaLost,
)
from headwater_server.transport.replica_protocol import FrameRequest
from headwater_server.transport.segments import RemoteSegment, RemoteSegments, Segment, Segments

__all__ = ["encode_batch", "encode_inputs", "encode_nothing", "replica_loss", "row_error", "sliced"]

_Encoded = tuple[str, str, list[int], list[bytes | memoryview]]
"""An input: name, datatype, shape with the batch axis, and bytes in pieces."""

_Source = Segments | RemoteSegments

_HTTP_STATUSES: Final = {status: http_status for http_status, status in CLIENT_FAULTS.items()}
_NUMBERS: Final = itertools.count(random.getrandbits(62))
"""Numbers that make requests to models with the parameter `REQUEST` unique: Triton may merge calls of several workers.
The first number is random."""

Rows = tuple[InferRequest, dict[str, RawTensor], int]
"""A request's part of a batch: the request, the tensors of its rows in the batch, and the number of these rows."""


def encode_batch(
    signature: Signature, batch: Sequence[Rows], *, is_alone: bool = False, segments: _Source | None = None
) -> tuple[bytes, list[bytes | memoryview], Segment | RemoteSegment | None]:
    """Encode rows for a replica that answers whole; see `encode_inputs`.

    Args:
        signature: the model's signature.
        batch: the rows.
        is_alone: see `headwater.wire.report.CallNote.alone`.
        segments: source of the segment for large tensors; None: all tensors go inline.

    Returns:
        The JSON, with every tensor binary in both directions; the inputs' bytes, in order and uncopied; and the segment
        for large tensors, if the inputs or the expected answer need it.
    """
    request, segment = encode_inputs(signature, batch, segments)
    note = request.note
    note.alone = is_alone
    inputs = []
    data: list[bytes | memoryview] = []
    for name, datatype, shape, pieces in request.inputs:
        data += pieces
        size = sum(map(len, pieces))
        inputs.append({"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": size}})
    wanted = dict.fromkeys([output.name for request, _, _ in batch for output in request.outputs])
    head: dict[str, Any] = {
        "inputs": inputs,
        "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in (*wanted, REPORT)],
    }
    if note.parameters or note.rows or note.shapes or is_alone or segment is not None:
        head["parameters"] = {HEADWATER: msgspec.json.encode(note).decode()}
    return msgspec.json.encode(head), data, segment


def encode_inputs(
    signature: Signature, batch: Sequence[Rows], segments: _Source | None = None
) -> tuple[FrameRequest, Segment | RemoteSegment | None]:
    """Encode rows that may share a call: their shapes, optional inputs and per-batch parameters are equal.

    Args:
        signature: the model's signature.
        batch: the rows.
        segments: source of the segment for large tensors; None: all tensors go inline.

    Returns:
        The request, with a note that has no fields for heads and streams yet; and the segment for large tensors, None
        if the call has no segment.
    """
    first, tensors, _ = batch[0]
    rows = sum([count for _, _, count in batch])
    note = CallNote(parameters=first.batch_parameters)
    if first.row_parameters:
        note.rows = {
            name: [value for request, _, count in batch for value in [request.row_parameters[name]] * count]
            for name in first.row_parameters
        }
        if REQUEST in note.rows:
            note.rows[REQUEST] = [
                value
                for request, _, count in batch
                for value in [f"{next(_NUMBERS)} {request.row_parameters[REQUEST]}"] * count
            ]
    inputs: list[_Encoded] = []
    for spec in signature.inputs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            continue
        shape = [rows, *tensor.shape[1:]]
        if spec.ragged:
            shape[1] = max(row_inputs[spec.name].shape[1] for _, row_inputs, _ in batch)
        if 0 in shape:  # sent as a placeholder, since PyTriton can't carry empty tensors
            note.shapes[spec.name] = shape
            inputs.append((spec.name, *_zeros(spec, placeholder_shape(rows, spec.shape))))
        else:
            pieces = [row_inputs[spec.name].data for _, row_inputs, _ in batch]
            if spec.ragged:
                fill = _padding(spec)
                pieces = [resized(row_inputs[spec.name], shape[1], fill).data for _, row_inputs, _ in batch]
            inputs.append((spec.name, DATATYPES[spec.datatype].wire, shape, pieces))
    segment = None if segments is None else _share(signature, inputs, segments, note)
    return FrameRequest(inputs, note), segment


def encode_nothing(signature: Signature) -> FrameRequest:
    """A no-op request for a replica that answers in frames: it cancels a stream that does not exist."""
    required = [spec for spec in signature.inputs if not spec.optional]
    inputs = [(spec.name, *_zeros(spec, stand_in_shape(spec, 1))) for spec in required]
    return FrameRequest(inputs, CallNote(cancel="-"))


def _share(
    signature: Signature, inputs: list[_Encoded], segments: _Source, note: CallNote
) -> Segment | RemoteSegment | None:
    """Move the large inputs into a segment, leave placeholders in their place, and note the segment's location. Returns
    the segment; None if neither inputs nor outputs are large, or no segment can be created."""
    large: dict[int, int] = {}
    for place, (_, datatype, _, pieces) in enumerate(inputs):
        if datatype != "BYTES" and (size := sum(map(len, pieces))) >= SHARED_FROM_BYTES:
            large[place] = size
    segment = segments.take(sum(map(aligned, large.values())), inputs[0][2][0])
    if segment is None:
        return None
    specs = {spec.name: spec for spec in signature.inputs}
    for place in large:
        name, _, shape, pieces = inputs[place]
        segment.place(name, shape, pieces)
        inputs[place] = (name, *_zeros(specs[name], stand_in_shape(specs[name], shape[0])))
    note.shared = segment.shared()
    return segment


def _padding(spec: TensorSpec) -> bytes:
    """An element of the value with which the shorter rows of a ragged input end."""
    if spec.datatype == "BF16":
        return float32_to_bf16(np.array([spec.padding], np.float32)).tobytes()
    return b"" if spec.datatype == "BYTES" else np.array(spec.padding).astype(DATATYPES[spec.datatype].numpy).tobytes()


def _zeros(spec: TensorSpec, shape: list[int]) -> tuple[str, list[int], list[bytes | memoryview]]:
    """Datatype, shape and bytes of a tensor of zeros."""
    datatype = DATATYPES[spec.datatype]
    return datatype.wire, shape, [bytes((datatype.size_bytes or 4) * math.prod(shape))]  # BYTES: empty strings


def sliced(signature: Signature, tensors: Outputs, reports: Sequence[RowReport], rows: int) -> dict[str, SlicedTensor]:
    """Prepare a batch's outputs to be cut by rows; outputs without elements get their true shape back.

    Args:
        signature: the model's signature.
        tensors: the outputs as they arrived, by name; an output that no request wanted may be absent.
        reports: a report for each row; the report of a row that succeeded has the true shapes.
        rows: the batch's rows.

    Raises:
        CallableFailed: an output has another number of rows.
    """
    true_shapes: dict[str, tuple[int, ...]] = {}
    for report in reports:
        if report.status is Status.OK and report.message:
            true_shapes = msgspec.json.decode(report.message, type=RowNote).shapes
            break
    outputs = {}
    for spec in signature.outputs:
        tensor = tensors.get(spec.name)
        if tensor is None:  # no request wanted it
            continue
        tensor.datatype = spec.datatype  # BF16 travels under another name
        if spec.name in true_shapes:
            tensor = RawTensor(spec.datatype, true_shapes[spec.name], b"")
        if tensor.shape[0] != rows:
            raise CallableFailed(f"output {spec.name!r}: expected {rows} rows, got shape {list(tensor.shape)}")
        outputs[spec.name] = tensor
    return sliced_outputs(signature.outputs, outputs)


def row_error(reports: Sequence[RowReport], first_row: int, rows: int) -> HeadwaterError | None:
    """The error, as the client sees it, of the first failed row among consecutive rows; None if no row failed.

    Args:
        reports: one report for each row.
        first_row: the first row's index in the request.
        rows: the number of rows in the request.
    """
    for index, report in enumerate(reports):
        if report.status is Status.OK:
            continue
        where = f"row {first_row + index}: " if rows > 1 else ""
        if report.status in _HTTP_STATUSES:
            refusal = BadRequest(f"{where}{report.message}", field="inputs")
            refusal.status = _HTTP_STATUSES[report.status]
            return refusal
        if report.status is Status.BROKEN:
            return ReplicaLost(f"the replica can't continue: {report.message}", retry_after_s=RETRY_AFTER_LOST_S)
        kind = OutOfMemory if report.status is Status.OUT_OF_MEMORY else CallableFailed
        error = kind(f"{where}{report.message}")
        error.mismatch = report.mismatch
        return error
    return None


def replica_loss(reports: Iterable[RowReport]) -> HeadwaterError | None:
    """A `ReplicaLost` if a row's report says that the replica can't continue (`Status.BROKEN`); else None."""
    return row_error([report for report in reports if report.status is Status.BROKEN], 0, 1)
