"""The digits models: what they declare, how well they do, and that serving them needs nothing that training needs."""

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors import safe_open

from examples.training.digits_data import SPLIT_SEED, Floats, LabelledImages, anomalies, auc, held_out
from headwater.signature import Signature, TensorSpec
from headwater.zoo.digits import FEATURES, WEIGHTS, DecoderNet, Digit, Digits, Parity, Reconstruction, Trunk, load_part

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def model() -> Iterator[Digits]:
    model = Digits()
    model.load("cpu")
    yield model
    model.unload()


@pytest.fixture(scope="module")
def unseen() -> LabelledImages:
    return held_out()


def read(model: Digits, images: LabelledImages) -> float:
    """The fraction of the images that the model reads rightly."""
    digit = model(image=torch.from_numpy(images.images))["digit"]
    return float((digit[:, 0] == torch.from_numpy(images.labels)).double().mean())


def test_it_reads_at_least_97_of_100_digits_it_has_never_seen(model: Digits, unseen: LabelledImages) -> None:
    assert read(model, unseen) >= 0.97


def test_the_accuracy_noted_in_the_weights_is_the_one_measured(model: Digits, unseen: LabelledImages) -> None:
    with safe_open(WEIGHTS, "pt") as weights:
        metadata = weights.metadata()
    half_an_image = 0.5 / len(unseen.labels)
    assert float(metadata["accuracy"]) == pytest.approx(read(model, unseen), abs=half_an_image)


def test_the_weights_say_which_split_and_which_torch_they_come_from() -> None:
    with safe_open(WEIGHTS, "pt") as weights:
        metadata = weights.metadata()
    assert metadata["split_seed"] == str(SPLIT_SEED)
    assert metadata["torch"]


def test_the_weights_are_small() -> None:
    assert WEIGHTS.stat().st_size < 500_000


def test_outputs_have_the_declared_shapes_and_datatypes(model: Digits) -> None:
    outputs = model(image=torch.zeros(3, 1, 8, 8))
    assert (outputs["logits"].shape, outputs["logits"].dtype) == ((3, 10), torch.float32)
    assert (outputs["digit"].shape, outputs["digit"].dtype) == ((3, 1), torch.int32)


def test_the_digit_is_the_one_with_the_highest_logit(model: Digits, unseen: LabelledImages) -> None:
    outputs = model(image=torch.from_numpy(unseen.images))
    assert torch.equal(outputs["digit"][:, 0].long(), outputs["logits"].argmax(dim=1))


def test_the_same_images_give_the_same_bits(model: Digits, unseen: LabelledImages) -> None:
    images = torch.from_numpy(unseen.images[:32])
    assert torch.equal(model(image=images)["logits"], model(image=images)["logits"])


def test_a_row_does_not_depend_on_its_neighbours(model: Digits, unseen: LabelledImages) -> None:
    images = torch.from_numpy(unseen.images[:32])
    together = model(image=images)["logits"]
    alone = torch.cat([model(image=image[None])["logits"] for image in images])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-5)


def test_no_gradient_is_recorded(model: Digits) -> None:
    assert not model(image=torch.zeros(1, 1, 8, 8))["logits"].requires_grad


def test_its_signature() -> None:
    signature = Signature.of(Digits(), name="digits", max_batch_size=64)
    assert signature.inputs == (TensorSpec("image", "FP32", (1, 8, 8)),)
    assert signature.outputs == (TensorSpec("logits", "FP32", (10,)), TensorSpec("digit", "INT32", (1,)))
    assert signature.description == "Reads a handwritten digit from an image of 8 x 8 pixels."


def test_its_example_is_the_first_image_held_out_and_is_read_rightly(model: Digits, unseen: LabelledImages) -> None:
    example = torch.tensor(Signature.of(model, name="digits", max_batch_size=1).example_row()["image"])
    assert torch.equal(example, torch.from_numpy(unseen.images[0]))
    assert model(image=example[None])["digit"].item() == unseen.labels[0] == 2


