"""The handwritten digits of scikit-learn in the split that training and tests share, and images that show no digit.

Source: ``sklearn.datasets.load_digits``, the test part of the UCI set "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak, 1998): 1,797 images of 8 x 8 pixels, values 0 to 16.

scikit-learn is imported where it is used, because serving must not need it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["SPLIT_SEED", "Floats", "LabelledImages", "anomalies", "auc", "held_out", "split"]

HELD_OUT_FRACTION: Final = 0.25
SPLIT_SEED: Final = 0
ANOMALY_SEED: Final = 0
SALT_AND_PEPPER: Final = 0.25
"""The fraction of a digit's pixels that become paper or ink."""

Floats = np.ndarray[Any, np.dtype[np.float32]]


class LabelledImages(NamedTuple):
    """Some of the images, with the digits that they show."""

    images: Floats
    """FP32 [n, 1, 8, 8], pixel values 0 to 16."""
    labels: np.ndarray[Any, np.dtype[np.int64]]
    """INT64 [n], 0 to 9."""


def split() -> tuple[LabelledImages, LabelledImages]:
    """The 1,347 images to train on and the 450 held out, every digit in the same proportion in both."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = bunch.images.astype(np.float32)[:, np.newaxis]
    labels = bunch.target.astype(np.int64)
    train_images, held_images, train_labels, held_labels = train_test_split(
        images, labels, test_size=HELD_OUT_FRACTION, random_state=SPLIT_SEED, stratify=labels
    )
    return LabelledImages(train_images, train_labels), LabelledImages(held_images, held_labels)


def held_out() -> LabelledImages:
    """The 450 images that training never sees."""
    return split()[1]


def anomalies(digits: LabelledImages) -> dict[str, Floats]:
    """Images that show no digit, by kind, as many of each kind as there are digits: FP32 [n, 1, 8, 8], whole values 0
    to 16.

    - ``noise``: every pixel uniform and independent.
    - ``permuted``: each digit with its 64 pixels in a random order, which differs from image to image.
    - ``constant``: all pixels of an image alike, values evenly from 0 to 16.
    - ``salt and pepper``: each digit with a quarter of its pixels replaced by 0 or 16 with equal probability. It still
      looks like a digit, so this kind is the hardest to detect.
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


def auc(ordinary: Floats, anomalous: Floats) -> float:
    """The probability that an anomalous image has a higher score than an ordinary image; a tie counts as 0.5.

    This is the area under the curve of the receiver operating characteristic (Hanley and McNeil, 1982). Takes the
    scores, FP32 [n] and FP32 [m].
    """
    higher = anomalous[:, None] > ordinary[None, :]
    tied = anomalous[:, None] == ordinary[None, :]
    return float(higher.mean() + tied.mean() / 2)
