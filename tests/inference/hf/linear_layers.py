"""What every kind of linear layers must show."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu


def check_layers(layer_class: Any, tolerance: float) -> None:
    """A kind's layers, with and without a bias, say what torch's say of any number of rows."""
    torch.manual_seed(5)
    wide, narrow = torch.nn.Linear(24, 40), torch.nn.Linear(40, 24, bias=False)
    first, second = layer_class(wide), layer_class(narrow)
    for shape in ((1, 1), (3, 16), (1, 37), (16,)):
        rows, more = torch.randn(*shape, 24), torch.randn(*shape, 40)
        with torch.inference_mode():
            expected = wide(rows)
            for found, right in (
                (first(rows), expected),
                (first.added(rows, more), expected + more),
                (layer_class.fed_forward(first, second, rows), rows + narrow(gelu(expected))),
            ):
                assert found.shape == right.shape
                assert (found - right).abs().max() < tolerance