def test_serving_it_needs_no_scikit_learn() -> None:
    code = (
        "import sys; from headwater.zoo.digits import Digits; Digits().load('cpu'); "
        "sys.exit(any(name in sys.modules for name in ('sklearn', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def trunk() -> Iterator[Trunk]:
    trunk = Trunk()
    trunk.load("cpu")
    yield trunk
    trunk.unload()


@pytest.fixture(scope="module")
def reconstruction() -> Iterator[Reconstruction]:
    head = Reconstruction()
    head.load("cpu")
    yield head
    head.unload()


@pytest.fixture(scope="module")
def features(trunk: Trunk, unseen: LabelledImages) -> torch.Tensor:
    """Of all images held out."""
    return trunk(image=torch.from_numpy(unseen.images))["features"]


class TestTrunkAndDigit:
    def test_together_they_are_the_whole_model(
        self, model: Digits, features: torch.Tensor, unseen: LabelledImages
    ) -> None:
        head = Digit()
        head.load("cpu")
        whole, parts = model(image=torch.from_numpy(unseen.images)), head(features=features)
        assert whole.keys() == parts.keys()
        assert (whole["logits"] - parts["logits"]).abs().max() < 1e-6
        assert torch.equal(whole["digit"], parts["digit"])

    def test_features_are_not_negative(self, features: torch.Tensor) -> None:
        assert (features.shape, features.dtype) == ((450, FEATURES), torch.float32)
        assert features.min() >= 0

    def test_signatures(self) -> None:
        trunk = Signature.of(Trunk(), name="trunk", max_batch_size=64)
        head = Signature.of(Digit(), name="digit", max_batch_size=64)
        assert trunk.inputs == (TensorSpec("image", "FP32", (1, 8, 8)),)
        assert trunk.outputs == head.inputs == (TensorSpec("features", "FP32", (64,)),)
        assert head.outputs == Signature.of(Digits(), name="digits", max_batch_size=64).outputs


class TestParity:
    @pytest.fixture
    def answers(self, features: torch.Tensor) -> tuple[Floats, list[bytes]]:
        head = Parity()
        head.load("cpu")
        outputs = head(features=features)
        return outputs["odd_probability"].numpy(), outputs["parity"][:, 0].tolist()

    def test_it_tells_at_least_97_of_100(self, answers: tuple[Floats, list[bytes]], unseen: LabelledImages) -> None:
        right = [
            word == (b"odd" if label % 2 else b"even") for word, label in zip(answers[1], unseen.labels, strict=True)
        ]
        assert np.mean(right) >= 0.97  # measured: 0.987

    def test_the_word_agrees_with_the_probability(self, answers: tuple[Floats, list[bytes]]) -> None:
        probability, words = answers
        assert ((probability >= 0) & (probability <= 1)).all()
        assert words == [b"odd" if odd > 0.5 else b"even" for odd in probability[:, 0]]

    def test_its_signature(self) -> None:
        signature = Signature.of(Parity(), name="parity", max_batch_size=64)
        assert signature.inputs == (TensorSpec("features", "FP32", (64,)),)
        assert signature.outputs == (TensorSpec("odd_probability", "FP32", (1,)), TensorSpec("parity", "BYTES", (1,)))


class TestReconstruction:
    def test_its_error_is_less_than_a_third_of_the_mean_images(
        self, reconstruction: Reconstruction, features: torch.Tensor, unseen: LabelledImages
    ) -> None:
        images = torch.from_numpy(unseen.images)
        drawn = reconstruction(features=features, image=images)["reconstruction"]
        error = (drawn - images).square().mean()
        assert error < 6  # measured: 5.67
        assert error < (images - images.mean(dim=0)).square().mean() / 3  # 18.9

    def test_pixel_values_are_those_of_an_image(
        self, reconstruction: Reconstruction, features: torch.Tensor, unseen: LabelledImages
    ) -> None:
        drawn = reconstruction(features=features, image=torch.from_numpy(unseen.images))["reconstruction"]
        assert drawn.shape == (450, 1, 8, 8)
        assert drawn.min() >= 0
        assert 8 < drawn.max() <= 16

    def test_the_score_is_the_root_mean_squared_difference_of_pixels(
        self, reconstruction: Reconstruction, features: torch.Tensor
    ) -> None:
        drawn = reconstruction(features=features[:2], image=torch.zeros(2, 1, 8, 8))["reconstruction"]
        offset = torch.tensor([0.0, 3.0]).view(2, 1, 1, 1)
        score = reconstruction(features=features[:2], image=drawn + offset)["anomaly_score"]
        torch.testing.assert_close(score, torch.tensor([[0.0], [3.0]]))

    @pytest.mark.parametrize(
        ("kind", "least"),
        # measured: 1.0000, 1.0000, 0.8658, 0.9985
        [("noise", 0.999), ("permuted", 0.999), ("constant", 0.84), ("salt and pepper", 0.99)],
    )
    def test_the_score_tells_digits_from_other_images(
        self, trunk: Trunk, reconstruction: Reconstruction, unseen: LabelledImages, kind: str, least: float
    ) -> None:
        def scores(images: Floats) -> Floats:
            image = torch.from_numpy(images)
            score: Floats = reconstruction(image=image, **trunk(image=image))["anomaly_score"][:, 0].numpy()
            return score

        assert auc(scores(unseen.images), scores(anomalies(unseen)[kind])) >= least

    def test_its_signature(self) -> None:
        signature = Signature.of(Reconstruction(), name="reconstruction", max_batch_size=64)
        assert signature.inputs == (TensorSpec("features", "FP32", (64,)), TensorSpec("image", "FP32", (1, 8, 8)))
        assert signature.outputs == (
            TensorSpec("reconstruction", "FP32", (1, 8, 8)),
            TensorSpec("anomaly_score", "FP32", (1,)),
        )


def test_a_part_that_the_weights_lack_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight"):
        load_part(DecoderNet(), "painter", "cpu")
