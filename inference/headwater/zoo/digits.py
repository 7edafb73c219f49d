"""Models that read a handwritten digit: `Digits` alone, or `Trunk` and the heads `Digit`, `Parity`, `Reconstruction`.

The trunk and the heads are the steps of a pipeline: the heads take the ``features`` that the trunk computes once.
Images have the format of ``sklearn.datasets.load_digits``; `examples/training/train_digits.py` trains the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from headwater import Model, Tensor

__all__ = ["Digit", "Digits", "Parity", "Reconstruction", "Trunk"]

FEATURES: Final = 64
"""Length of the feature vector."""
CLASSES: Final = 10
"""Number of classes: the digits 0 to 9."""
SIDE: Final = 8
"""Height and width of an image, in pixels."""
MAX_PIXEL: Final = 16.0
"""The value of ink; paper is 0."""
WEIGHTS: Final = Path(__file__).with_name("weights") / "digits.safetensors"
"""Its keys begin with ``trunk.``, ``head.``, ``parity.`` or ``decoder.``, so that each part can be loaded alone."""

_IMAGE = Tensor("image", "FP32", [1, SIDE, SIDE])
_FEATURES = Tensor("features", "FP32", [FEATURES])

Part = TypeVar("Part", bound=nn.Module)

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


class TrunkNet(nn.Module):
    """Two convolutions at the full resolution, a pooling layer and a dense layer.

    Takes FP32 [n, 1, 8, 8], pixel values 0 to 16, which it normalises. Returns FP32 [n, 64] features, never negative.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(64 * 4 * 4, FEATURES),
            nn.ReLU(),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.layers(image / MAX_PIXEL)
        return features


class DecoderNet(nn.Module):
    """Two dense layers: FP32 [n, 64] features to FP32 [n, 1, 8, 8], the images that they came from, pixel values 0 to
    16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 128),
            nn.ReLU(),
            nn.Linear(128, SIDE * SIDE),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, SIDE, SIDE)),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.layers(features) * MAX_PIXEL
        return image


class DigitsNet(nn.Module):
    """Trunk and head: takes the input of `TrunkNet` and returns FP32 [n, 10] logits, for the digits 0 to 9."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = TrunkNet()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.trunk(image))
        return logits


def load_part(part: Part, name: str, device: str) -> Part:
    """Load the weights of a part of the network into it, and make it ready to serve on a device.

    Raises:
        RuntimeError: `WEIGHTS` lacks a weight of the part ``name``, or has a weight of it that the network lacks.
    """
    prefix = f"{name}."
    with safe_open(WEIGHTS, "pt") as file:
        weights = {key[len(prefix) :]: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    part.load_state_dict(weights)
    return part.to(device).eval()


class Digits(Model):
    """Reads a handwritten digit from an image of 8 x 8 pixels.

    Inputs:
        image: FP32 [1, 8, 8], one channel, rows from the top; pixel values 0 (paper) to 16 (ink).

    Outputs:
        logits: FP32 [10], for the digits 0 to 9, before any softmax.
        digit: INT32 [1], the digit of the highest logit.
    """

    inputs = (_IMAGE,)
    outputs = (Tensor("logits", "FP32", [CLASSES]), Tensor("digit", "INT32", [1]))
    arrays = "torch"
    example: ClassVar[Mapping[str, Any]] = {"image": [_TWO]}

    def load(self, device: str) -> None:
        self._net = DigitsNet().eval()
        load_part(self._net.trunk, "trunk", device)
        load_part(self._net.head, "head", device)

    @torch.inference_mode()
    def __call__(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return _read(self._net(image))


class Trunk(Model):
    """Computes the features that the heads read.

    Inputs:
        image: FP32 [1, 8, 8], as `Digits` takes it.

    Outputs:
        features: FP32 [64], never negative.
    """

    inputs = (_IMAGE,)
    outputs = (_FEATURES,)
    arrays = "torch"
    example = Digits.example

    def load(self, device: str) -> None:
        self._net = load_part(TrunkNet(), "trunk", device)

    @torch.no_grad()  # not inference_mode: the heads share the features, and torch must count writes into them
    def __call__(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"features": self._net(image)}


class Digit(Model):
    """Tells which digit it is.

    Inputs:
        features: FP32 [64], from `Trunk`.

    Outputs:
        logits: FP32 [10], as of `Digits`.
        digit: INT32 [1], as of `Digits`.
    """

    inputs = (_FEATURES,)
    outputs = Digits.outputs
    arrays = "torch"

    def load(self, device: str) -> None:
        self._net = load_part(nn.Linear(FEATURES, CLASSES), "head", device)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        return _read(self._net(features))


class Parity(Model):
    """Tells whether the digit is odd.

    Inputs:
        features: FP32 [64], from `Trunk`.

    Outputs:
        odd_probability: FP32 [1], 0 to 1.
        parity: BYTES [1], ``odd`` if the probability is above 0.5, ``even`` otherwise.
    """

    inputs = (_FEATURES,)
    outputs = (Tensor("odd_probability", "FP32", [1]), Tensor("parity", "BYTES", [1]))
    arrays = "torch"

    def load(self, device: str) -> None:
        self._net = load_part(nn.Linear(FEATURES, 1), "parity", device)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor) -> dict[str, Any]:
        odd = self._net(features).sigmoid()
        words = [[b"odd" if is_odd else b"even"] for (is_odd,) in (odd > 0.5).tolist()]
        return {"odd_probability": odd, "parity": np.array(words, object)}


class Reconstruction(Model):
    """Reconstructs the image from its features; an image that it can't reconstruct shows no digit.

    Inputs:
        features: FP32 [64], from `Trunk`.
        image: FP32 [1, 8, 8], the image that the features were computed from.

    Outputs:
        reconstruction: FP32 [1, 8, 8], pixel values 0 to 16.
        anomaly_score: FP32 [1], the root of the mean squared difference between the two images, in pixel values: 0 for
            the same image. README.md in this folder says how well the score finds images without a digit; it misses
            uniformly light grey images.
    """

    inputs = (_FEATURES, _IMAGE)
    outputs = (Tensor("reconstruction", "FP32", [1, SIDE, SIDE]), Tensor("anomaly_score", "FP32", [1]))
    arrays = "torch"

    def load(self, device: str) -> None:
        self._net = load_part(DecoderNet(), "decoder", device)

    @torch.inference_mode()
    def __call__(self, features: torch.Tensor, image: torch.Tensor) -> dict[str, torch.Tensor]:
        drawn = self._net(features)
        score = (drawn - image).square().mean(dim=(1, 2, 3)).sqrt()
        return {"reconstruction": drawn, "anomaly_score": score.unsqueeze(1)}


def _read(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logits": logits, "digit": logits.argmax(dim=1, keepdim=True).to(torch.int32)}
