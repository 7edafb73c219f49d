"""Linear layers on a CPU with weights in the order in which oneDNN reads them, through torch's private operators."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["ROWS", "Linear", "fed_forward"]

ROWS: Final = 16
"""oneDNN generates code for each number of rows that it gets, which takes about a millisecond: multiples of this many
are few enough to be kept."""
_TYPICAL_ROWS: Final = 1024


class Linear(torch.nn.Module):
    """The products of linear layers that read the same rows, side by side, in FP32; for inference only.

    Args:
        layers: whose weights are copied.

    Raises:
        AttributeError, RuntimeError: another torch, or one built without oneDNN.
    """

    def __init__(self, *layers: torch.nn.Linear) -> None:
        super().__init__()
        with torch.inference_mode():
            weight = torch.cat([layer.weight for layer in layers])
            self._bias = torch.cat([torch.zeros(len(one.weight)) if one.bias is None else one.bias for one in layers])
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)

    def forward(self, rows: torch.Tensor) -> Any:
        """What the layers make of rows, [..., in]: [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")

    def added(self, rows: torch.Tensor, more: torch.Tensor) -> Any:
        """The same plus more, [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(rows, more, self._weight, self._bias, "add")

    def gelu(self, rows: torch.Tensor) -> Any:
        """GELU of what the layers make of rows."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "gelu", [], "none")


def fed_forward(first: Linear, second: Linear, rows: torch.Tensor) -> Any:
    """Rows, [..., in], plus what the second makes of GELU of what the first makes of them."""
    return second.added(first.gelu(rows), rows)
