"""Models that read a handwritten digit: `Digits` alone, or `Trunk` and the heads `Digit`, `Parity`, `Reconstruction`.

The four are the steps of a pipeline: the heads take the ``features`` that the trunk computes once. Images are of the
kind that ``sklearn.datasets.load_digits`` has; the weights come from `inference.zoo.training.train_digits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from inference import Model, Tensor
from inference.zoo.digits_net import (
    CLASSES,
    FEATURES,
    SIDE,
    DecoderNet,
    DigitsNet,
    HeadNet,
    ParityNet,
    TrunkNet,
    load_net,
    load_part,
)

__all__ = ["Digit", "Digits", "Parity", "Reconstruction", "Trunk"]

_IMAGE = Tensor("image", "FP32", [1, SIDE, SIDE])
_FEATURES = Tensor("features", "FP32", [FEATURES])

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

    `Trunk` and `Digit` together compute the same.
    """

    inputs = (_IMAGE,)
    outputs = (Tensor("logits", "FP32", [CLASSES]), Tensor("digit", "INT32", [1]))
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"image": [_TWO]}

    _net: DigitsNet

    def load(self, device: str) -> None:
        self._net = load_net(device)

    @torch.inference_mode()
    def __call__(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return _read(self._net(image))

    def unload(self) -> None:
        del self._net


class Trunk(Model):
    """Computes the features that the heads read.

    Inputs:
        image: FP32 [1, 8, 8], as `Digits` takes it.

    Outputs:
        features: FP32 [64], none negative.
    """

    inputs = (_IMAGE,)
    outputs = (_FEATURES,)
    arrays = "torch"
    example = Digits.example

    _net: TrunkNet

    def load(self, device: str) -> None:
        self._net = load_part(TrunkNet(), "trunk", device)

    @torch.no_grad()  # not inference_mode: its heads share what it returns, and torch then counts writes into it
    def __call__(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": self._net(image)}

    def unload(self) -> None:
        del self._net


class Digit(Model):
    """Tells which digit it is.

    Inputs:
        features: FP32 [64], of `Trunk`.

    Outputs:
        logits: FP32 [10], one for each digit from 0 to 9, before any softmax.
        digit: INT32 [1], the digit of the highest logit.
    """

    inputs = (_FEATURES,)
    outputs = Digits.outputs
    arrays = "torch"

    _net: HeadNet

    def load(self, device: str) -> None:
        self._net = load_part(HeadNet(), "head", device)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return _read(self._net(features))

    def unload(self) -> None:
        del self._net


class Parity(Model):
    """Tells whether the digit is odd.

    Inputs:
        features: FP32 [64], of `Trunk`.

    Outputs:
        odd_probability: FP32 [1], 0 to 1.
        parity: BYTES [1], ``odd`` if that is above one half, ``even`` otherwise.
    """

    inputs = (_FEATURES,)
    outputs = (Tensor("odd_probability", "FP32", [1]), Tensor("parity", "BYTES", [1]))
    arrays = "torch"

    _net: ParityNet

    def load(self, device: str) -> None:
        self._net = load_part(ParityNet(), "parity", device)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor) -> dict[str, Any]:
        odd = self._net(features).sigmoid()
        words = [[b"odd" if is_odd else b"even"] for (is_odd,) in (odd > 0.5).tolist()]
        return {"odd_probability": odd, "parity": np.array(words, object)}

    def unload(self) -> None:
        del self._net


class Reconstruction(Model):
    """Draws the image again from its features; what it can't draw was no digit.

    Inputs:
        features: FP32 [64], of `Trunk`.
        image: FP32 [1, 8, 8], the one that the features were computed from.

    Outputs:
        reconstruction: FP32 [1, 8, 8], pixel values 0 to 16.
        anomaly_score: FP32 [1], the root of the mean squared difference between the two images, in pixel values: 0 for
            the same image. The area under the ROC curve, held-out digits against as many others, is 1.00 for uniform
            noise and for permuted pixels, 0.998 for salt and pepper on a quarter of a digit's pixels, but 0.87 for
            images of one grey; `inference.zoo.training.digits_anomalies` has the definitions.
    """

    inputs = (_FEATURES, _IMAGE)
    outputs = (Tensor("reconstruction", "FP32", [1, SIDE, SIDE]), Tensor("anomaly_score", "FP32", [1]))
    arrays = "torch"

    _net: DecoderNet

    def load(self, device: str) -> None:
        self._net = load_part(DecoderNet(), "decoder", device)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor, image: torch.Tensor) -> dict[str, torch.Tensor]:
        drawn = self._net(features)
        score = (drawn - image).square().mean(dim=(1, 2, 3)).sqrt()
        return {"reconstruction": drawn, "anomaly_score": score.unsqueeze(1)}

    def unload(self) -> None:
        del self._net


def _read(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """What `Digits` and `Digit` return: FP32 [n, 10] logits, and the digits INT32 [n, 1]."""
    return {"logits": logits, "digit": logits.argmax(dim=1, keepdim=True).to(torch.int32)}
