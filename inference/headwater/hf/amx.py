"""Linear layers in FP32 on a CPU with AMX, which multiplies 16-bit numbers, through oneMKL's routine inside torch.

Each FP32 factor is split into a bfloat16 number (high) and the remainder as another bfloat16 number (low). Three
products of these parts, summed in FP32, take half the time of an FP32 product, and keep 16 of its 24 bits.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.nn.functional import gelu

__all__ = ["AmxLinear"]

BLOCK_ROWS: Final = 256
"""Rows of a block for each thread: intermediate results for this many rows fit in a core's L2 cache."""
SPLIT_ROWS: Final = 64
# From oneMKL's mkl_cblas.h.
_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112


class AmxLinear(torch.nn.Module):
    """A linear layer's product, for inference only.

    Args:
        layer: the layer to copy the weights from.

    Raises:
        RuntimeError: this CPU lacks AMX for bfloat16.
        AttributeError: this torch lacks the routine.
        OSError: this torch has no library `libtorch_cpu.so`.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        if not torch.cpu.get_capabilities().get("amx_bf16"):
            raise RuntimeError("this CPU lacks AMX")
        self._multiply = _routine()
        with torch.inference_mode():
            high = layer.weight.bfloat16()
            self._weight = torch.cat((layer.weight - high, high), 1).bfloat16()
            self.bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the layer to rows [..., in]; returns [..., out]."""
        sums = rows.new_empty(*rows.shape[:-1], len(self.bias))
        for part, some in zip(_blocks(sums), _blocks(rows), strict=True):
            self.add_to(part.copy_(self.bias), some)
        return sums

    def added(self, rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        """Apply the layer to rows [..., in], and add `more`, [..., out]."""
        sums = more.new_empty(more.shape)
        for part, some, addend in zip(_blocks(sums), _blocks(rows), _blocks(more), strict=True):
            self.add_to(torch.add(addend, self.bias, out=part), some)
        return sums

    def add_to(self, sums: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the layer's result for rows [rows, in], without the bias, to `sums`, [rows, out] and contiguous."""
        (count, size), width = rows.shape, len(self.bias)
        factors = rows.new_empty(count, 2 * size, dtype=torch.bfloat16)
        for some, both in zip(torch.split(rows, SPLIT_ROWS), torch.split(factors, SPLIT_ROWS), strict=True):
            high = both[:, :size].copy_(some)
            both[:, size:].copy_(some - high.float())
        # The first product is high times low plus low times high, the second is high times high.
        for weight in (self._weight, self._weight[:, size:]):
            self._multiply(
                _ROW_MAJOR, _AS_IT_IS, _TRANSPOSED, count, width, weight.shape[1],
                1.0, factors.data_ptr(), 2 * size, weight.data_ptr(), 2 * size, 1.0, sums.data_ptr(), width,
            )  # fmt: skip

    @staticmethod
    def fed_forward(first: AmxLinear, second: AmxLinear, rows: torch.Tensor) -> torch.Tensor:
        """The feed-forward part of a layer, for rows [..., in]: rows + second(GELU(first(rows)))."""
        sums = rows.new_empty(rows.shape)
        for part, some in zip(_blocks(sums), _blocks(rows), strict=True):
            second.add_to(torch.add(some, second.bias, out=part), gelu(first(some)))
        return sums


def _blocks(rows: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(rows.flatten(0, -2), BLOCK_ROWS * torch.get_num_threads())


@functools.cache
def _routine() -> Any:
    routine = ctypes.CDLL("libtorch_cpu.so").cblas_gemm_bf16bf16f32
    integer, real, address = ctypes.c_int, ctypes.c_float, ctypes.c_void_p
    routine.argtypes = [integer] * 6 + [real, address, integer, address, integer, real, address, integer]
    routine.restype = None
    return routine
