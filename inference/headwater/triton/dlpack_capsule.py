"""BF16 tensors as DLPack capsules, for Triton's stub, whose numpy has no such datatype.

Source: DLPack's ``dlpack.h``. Everything is in the memory of the CPU.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any, Final

import numpy as np

__all__ = ["capsule_of_bits", "capsule_of_tensor"]

_BFLOAT: Final = 4
_CPU: Final = 1
_NAME: Final = b"dltensor"


class _DlDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class _DlDatatype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device", _DlDevice), ("ndim", ctypes.c_int32), ("dtype", _DlDatatype),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _DlManaged(ctypes.Structure):
    _fields_ = (("tensor", _DlTensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_python: Final = ctypes.pythonapi
_python.PyCapsule_GetPointer.restype = ctypes.c_void_p
_python.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_numbers: Final = itertools.count(1)
_kept: Final[dict[int, Any]] = {}
"""What the capsules that are in use refer to, by number."""


def _forget(address: int) -> None:
    _kept.pop(_DlManaged.from_address(address).context, None)


_delete: Final = _Deleter(_forget)


def capsule_of_tensor(capsule: Any) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """The bits of a capsule's tensor of BF16, as UINT16.

    Raises:
        ValueError: the tensor is not of BF16, not on the CPU, or not in C order.
    """
    tensor = _DlManaged.from_address(_python.PyCapsule_GetPointer(capsule, _NAME)).tensor
    shape = [tensor.shape[at] for at in range(tensor.ndim)]
    steps = [int(np.prod(shape[at + 1 :])) for at in range(tensor.ndim)]
    is_in_order = not tensor.strides or [tensor.strides[at] for at in range(tensor.ndim)] == steps
    kind = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    if kind != (_BFLOAT, 16, 1) or tensor.device.kind != _CPU or not is_in_order:
        raise ValueError(f"expected a tensor of BF16 on the CPU in C order, got DLPack's datatype {kind}")
    size = int(np.prod(shape)) * 2
    data = ctypes.string_at(tensor.data + tensor.byte_offset, size) if size else b""
    return np.frombuffer(data, np.uint16).reshape(shape)


def capsule_of_bits(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> Any:
    """A capsule with a tensor of BF16 over its bits. Whoever takes the tensor must delete it, as DLPack wants."""
    bits = np.ascontiguousarray(bits).reshape(bits.shape)  # which gives a scalar a dimension
    number = next(_numbers)
    shape = (ctypes.c_int64 * bits.ndim)(*bits.shape)
    managed = _DlManaged()
    managed.tensor.data = bits.ctypes.data
    managed.tensor.device = _DlDevice(_CPU, 0)
    managed.tensor.ndim = bits.ndim
    managed.tensor.dtype = _DlDatatype(_BFLOAT, 16, 1)
    managed.tensor.shape = shape
    managed.context = number
    managed.deleter = _delete
    _kept[number] = managed, bits, shape
    return _python.PyCapsule_New(ctypes.addressof(managed), _NAME, None)
