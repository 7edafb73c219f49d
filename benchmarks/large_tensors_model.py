"""Models that cost little on a large tensor, so that its way is measured: an image in, its means or itself out."""

from __future__ import annotations

from typing import Any

import numpy as np

from headwater import Model, Tensor

__all__ = ["IMAGE_SHAPE", "ChannelMeans", "Echo", "Means"]

IMAGE_SHAPE = (3, 224, 224)

Floats = np.ndarray[Any, np.dtype[np.float32]]


class ChannelMeans(Model):
    """The mean of each channel.

    Inputs:
        image: FP32 [3, 224, 224].

    Outputs:
        means: FP32 [3].
    """

    inputs = (Tensor("image", "FP32", list(IMAGE_SHAPE)),)
    outputs = (Tensor("means", "FP32", [IMAGE_SHAPE[0]]),)

    def __call__(self, image: Floats) -> dict[str, Floats]:
        return {"means": image.mean(axis=(2, 3))}


class Means(Model):
    """A head of a pipeline whose trunk is `ChannelMeans`: what it gets.

    Inputs:
        means: FP32 [3].

    Outputs:
        found: FP32 [3].
    """

    inputs = (Tensor("means", "FP32", [IMAGE_SHAPE[0]]),)
    outputs = (Tensor("found", "FP32", [IMAGE_SHAPE[0]]),)

    def __call__(self, means: Floats) -> dict[str, Floats]:
        return {"found": means}


class Echo(Model):
    """The image itself.

    Inputs:
        image: FP32 [3, 224, 224].

    Outputs:
        image: FP32 [3, 224, 224].
    """

    inputs = (Tensor("image", "FP32", list(IMAGE_SHAPE)),)
    outputs = (Tensor("image", "FP32", list(IMAGE_SHAPE)),)

    def __call__(self, image: Floats) -> dict[str, Floats]:
        return {"image": image}
