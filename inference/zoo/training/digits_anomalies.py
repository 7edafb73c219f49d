"""Images that are no digits, and how well a score tells them from digits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from inference.zoo.training.digits_data import LabelledImages

__all__ = ["ANOMALY_SEED", "Images", "Scores", "anomalies", "auc"]

ANOMALY_SEED: Final = 0
SALT_AND_PEPPER: Final = 0.25
"""The fraction of a digit's pixels that become paper or ink."""

Images = np.ndarray[Any, np.dtype[np.float32]]
Scores = np.ndarray[Any, np.dtype[np.float32]]


def anomalies(digits: LabelledImages) -> dict[str, Images]:
    """As many images of each kind as there are digits; FP32 [n, 1, 8, 8], whole pixel values 0 to 16, as digits have.

    The kinds:

    - ``noise``: every pixel uniform and independent.
    - ``permuted``: each digit with its 64 pixels in a random order, another for each.
    - ``constant``: all pixels of an image alike, values evenly from 0 to 16.
    - ``salt and pepper``: each digit with a quarter of its pixels replaced by 0 or 16, evenly likely; a digit still, so
      the hardest to tell.
    """
    random = np.random.default_rng(ANOMALY_SEED)
    shape = digits.images.shape
    noise = random.integers(0, 17, shape).astype(np.float32)
    permuted = random.permuted(digits.images.reshape(len(digits.images), -1), axis=1).reshape(shape)
    levels = np.linspace(0, 16, len(digits.images)).round().astype(np.float32)
    constant = np.broadcast_to(levels[:, None, None, None], shape).copy()
    hit = random.random(shape) < SALT_AND_PEPPER
    specks = random.choice(np.array([0, 16], np.float32), shape)
    return {
        "noise": noise,
        "permuted": permuted,
        "constant": constant,
        "salt and pepper": np.where(hit, specks, digits.images),
    }


def auc(ordinary: Scores, anomalous: Scores) -> float:
    """The probability that an anomalous image has a higher score than an ordinary one, a tie counting one half.

    This is the area under the curve of the receiver operating characteristic (Hanley and McNeil, 1982). Takes the
    scores, FP32 [n] and FP32 [m].
    """
    higher = anomalous[:, None] > ordinary[None, :]
    tied = anomalous[:, None] == ordinary[None, :]
    return float(higher.mean() + tied.mean() / 2)
