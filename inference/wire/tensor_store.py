"""Decides whether tensors go through PyTriton's shared-memory store or inline; the store is faster for large ones only.

Most large tensors bypass PyTriton (`inference.wire.shared_memory`); those in frames (`inference.wire.frame`) and the
inputs of streams don't.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from inference.datatypes import DATATYPES
from inference.signature import Signature, TensorSpec

__all__ = ["ASSUMED_DIMENSION", "batch_bytes", "uses_store"]

STORE_FROM_BYTES: Final = 128 * 1024
"""Bytes of a full batch through PyTriton from which the store is used."""
ASSUMED_DIMENSION: Final = 64
"""The assumed size of a dimension that varies, and the assumed bytes of a ``BYTES`` element."""


def uses_store(signature: Signature) -> bool:
    """Whether the replicas of a model use the store, judged by `batch_bytes`."""
    if not (signature.heads or signature.streams):
        return False
    taken = [spec for spec in signature.inputs if signature.streams or spec.datatype == "BYTES"]
    return batch_bytes((*taken, *signature.outputs), signature.max_batch_size) >= STORE_FROM_BYTES


def batch_bytes(specs: Iterable[TensorSpec], rows: int) -> int:
    """Estimated bytes of this many rows of these tensors."""
    return rows * sum(_row_bytes(spec) for spec in specs)


def _row_bytes(spec: TensorSpec) -> int:
    size_bytes = DATATYPES[spec.datatype].size_bytes or ASSUMED_DIMENSION
    for dim in spec.shape:
        size_bytes *= ASSUMED_DIMENSION if dim < 0 else dim
    return size_bytes
