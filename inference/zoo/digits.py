"""A model that reads one handwritten digit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from inference import Model, Tensor
from inference.zoo.digits_net import CLASSES, DigitsNet, load_net

__all__ = ["Digits"]

# The first of the images held out of training; it shows a two.
_TWO = [
    [0.0, 0.0, 7.0, 16.0, 14.0, 3.0, 0.0, 0.0],
    [0.0, 0.0, 9.0, 14.0, 11.0, 15.0, 0.0, 0.0],
    [0.0, 0.0, 1.0, 5.0, 0.0, 15.0, 5.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0, 16.0, 5.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 3.0, 16.0, 4.0, 0.0],
    [0.0, 0.0, 0.0, 1.0, 12.0, 14.0, 1.0, 0.0],
    [0.0, 0.0, 5.0, 12.0, 16.0, 16.0, 14.0, 1.0],
    [0.0, 0.0, 8.0, 16.0, 14.0, 10.0, 13.0, 3.0],
]


class Digits(Model):
    """Reads a handwritten digit from an image of 8 x 8 pixels.

    Inputs:
        image: FP32 [1, 8, 8], one channel, rows from the top; pixel values 0 (paper) to 16 (ink).

    Outputs:
        logits: FP32 [10], one for each digit from 0 to 9, before any softmax.
        digit: INT32 [1], the digit of the highest logit.

    Source: images of the kind that ``sklearn.datasets.load_digits`` has; the weights come from
    `inference.zoo.train_digits`.
    """

    inputs = (Tensor("image", "FP32", [1, 8, 8]),)
    outputs = (Tensor("logits", "FP32", [CLASSES]), Tensor("digit", "INT32", [1]))
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"image": [_TWO]}

    _net: DigitsNet

    def load(self, device: str) -> None:
        self._net = load_net(device)

    @torch.inference_mode()
    def __call__(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self._net(image)
        return {"logits": logits, "digit": logits.argmax(dim=1, keepdim=True).to(torch.int32)}

    def unload(self) -> None:
        del self._net
