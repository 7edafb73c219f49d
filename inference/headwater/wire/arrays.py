"""Converts tensors in a replica from wire form to a callable's arguments and back, and checks them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from headwater.datatypes import DATATYPES, bf16_to_float32, float32_to_bf16
from headwater.errors import BadOutput
from headwater.pipeline import tensor_text
from headwater.signature import TensorSpec

__all__ = ["NAMES", "Array", "argument", "as_objects", "fetched", "fits", "sent", "spread", "wire", "zeros"]

Array = np.ndarray[Any, np.dtype[Any]]

NAMES: Final = {row.numpy: row.name for row in DATATYPES.values() if row.name != "BF16"}
"""Datatype of each numpy type."""


def zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    """An array of zeros, or of empty ``BYTES`` elements, in wire form."""
    dtype = DATATYPES[spec.datatype].numpy
    return np.full(shape, b"", dtype) if dtype.hasobject else np.zeros(shape, dtype)


def spread(spec: TensorSpec, array: Array, places: Sequence[int], rows: int) -> Array:
    """Put an array's rows, in wire form, at these places of an array of so many rows; the others are zeros."""
    whole = zeros(spec, (rows, *array.shape[1:]))
    whole[places] = array
    return whole


def wire(spec: TensorSpec, value: object, rows: int) -> Array:
    """Check one output and bring it into wire form: numpy, ``BF16`` as its bit pattern, ``BYTES`` as objects.

    Raises:
        BadOutput: the output isn't as declared, or has another number of rows.
    """
    where = f"output {spec.name!r}"
    array, datatype = _as_array(spec, value, where)
    if datatype != spec.datatype or not fits((rows, *spec.shape), array.shape):
        expected, got = tensor_text(spec.datatype, (rows, *spec.shape)), tensor_text(datatype, array.shape)
        is_count = datatype == spec.datatype and fits(spec.shape, array.shape[1:])
        raise BadOutput(f"{where}: expected {expected}, got {got}{f': {rows} rows went in' if is_count else ''}")
    return np.ascontiguousarray(array)


def fits(declared: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an array of this shape is as declared, with -1 for a dimension that varies."""
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
    """Convert an array of text or bytes to one of ``bytes`` objects.

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
    """Convert an input to a callable's argument: a copy, into which the callable may write.

    Args:
        spec: the input's declaration.
        array: the input in wire form; its memory is not read any more after the return.
        kind: the kind of array that the callable takes, see `headwater.Model.arrays`.
        device: the device of torch tensors.
        rows: which rows of the array; None: all.
    """
    if spec.datatype != "BYTES" and kind == "torch":
        tensor = sent(array.view(np.int16) if spec.datatype == "BF16" else array, device, rows)
        if spec.datatype == "BF16":
            tensor = tensor.view(sys.modules["torch"].bfloat16)
        return tensor
    array = array.copy() if rows is None else array[rows]
    return bf16_to_float32(array) if spec.datatype == "BF16" else array


def sent(array: Array, device: str, rows: Sequence[int] | None = None) -> Any:
    """A torch tensor on a device with a copy of an array, or of some of its rows.

    To a GPU it is on its way when this returns, from pinned memory that torch keeps until it has arrived; what the GPU
    does next waits for it.
    """
    import torch

    if not device.startswith("cuda"):
        return torch.from_numpy(array.copy() if rows is None else array[rows])
    shape = array.shape if rows is None else (len(rows), *array.shape[1:])
    pinned = torch.empty(shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
    if rows is None:
        np.copyto(pinned.numpy(), array)
    else:
        np.take(array, rows, axis=0, out=pinned.numpy(), mode="clip")  # other modes copy once more
    return pinned.to(device, non_blocking=True)


def fetched(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's outputs, those on a GPU copied to pinned memory: all at once, with one wait for the last."""
    torch: Any = sys.modules.get("torch")
    found = dict(outputs)
    streams = set()
    for name, value in outputs.items():
        if torch is not None and isinstance(value, torch.Tensor) and value.is_cuda:
            pinned = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            found[name] = pinned.copy_(value.detach(), non_blocking=True)
            streams.add(torch.cuda.current_stream(value.device))
    for stream in streams:
        stream.synchronize()
    return found
