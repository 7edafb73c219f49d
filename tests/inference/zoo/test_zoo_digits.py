"""The model Digits: what it declares, how well it reads, and that serving it needs nothing that training needs."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from safetensors import safe_open

from inference.signature import Signature, TensorSpec
from inference.zoo.digits import Digits
from inference.zoo.digits_data import SPLIT_SEED, LabelledImages, held_out, split
from inference.zoo.digits_net import FEATURES, WEIGHTS, load_net


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


def test_a_quarter_is_held_out_and_never_trained_on() -> None:
    trained, unseen = split()
    assert (len(trained.labels), len(unseen.labels)) == (1347, 450)
    assert not {image.tobytes() for image in trained.images} & {image.tobytes() for image in unseen.images}


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


def test_trunk_and_head_are_the_network(unseen: LabelledImages) -> None:
    net = load_net("cpu")
    images = torch.from_numpy(unseen.images[:4])
    with torch.inference_mode():
        features = net.trunk(images)
        assert features.shape == (4, FEATURES)
        assert torch.equal(net.head(features), net(images))


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
        "import sys; from inference.zoo.digits import Digits; Digits().load('cpu'); "
        "sys.exit(any(name in sys.modules for name in ('sklearn', 'scipy', 'inference.zoo.digits_data')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
