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
    """A linear layer's product, in FP32 and for inference only.

    Args:
        layer: whose weights are copied.

    Raises:
        AttributeError, RuntimeError: another torch, or one built without oneDNN.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self._bias = layer.bias
        with torch.inference_mode():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, _TYPICAL_ROWS)

    def forward(self, rows: torch.Tensor) -> Any:
        """What the layer makes of rows, [..., in]: [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")

    def added(self, rows: torch.Tensor, more: torch.Tensor) -> Any:
        """The same plus more, [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(rows, more, self._weight, self._bias, "add")

    def gelu(self, rows: torch.Tensor) -> Any:
        """GELU of what the layer makes of rows."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "gelu", [], "none")


def fed_forward(first: Linear, second: Linear, rows: torch.Tensor) -> Any:
    """Rows, [..., in], plus what the second makes of GELU of what the first makes of them."""
    return second.added(first.gelu(rows), rows)
