"""Which cached tokens each sequence sees, when sequences of different lengths take a step together."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from inference.errors import ReplicaError
from inference.lm.transformers_parts import layers_of

__all__ = ["AttentionMask", "StepMask"]

AttentionMask: TypeAlias = Tensor | dict[str, Tensor]
"""One for all layers, or one for each kind."""

FULL, SLIDING = "full_attention", "sliding_attention"


class StepMask:
    """Makes the attention mask of a step: one new token a sequence, at positions of their own.

    transformers can only make masks in which all rows are at one position; it passes on one that has four dimensions.

    Args:
        config: the model's.
        dtype: of its activations.
        device: where it is.

    Raises:
        ReplicaError: some of its layers attend in a way that a mask over all cached tokens can't express.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        kinds, options = layers_of(config)
        for layer, kind in enumerate(kinds):
            if kind not in (FULL, SLIDING):
                raise ReplicaError(
                    f"model: expected layers of {FULL} or {SLIDING}, got {kind} in layer {layer}; "
                    "the slot engine can't cache it"
                )
        windows = {one["sliding_window"] for one in options if "sliding_window" in one}
        if len(windows) > 1:
            raise ReplicaError(f"model: expected sliding layers of one window, got {sorted(windows)}")
        self._window: int = windows.pop() if windows else 0
        self._kinds = set(kinds)
        self._dtype = dtype
        self._device = device

    def __call__(self, positions: Tensor, *, longest: int) -> AttentionMask:
        """The mask.

        Args:
            positions: int64 [sequences, 1], of the new tokens.
            longest: the greatest of them.

        Returns:
            What is added to attention scores, [sequences, 1, 1, longest + 1]: 0 where a sequence sees a token, the
            least number otherwise. If the model mixes kinds of layers, one for each kind.
        """
        cached = torch.arange(longest + 1, device=self._device)
        hidden = cached > positions
        masks = {}
        for kind in self._kinds:
            hides = hidden | (cached <= positions - self._window) if kind == SLIDING else hidden
            mask = torch.zeros(hides.shape, dtype=self._dtype, device=self._device)
            masks[kind] = mask.masked_fill_(hides, torch.finfo(self._dtype).min)[:, None, None, :]
        return masks if len(masks) > 1 else masks.popitem()[1]
