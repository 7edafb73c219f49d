"""Converts a replica's tensors from wire form to a callable's arguments and back, and checks the callable's outputs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from headwater.datatypes import DATATYPES, bf16_to_float32, float32_to_bf16
from headwater.errors import BadOutput, OutputMismatch
from headwater.pipeline import tensor_text
from headwater.signature import TensorSpec

__all__ = ["NAMES", "Array", "argument", "as_objects", "fetched", "fits", "sent", "spread", "wire", "zeros"]

Array = np.ndarray[Any, np.dtype[Any]]

NAMES: Final = {row.numpy: row.name for row in DATATYPES.values() if row.name != "BF16"}
"""The protocol's datatype for each numpy type."""


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
    native = value.dtype.newbyteorder("=")
    return value.astype(native, copy=False), NAMES.get(native, str(native))


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
