"""The network that reads handwritten digits: a trunk that computes features, and a linear head that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["CLASSES", "FEATURES", "WEIGHTS", "DigitsNet", "Trunk", "load_net"]

FEATURES: Final = 64
"""Length of the feature vector."""

CLASSES: Final = 10
"""The digits 0 to 9."""

WEIGHTS: Final = Path(__file__).with_name("weights") / "digits.safetensors"
"""What `inference.zoo.train_digits` wrote. Keys begin with ``trunk.`` or ``head.``, so that either part loads alone."""

MAX_PIXEL: Final = 16.0


class Trunk(nn.Module):
    """Two convolutions at the full 8 x 8 resolution, one pooling, one dense layer.

    Takes FP32 [n, 1, 8, 8], pixel values 0 to 16 (it normalises them itself, so that no caller can forget to), and
    returns FP32 [n, 64] features, none negative.
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

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.layers(image / MAX_PIXEL)
        return features


class DigitsNet(nn.Module):
    """Trunk and head. Takes what `Trunk` takes and returns FP32 [n, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(image))
        return logits


def load_net(device: str, weights: Path = WEIGHTS) -> DigitsNet:
    """The trained network on a device such as ``cpu`` or ``cuda:0``, ready to serve."""
    net = DigitsNet()
    net.load_state_dict(load_file(weights))
    return net.to(device).eval()
