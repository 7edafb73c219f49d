"""Linear layers and activations on a CPU: the result for a row does not depend on the other rows.

The libraries choose a kernel by the number of rows, and kernels add in different orders. Here rows are computed in
blocks, with sizes for which a test on this CPU gave the same bits for a row at any place in a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from headwater.lm.transformers_parts import activation_classes

__all__ = ["Block", "InvariantActivation", "InvariantLinear", "elementwise", "in_blocks", "make_layers_invariant"]

COUNTS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 64, 256)
"""Numbers of rows that are compared to choose a block size."""
LANES: Final = 64
"""A multiple of the number of elements that a vector loop computes at once, on any CPU."""
GRAIN: Final = 16_384
"""torch computes up to this many elements on a single thread."""
FEW: Final = 16
"""Up to this many rows, oneDNN may generate code for every number of rows. Larger numbers are padded to at least a
multiple of 4, because generating code takes about a millisecond for each number."""


class Block(NamedTuple):
    """How rows are put into blocks."""

    multiple: int
    """Rows are padded to a multiple of this number."""
    most: int
    """The most rows in a block."""


BLOCKS: Final = (Block(1, 256), Block(4, 256), Block(16, 256), Block(32, 32), Block(1, 1))
"""Candidates from the fastest to the safest; the last is invariant by construction."""


def in_blocks(compute: Callable[[Tensor], Tensor], rows: Tensor, block: Block) -> Tensor:
    """Apply a function, which maps rows [count, in] to rows [count, out], to blocks of the rows."""
    results = []
    for part in torch.split(rows, block.most):
        count = len(part)
        multiple = block.multiple if count <= FEW else max(block.multiple, 4)
        extra = -count % multiple
        results.append(compute(pad(part, (0, 0, 0, extra)))[:count] if extra else compute(part))
    return results[0] if len(results) == 1 else torch.cat(results)


def elementwise(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply an elementwise function such that the vector loop computes all elements, never the scalar loop for a
    remainder."""
    size = tensor.shape[-1]
    if size % LANES:
        return elementwise(function, pad(tensor, (0, -size % LANES)))[..., :size]
    if tensor.numel() <= GRAIN:
        return function(tensor)
    return torch.cat([function(part) for part in torch.split(tensor.flatten(), GRAIN)]).view(tensor.shape)


class InvariantLinear(nn.Module):
    """A linear layer for inference: the result for a row does not depend on the other rows.

    Args:
        layer: the layer to replace; its weight is copied into oneDNN's layout if oneDNN supports the weight's type on
            this CPU.
        block: how rows are put into blocks; by default the first of `BLOCKS` that gives the same bits for all `COUNTS`.
    """

    def __init__(self, layer: nn.Linear | Conv1D, block: Block | None = None) -> None:
        super().__init__()
        weight = layer.weight.detach()
        weight = weight.t().contiguous() if isinstance(layer, Conv1D) else weight
        self.bias = layer.bias
        self._weight: Tensor = weight
        self._is_packed = False
        with contextlib.suppress(RuntimeError):  # oneDNN does not support this type on this CPU
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, COUNTS[-1])
            self._is_packed = True
        self.in_features: int = weight.shape[1]
        self.out_features: int = weight.shape[0]
        self.dtype = weight.dtype
        self.block = block or self._choose_block()

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [..., in] to [..., out]."""
        results = in_blocks(self._multiply, rows.reshape(-1, self.in_features), self.block)
        return results.view(*rows.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        if not self._is_packed:
            return linear(rows, self._weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self.bias, "none", [], "")
        return product

    def _choose_block(self) -> Block:
        generator = torch.Generator().manual_seed(0)
        row = torch.randn(1, self.in_features, generator=generator).to(self.dtype)
        return next(block for block in BLOCKS if _is_invariant(self._multiply, row, block))


class InvariantActivation(nn.Module):
    """An activation function: the result for an element does not depend on the element's place."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self._activation = activation

    def forward(self, tensor: Tensor) -> Tensor:
        return elementwise(self._activation, tensor)


def make_layers_invariant(model: nn.Module) -> None:
    """Replace a model's linear layers and activations, in place. Experts and other special layers are left
    unchanged."""
    blocks: dict[tuple[Any, ...], Block] = {}
    activations = activation_classes()
    replaced: dict[nn.Module, nn.Module] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if type(layer) in (nn.Linear, Conv1D):
            if layer not in replaced:
                shape = (*layer.weight.shape, layer.weight.dtype, layer.bias is None, type(layer))
                replaced[layer] = invariant = InvariantLinear(layer, blocks.get(shape))
                blocks[shape] = invariant.block
        elif isinstance(layer, activations):
            replaced.setdefault(layer, InvariantActivation(layer))
        else:
            continue
        model.set_submodule(name, replaced[layer])


def _is_invariant(
    compute: Callable[[Tensor], Tensor], row: Tensor, block: Block, counts: Sequence[int] = COUNTS
) -> bool:
    """Whether copies of a row [1, in] all have the same result, for each of the numbers of copies in `counts`."""
    if block.most == 1:
        return True
    expected = in_blocks(compute, row, block)
    return all(
        torch.equal(result, expected.expand_as(result))
        for result in (in_blocks(compute, row.repeat(count, 1), block) for count in counts)
    )
