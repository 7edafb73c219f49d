"""The networks that read handwritten digits: a trunk that computes features, and what reads those."""

from __future__ import annotations

from pathlib import Path
from typing import Final, TypeVar

from safetensors import safe_open
from torch import Tensor, nn

__all__ = [
    "CLASSES",
    "FEATURES",
    "MAX_PIXEL",
    "SIDE",
    "WEIGHTS",
    "DecoderNet",
    "DigitsNet",
    "HeadNet",
    "ParityNet",
    "TrunkNet",
    "load_net",
    "load_part",
]

FEATURES: Final = 64
"""Length of the feature vector."""

CLASSES: Final = 10
"""The digits 0 to 9."""

SIDE: Final = 8
"""Height and width of an image, in pixels."""

MAX_PIXEL: Final = 16.0
"""The value of ink; paper is 0."""

WEIGHTS: Final = Path(__file__).with_name("weights") / "digits.safetensors"
"""What `inference.zoo.training.train_digits` wrote. Keys begin with ``trunk.``, ``head.``, ``parity.`` or ``decoder.``,
so that each part loads alone."""

Part = TypeVar("Part", bound=nn.Module)


class TrunkNet(nn.Module):
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


class HeadNet(nn.Linear):
    """One dense layer: FP32 [n, 64] features to FP32 [n, 10] logits, one for each digit."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)


class ParityNet(nn.Linear):
    """One dense layer: FP32 [n, 64] features to FP32 [n, 1], the logit of the digit's being odd."""

    def __init__(self) -> None:
        super().__init__(FEATURES, 1)


class DecoderNet(nn.Module):
    """Two dense layers: FP32 [n, 64] features to FP32 [n, 1, 8, 8], the image they came from, pixel values 0 to 16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 128),
            nn.ReLU(),
            nn.Linear(128, SIDE * SIDE),
            nn.Sigmoid(),
            nn.Unflatten(1, (1, SIDE, SIDE)),
        )

    def forward(self, features: Tensor) -> Tensor:
        image: Tensor = self.layers(features) * MAX_PIXEL
        return image


class DigitsNet(nn.Module):
    """Trunk and head. Takes what `TrunkNet` takes and returns FP32 [n, 10] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = TrunkNet()
        self.head = HeadNet()

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(image))
        return logits


def load_part(part: Part, name: str, device: str, weights: Path = WEIGHTS) -> Part:
    """Fill one part from its own keys, and put it on a device such as ``cpu`` or ``cuda:0``, ready to serve.

    Args:
        part: as constructed; it is changed and returned.
        name: ``trunk``, ``head``, ``parity`` or ``decoder``.
        device: where it goes.
        weights: a file that `inference.zoo.training.train_digits` wrote.

    Raises:
        RuntimeError: the file's keys of that name are not the part's.
    """
    prefix = f"{name}."
    with safe_open(weights, "pt") as file:
        own = {key[len(prefix) :]: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    part.load_state_dict(own)
    return part.to(device).eval()


def load_net(device: str, weights: Path = WEIGHTS) -> DigitsNet:
    """The trained trunk and head on a device, ready to serve."""
    net = DigitsNet()
    load_part(net.trunk, "trunk", device, weights)
    load_part(net.head, "head", device, weights)
    return net.eval()
