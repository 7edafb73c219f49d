"""Converts a replica's tensors from wire form to a callable's arguments and back, and checks the callable's outputs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from headwater.datatypes import DATATYPES, bf16_to_float32, float32_to_bf16
from headwater.errors import BadOutput, OutputMismatch
from headwater.pipeline import tensor_text
from headwater.signature import TensorSpec

__all__ = [
    "NAMES", "Array", "argument", "as_objects", "fetched", "fits", "padded", "ragged", "sent", "spread", "widened",
    "wire", "zeros",
]  # fmt: skip

Array = np.ndarray[Any, np.dtype[Any]]

NAMES: Final = {row.numpy: row.name for row in DATATYPES.values() if row.name != "BF16"}
"""The protocol's datatype for each numpy type."""


MOST_RAGGED: Final = 1 << 26
"""The most elements of a ragged output of a call."""


def zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    """An array of zeros, or of empty ``BYTES`` elements, in wire form."""
    dtype = DATATYPES[spec.datatype].numpy
    return np.full(shape, b"", dtype) if dtype.hasobject else np.zeros(shape, dtype)


def spread(spec: TensorSpec, array: Array, places: Sequence[int], rows: int) -> Array:
    """An array of ``rows`` rows in wire form: the rows of ``array`` at the indices ``places``, and zeros elsewhere."""
    whole = zeros(spec, (rows, *array.shape[1:]))
    whole[places] = array
    return whole


def wire(spec: TensorSpec, value: object, rows: int) -> Array:
    """Check an output and convert it to wire form: numpy, with ``BF16`` as its bit pattern and ``BYTES`` as objects.

    Raises:
        BadOutput: the output isn't as declared, or doesn't have ``rows`` rows.
    """
    where = f"output {spec.name!r}"
    array, datatype = _as_array(spec, value, where)
    if datatype != spec.datatype or not fits((rows, *spec.shape), array.shape):
        expected, got = tensor_text(spec.datatype, (rows, *spec.shape)), tensor_text(datatype, array.shape)
        is_count = datatype == spec.datatype and fits(spec.shape, array.shape[1:])
        error = BadOutput(f"{where}: expected {expected}, got {got}{f': {rows} rows went in' if is_count else ''}")
        error.mismatch = OutputMismatch(spec.name, rows, datatype, array.shape)
        raise error
    return np.ascontiguousarray(array)


def ragged(spec: TensorSpec, value: object, rows: int) -> tuple[Array, Array]:
    """Check a ragged output, a list with an array for each row, and convert it to a single array in wire form.

    Returns:
        The array, in which each row has the size of the longest (see `TensorSpec.ragged`), and the rows' sizes as INT32
        of shape [rows, 1].

    Raises:
        BadOutput: the output isn't such a list, a row isn't as declared, rows differ in another dimension than the
            first, or the array would have more than `MOST_RAGGED` elements.
    """
    where = f"output {spec.name!r}"
    if not isinstance(value, (list, tuple)) or len(value) != rows:
        got = f"{len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__
        raise BadOutput(f"{where}: expected a list of {rows} arrays, one for each row, got {got}")
    row_spec = TensorSpec(spec.name, spec.datatype, spec.shape[1:])
    pieces = []
    for index, piece in enumerate(value):
        if not hasattr(piece, "__len__"):
            raise BadOutput(f"{where}, row {index}: expected an array, got {type(piece).__name__}")
        pieces.append(wire(row_spec, piece, len(piece)))
    shapes = {piece.shape[1:] for piece in pieces}
    if len(shapes) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        raise BadOutput(f"{where}: expected rows that differ in the first dimension only, got elements {shown}")
    return padded(spec, pieces)


def padded(spec: TensorSpec, pieces: Sequence[Array]) -> tuple[Array, Array]:
    """Rows of a ragged output in wire form, at least a single row, with elements of one shape, as `ragged` returns
    them.

    Raises:
        BadOutput: the array would have more than `MOST_RAGGED` elements.
    """
    counts = np.array([[len(piece)] for piece in pieces], np.int32)
    shape = (len(pieces), int(counts.max(initial=0)), *pieces[0].shape[1:])
    if math.prod(shape) > MOST_RAGGED:
        raise BadOutput(
            f"output {spec.name!r}: expected at most {MOST_RAGGED} elements in all rows, each as long as the longest, "
            f"got {math.prod(shape)}; return less for a row, or lower `batching.max_batch_size`"
        )
    whole = zeros(spec, shape)
    for index, piece in enumerate(pieces):
        whole[index, : len(piece)] = piece
    return whole, counts


