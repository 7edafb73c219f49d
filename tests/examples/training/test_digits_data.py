"""The digits' split, images without a digit, and the area under the ROC curve."""

from __future__ import annotations

import numpy as np
import pytest

from examples.training.digits_data import LabelledImages, anomalies, auc, held_out, split


@pytest.fixture(scope="module")
def unseen() -> LabelledImages:
    return held_out()


def test_a_quarter_is_held_out_and_never_trained_on() -> None:
    trained, unseen = split()
    assert (len(trained.labels), len(unseen.labels)) == (1347, 450)
    assert not {image.tobytes() for image in trained.images} & {image.tobytes() for image in unseen.images}


class TestAnomalies:
    def test_each_kind_has_as_many_images_as_there_are_digits(self, unseen: LabelledImages) -> None:
        for images in anomalies(unseen).values():
            assert images.shape == unseen.images.shape
            assert images.dtype == np.float32
            assert (images.min(), images.max()) == (0, 16)

    def test_they_are_the_same_each_time(self, unseen: LabelledImages) -> None:
        for one, other in zip(anomalies(unseen).values(), anomalies(unseen).values(), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_permuted_images_keep_their_pixels(self, unseen: LabelledImages) -> None:
        flat = anomalies(unseen)["permuted"].reshape(450, -1)
        np.testing.assert_array_equal(np.sort(flat), np.sort(unseen.images.reshape(450, -1)))
        assert (flat != unseen.images.reshape(450, -1)).any(axis=1).all()

    def test_the_area_under_the_curve(self) -> None:
        low, high = np.array([0.0, 1.0], np.float32), np.array([2.0, 3.0], np.float32)
        assert auc(low, high) == 1
        assert auc(high, low) == 0
        assert auc(low, low) == 0.5
        assert auc(np.array([1.0], np.float32), np.array([0.0, 1.0, 2.0, 3.0], np.float32)) == 0.625
