"""The encoder of `benchmarks.start`, which says when it has computed a batch."""

from __future__ import annotations

from typing import Any

import torch

from headwater.zoo.text import Encoder

__all__ = ["COMPUTED", "Telling"]

COMPUTED = "computed a batch"


class Telling(Encoder):
    """As `Encoder`."""

    # This module names torch, as the encoder's does: replicas that need it are forked.
    def __call__(self, *inputs: Any, **named: Any) -> dict[str, torch.Tensor]:
        """As `Encoder`'s."""
        features = super().__call__(*inputs, **named)
        print(COMPUTED, flush=True)
        return features