def widened(spec: TensorSpec, array: Array, size: int) -> Array:
    """A ragged output in wire form with another size of its rows, at least the present size."""
    whole = zeros(spec, (len(array), size, *array.shape[2:]))
    whole[:, : array.shape[1]] = array
    return whole


def fits(declared: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a shape matches the declared shape, in which -1 stands for a dimension that varies."""
    return len(declared) == len(shape) and all(dim in (-1, got) for dim, got in zip(declared, shape, strict=True))


def _as_array(spec: TensorSpec, value: object, where: str) -> tuple[Array, str]:
    """The value as a numpy array in wire form, and its datatype."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        tensor: Any = value.detach()
        if tensor.dtype is torch.bfloat16:
            bits: Array = tensor.contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
            return bits, "BF16"
        value = tensor.cpu().numpy()
    if spec.datatype == "BYTES" and isinstance(value, (list, tuple)):
        value = np.array(value, dtype=object)
    if not isinstance(value, np.ndarray):
        raise BadOutput(f"{where}: expected a numpy array or torch tensor, got {type(value).__name__}")
    if value.dtype.kind in "OSU":
        return as_objects(value, where), "BYTES"
    if spec.datatype == "BF16" and value.dtype == np.float32:
        return float32_to_bf16(value), "BF16"
    native = value.dtype if value.dtype.isnative else value.dtype.newbyteorder("=")
    return value.astype(native, copy=False), NAMES.get(native) or str(native)


def as_objects(value: Array, where: str) -> Array:
    """Convert an array of text or bytes to an array of ``bytes`` objects.

    Raises:
        BadOutput: an element is neither text nor bytes.
    """
    flat = np.empty(value.size, dtype=object)
    for index, element in enumerate(value.ravel().tolist()):
        if isinstance(element, str):
            element = element.encode()
        if not isinstance(element, bytes):
            raise BadOutput(f"{where}: expected bytes or str elements, got {type(element).__name__}")
        flat[index] = element
    return flat.reshape(value.shape)


def argument(
    spec: TensorSpec, array: Array, kind: Literal["numpy", "torch"], device: str, rows: Sequence[int] | None = None
) -> Any:
    """Convert an input to a callable's argument. The argument is a copy, so the callable may write to it.

    Args:
        spec: the input's declaration.
        array: the input in wire form; its memory is not read after the return.
        kind: the kind of array that the callable takes, see `headwater.Model.arrays`.
        device: the device of torch tensors.
        rows: indices of the rows to convert; None: all rows.
    """
    if spec.datatype != "BYTES" and kind == "torch":
        tensor = sent(array.view(np.int16) if spec.datatype == "BF16" else array, device, rows)
        if spec.datatype == "BF16":
            tensor = tensor.view(sys.modules["torch"].bfloat16)
        return tensor
    array = array.copy() if rows is None else array[rows]
    return bf16_to_float32(array) if spec.datatype == "BF16" else array


def sent(array: Array, device: str, rows: Sequence[int] | None = None) -> Any:
    """Copy an array, or the rows of these indices, to a torch tensor on a device.

    The copy to a GPU is asynchronous: it may still run when the function returns, and later work in the same CUDA
    stream waits for it. torch keeps the pinned memory that it is copied from until the copy is complete.
    """
    import torch

    if not device.startswith("cuda"):
        return torch.from_numpy(array.copy() if rows is None else array[rows])
    shape = array.shape if rows is None else (len(rows), *array.shape[1:])
    pinned = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    if rows is None:
        np.copyto(pinned.numpy(), array)
    else:
        np.take(array, rows, axis=0, out=pinned.numpy(), mode="clip")  # the default mode, "raise", makes another copy
    return pinned.to(device, non_blocking=True)


def fetched(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's outputs, with GPU tensors copied to pinned memory and other values unchanged. All copies are started
    before the wait for their end."""
    torch: Any = sys.modules.get("torch")
    host_outputs = dict(outputs)
    streams = set()
    for name, value in outputs.items():
        if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
            pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            host_outputs[name] = pinned.copy_(value.detach(), non_blocking=True)
            streams.add(torch.cuda.current_stream(value.device))
    for stream in streams:
        stream.synchronize()
    return host_outputs
