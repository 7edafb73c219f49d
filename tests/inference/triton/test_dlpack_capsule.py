"""BF16 tensors as DLPack capsules, made and read by ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis.extra import numpy as npst

from headwater.triton import dlpack_capsule
from headwater.triton.dlpack_capsule import capsule_of_bits, capsule_of_tensor

BITS = npst.arrays(np.uint16, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))


def kept() -> int:
    """The number of tensors that capsules refer to."""
    return len(dlpack_capsule._kept)  # private: nothing public tells what capsules keep


def delete(capsule: Any) -> None:
    """Delete a capsule's tensor, as its taker does."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    address = get_pointer(ctypes.py_object(capsule), ctypes.c_char_p(b"dltensor"))
    managed = dlpack_capsule._DlManaged.from_address(address)  # private: DLPack's structure, which takers know
    managed.deleter(address)


@given(BITS)
def test_bits_come_back_from_their_capsule(bits: Any) -> None:
    before = kept()
    capsule = capsule_of_bits(bits)
    back = capsule_of_tensor(capsule)
    assert (back.dtype, back.shape) == (bits.dtype, bits.shape)
    assert back.tobytes() == bits.tobytes()
    delete(capsule)
    assert kept() == before


def test_bits_in_another_order_come_back_in_c_order() -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3).T
    capsule = capsule_of_bits(bits)
    assert capsule_of_tensor(capsule).tolist() == bits.tolist()
    delete(capsule)
