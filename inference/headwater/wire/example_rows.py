"""The rows that warm a model up before clients call it: their numbers, and their bytes."""

from __future__ import annotations

import numpy as np

from headwater.datatypes import DATATYPES, float32_to_bf16, pack_bytes
from headwater.errors import DeclarationError
from headwater.pipeline import tensor_text
from headwater.signature import Signature, TensorSpec
from headwater.wire.arrays import fits

__all__ = ["batch_sizes", "example_hint", "example_rows"]


def batch_sizes(max_batch_size: int) -> list[int]:
    """Powers of two up to ``max_batch_size``, and ``max_batch_size`` itself."""
    sizes = [1 << power for power in range(max_batch_size.bit_length()) if 1 << power < max_batch_size]
    return [*sizes, max_batch_size]


def example_hint(signature: Signature) -> str:
    """Which values of an example row were invented, and how to give the model an example."""
    tried = ", ".join(
        f"`{spec.name}` {'example texts' if spec.datatype == 'BYTES' else 'zeros'} of shape "
        f"{list(spec.example_shape) or [max(dim, 1) for dim in spec.shape]}"
        for spec in signature.invented
    )
    names = dict.fromkeys(name for spec in signature.invented for name in spec.dimensions if name)
    sizes = f", or the sizes of dimensions: `options.sizes` with {', '.join(names)}" if names else ""
    return (
        f"The values tried were invented: {tried}; if the model can't take them, give it an example: `example` in its "
        f"class, `options.example` for a file or function{sizes}"
    )


def example_rows(spec: TensorSpec, value: object, rows: int) -> tuple[bytes, list[int]]:
    """A batch that repeats one example row: its bytes in the protocol's binary form, and its shape with the batch axis.

    Raises:
        DeclarationError: the value doesn't fit the declaration.
    """
    datatype = DATATYPES[spec.datatype]
    where = f"example, input {spec.name!r}"
    wanted = tensor_text(spec.datatype, spec.shape)
    try:
        array = np.array(value, dtype=np.float32 if spec.datatype == "BF16" else datatype.numpy)
    except (TypeError, ValueError, OverflowError) as error:
        raise DeclarationError(f"{where}: expected {wanted}: {error}") from error
    if not fits(spec.shape, array.shape):
        raise DeclarationError(f"{where}: expected {wanted}, got shape {list(array.shape)}")
    if datatype.numpy.hasobject:
        elements = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
        row = pack_bytes(elements)
    else:
        row = (float32_to_bf16(array) if spec.datatype == "BF16" else array).tobytes()
    return row * rows, [rows, *array.shape]
