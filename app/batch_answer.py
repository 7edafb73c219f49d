"""A batch's answer from a model that answers whole, made ready for being shared among its requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from app.codecs.tensors import HeadAnswer, InferRequest, Outputs, RawTensor, SlicedTensor
from app.collector import wanted_heads
from app.errors import CallableFailed
from inference.signature import Signature
from inference.wire.report import RowReport, Status

__all__ = ["no_rows", "no_rows_by_head", "sliced"]


def sliced(signature: Signature, tensors: Outputs, reports: Sequence[RowReport], rows: int) -> dict[str, SlicedTensor]:
    """Prepare a batch's outputs for being cut; those without elements get their true shape back."""
    true_shapes: dict[str, list[int]] = {}
    for report in reports:
        if report.status is Status.OK and report.message:
            true_shapes = msgspec.json.decode(report.message)
            break
    outputs = {}
    for spec in signature.outputs:
        tensor = tensors.get(spec.name)
        if tensor is None:  # nobody wanted it
            continue
        tensor.datatype = spec.datatype  # BF16 travels under another name
        if spec.name in true_shapes:
            tensor = RawTensor(spec.datatype, tuple(true_shapes[spec.name]), b"")
        if tensor.shape[0] != rows:
            raise CallableFailed(f"output {spec.name!r}: expected {rows} rows, got shape {list(tensor.shape)}")
        outputs[spec.name] = SlicedTensor(tensor)
    return outputs


def no_rows(signature: Signature, request: InferRequest) -> Outputs:
    """The answer to a request without rows, which no model is called for."""
    wanted = {wish.name for wish in request.outputs}
    return {
        spec.name: RawTensor(spec.datatype, (0, *(max(dim, 0) for dim in spec.shape)), b"")
        for spec in signature.outputs
        if spec.name in wanted
    }


def no_rows_by_head(signature: Signature, request: InferRequest) -> Iterator[HeadAnswer]:
    """The same in pieces, one of each wanted head."""
    outputs = no_rows(signature, request)
    for name, spec in wanted_heads(request, signature).items():
        yield HeadAnswer(name, {one: outputs[one] for one in spec.outputs or outputs if one in outputs})
