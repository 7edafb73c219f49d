"""Linear layers on a CPU with weights in oneDNN's layout, through torch's private operators."""

from __future__ import annotations

from typing import Any, Final

import torch

__all__ = ["ROW_MULTIPLE", "OneDnnLinear"]

ROW_MULTIPLE: Final = 16
"""Row counts are padded to a multiple of this. oneDNN generates code for each row count, which takes about a
millisecond; the multiples are few enough for oneDNN to keep the code of all."""
_TYPICAL_ROWS: Final = 1024


class OneDnnLinear(torch.nn.Module):
    """A linear layer's product, in FP32 and for inference only.

    Args:
        layer: the layer to copy the weights from.

    Raises:
        AttributeError, RuntimeError: this torch lacks the private operators, or was built without oneDNN.
    """

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self._bias = layer.bias
        with torch.inference_mode():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight, _TYPICAL_ROWS)

    def forward(self, rows: torch.Tensor) -> Any:
        """Apply the layer to rows [..., in]; returns [..., out]."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")

    def added(self, rows: torch.Tensor, more: torch.Tensor) -> Any:
        """Apply the layer to rows [..., in], and add `more`, [..., out]."""
        return torch.ops.mkldnn._linear_pointwise.binary(rows, more, self._weight, self._bias, "add")

    def gelu(self, rows: torch.Tensor) -> Any:
        """Apply the layer to rows [..., in], and GELU to its result."""
        return torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "gelu", [], "none")

    @staticmethod
    def fed_forward(first: OneDnnLinear, second: OneDnnLinear, rows: torch.Tensor) -> Any:
        """The feed-forward part of a layer, for rows [..., in]: rows + second(GELU(first(rows)))."""
        return second.added(first.gelu(rows), rows)
