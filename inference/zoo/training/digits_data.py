"""The handwritten digits that come with scikit-learn, and the one split of them that training and tests share.

Source: ``sklearn.datasets.load_digits``, the test part of the UCI set "Optical Recognition of Handwritten Digits"
(Alpaydin and Kaynak, 1998): 1,797 images of 8 x 8 pixels, values 0 to 16.

scikit-learn is imported where it is used: serving must not need it.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

__all__ = ["HELD_OUT_FRACTION", "SPLIT_SEED", "LabelledImages", "held_out", "split"]

HELD_OUT_FRACTION: Final = 0.25
SPLIT_SEED: Final = 0


class LabelledImages(NamedTuple):
    """Some of the images, with what they show."""

    images: np.ndarray[Any, np.dtype[np.float32]]
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
