"""BF16 tensors as DLPack capsules: torch takes them, and gives them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from headwater.triton import dlpack_capsule
from headwater.triton.backend_utils import Tensor
from headwater.triton.dlpack_capsule import capsule_of_bits, capsule_of_tensor

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.heavy

BITS = npst.arrays(np.uint16, npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4))


def kept() -> int:
    """The number of tensors that capsules refer to."""
    return len(dlpack_capsule._kept)  # private: nothing public tells what capsules keep


@given(BITS)
def test_torch_takes_a_capsule_and_gives_its_memory_back(bits: Any) -> None:
    before = kept()
    taken = torch.utils.dlpack.from_dlpack(capsule_of_bits(bits))
    assert taken.dtype is torch.bfloat16
    assert tuple(taken.shape) == bits.shape
    assert taken.view(torch.int16).numpy().tobytes() == bits.tobytes()
    del taken
    assert kept() == before


def test_the_tensor_lives_longer_than_the_bits_of_its_maker() -> None:
    taken = torch.utils.dlpack.from_dlpack(capsule_of_bits(np.full(1000, 0x3F80, np.uint16)))
    gc.collect()
    assert taken.sum().item() == 1000


@given(st.lists(st.integers(2, 4), min_size=1, max_size=3))
def test_the_bits_of_torchs_tensor_are_read(shape: list[int]) -> None:
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.bfloat16).reshape(shape)
    bits = capsule_of_tensor(torch.utils.dlpack.to_dlpack(tensor))
    assert bits.shape == tuple(shape)
    assert bits.tobytes() == tensor.view(torch.int16).numpy().tobytes()


def test_a_part_of_a_tensor_is_read_from_where_it_begins() -> None:
    tensor = torch.arange(8, dtype=torch.bfloat16)[2:6]
    bits = capsule_of_tensor(torch.utils.dlpack.to_dlpack(tensor))
    assert torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2), torch.zeros(2, dtype=torch.int16), torch.zeros((2, 3), dtype=torch.bfloat16).T],
    ids=["float32", "int16", "transposed"],
)
def test_other_tensors_are_refused(tensor: Any) -> None:
    with pytest.raises(ValueError, match="expected a tensor of BF16 on the CPU in C order"):
        capsule_of_tensor(torch.utils.dlpack.to_dlpack(tensor))


def test_torch_and_the_interface_exchange_bfloat16() -> None:
    tensor = Tensor.from_dlpack("x", torch.tensor([[1, 2]], dtype=torch.bfloat16))
    assert (tensor.triton_dtype(), tensor.shape()) == (14, [1, 2])
    assert torch.from_dlpack(tensor).tolist() == [[1, 2]]
    assert torch.from_dlpack(tensor.to_dlpack()).dtype is torch.bfloat16


def test_the_interface_shares_memory_with_torch() -> None:
    source = torch.zeros(3)
    tensor = Tensor.from_dlpack("x", source)
    source[1] = 5
    assert tensor.as_numpy().tolist() == [0, 5, 0]
