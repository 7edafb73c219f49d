"""The vision model that is measured: ResNet-50, 25.6 million parameters, with random weights.

Figure 3 and table 1 of https://arxiv.org/abs/1512.03385, as transformers has it.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from headwater import Model, Tensor

__all__ = ["CLASSES", "Vision"]

CLASSES: Final = 1000
DEPTH: Final = 255.0


class Vision(Model):
    """Scores of an image for a thousand classes, which mean nothing.

    Inputs:
        image: UINT8 [3, side, side].

    Outputs:
        scores: FP32 [1000].

    Args:
        side: the image's, in pixels.
        dtype: torch's name of the type of weights and activations.
        is_tiny: whether it is a network of two layers instead.
    """

    arrays = "torch"

    def __init__(self, side: int = 224, dtype: str = "float16", is_tiny: bool = False) -> None:
        self._dtype = getattr(torch, dtype)
        self._is_tiny = is_tiny
        # Declared per object, since shapes depend on options; the class variable is only where others look first.
        self.inputs = (Tensor("image", "UINT8", [3, side, side]),)  # type: ignore[misc]
        self.outputs = (Tensor("scores", "FP32", [CLASSES]),)  # type: ignore[misc]

    def load(self, device: str) -> None:
        from transformers import ResNetConfig, ResNetForImageClassification

        tiny: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
        make: Any = ResNetConfig  # its types leave out what every configuration takes
        config = make(num_labels=CLASSES, **(tiny if self._is_tiny else {}))
        torch.manual_seed(0)
        model: Any = ResNetForImageClassification(config)
        # Convolutions in FP16 are made for this layout.
        self._model = model.to(device, self._dtype, memory_format=torch.channels_last).eval()

    @torch.no_grad()
    def __call__(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = image.to(self._dtype, memory_format=torch.channels_last) / DEPTH
        return {"scores": self._model(pixels).logits.float()}
