"""Image classification agrees with transformers' pipeline, for files of any size, in base64 too."""

from __future__ import annotations

import base64
import io
import json
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageFile

from headwater.errors import BadInput
from headwater.hf.images import MOST_PIXELS
from headwater.model import Model
from headwater.runtime.loader import load_model
from tests.inference.hf.folders import pipeline, vit

pytestmark = pytest.mark.heavy
LABELS = ("boat", "port")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vit")
    return vit(path, LABELS)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    made = load_model(f"hf:{folder}", {})
    made.load("cpu")
    return made


def images() -> list[Image.Image]:
    draw = np.random.default_rng(6)
    sizes = [(20, 30, 3), (16, 16, 3), (41, 9, 3)]
    return [Image.fromarray(draw.integers(0, 255, size, np.uint8)) for size in sizes]


def file(image: Image.Image, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    image.save(written, kind)
    return written.getvalue()


def scores(model: Model, *files: bytes) -> Any:
    return model(image=np.array([[one] for one in files], object))["scores"].numpy()


def test_scores_are_the_pipelines(folder: Path, model: Model) -> None:
    given = images()
    got = scores(model, *map(file, given))
    said = pipeline("image-classification", str(folder))(given)
    expected = [[next(one["score"] for one in each if one["label"] == label) for label in LABELS] for each in said]
    assert np.abs(got - np.array(expected)).max() < 1e-4
    assert np.ptp(got[:, 0]) > 0.01


def test_a_photo_is_turned_as_its_exif_says_like_in_the_pipeline(folder: Path, model: Model) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    written = io.BytesIO()
    images()[0].save(written, "PNG", exif=exif)
    (said,) = pipeline("image-classification", str(folder))([base64.b64encode(written.getvalue()).decode()])
    expected = [next(one["score"] for one in said if one["label"] == label) for label in LABELS]
    assert np.abs(scores(model, written.getvalue())[0] - expected).max() < 1e-4
    assert np.abs(scores(model, file(images()[0]))[0] - expected).max() > 1e-3


def test_weights_of_16_bits_take_images_too(model: Model, tmp_path: Path) -> None:
    half = vit(tmp_path, LABELS)
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    of_half = load_model(f"hf:{half}", {})
    of_half.load("cpu")
    files = [file(image) for image in images()]
    assert np.abs(scores(of_half, *files) - scores(model, *files)).max() < 0.05


def test_base64_and_data_urls_are_the_same(model: Model) -> None:
    plain = file(images()[0])
    coded = base64.b64encode(plain)
    got = scores(model, plain, coded, b"data:image/png;base64," + coded)
    assert np.ptp(got, axis=0).max() < 1e-6


def bits(width: int, height: int, kind: str = "PNG") -> bytes:
    """A black image of one bit for each pixel."""
    return file(Image.new("1", (width, height)), kind)


def test_an_image_of_the_most_pixels_is_taken(model: Model) -> None:
    assert scores(model, bits(5_000, MOST_PIXELS // 5_000)).shape == (1, 2)


@pytest.mark.parametrize("height", [MOST_PIXELS // 5_000 + 1, 20_000, 40_000])
def test_an_image_of_more_pixels_is_refused_before_it_is_unpacked(
    model: Model, monkeypatch: pytest.MonkeyPatch, height: int
) -> None:
    packed = bits(5_000, height)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was unpacked"))
    with pytest.raises(BadInput, match=rf"input 'image': expected at most {MOST_PIXELS} pixels.*{5_000 * height}"):
        scores(model, packed)


def tiled(width: int, height: int) -> bytes:
    """The header of a TIFF of 16 x 16 grey pixels in one packed tile."""
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: width, 323: height, 324: 200, 325: 8}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(100)


def test_a_tile_of_more_pixels_is_refused(model: Model) -> None:
    with pytest.raises(BadInput, match=rf"at most {MOST_PIXELS} pixels, got {8_000 * 5_008} in an image of 16 x 16"):
        scores(model, tiled(8_000, 5_008))
    with pytest.raises(BadInput, match="that Pillow can't read"):  # there are no pixels, for which it looks
        scores(model, tiled(8_000, 4_992))


@pytest.mark.parametrize("kind", ["ICO", "ICNS", "EPS"])
def test_files_that_hold_others_or_programs_are_refused(model: Model, kind: str) -> None:
    with pytest.raises(BadInput, match="PNG or JPEG file"):
        scores(model, file(Image.new("RGB", (64, 64)), kind))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_other_formats_are_read(model: Model, kind: str) -> None:
    assert scores(model, file(images()[0], kind)).shape == (1, 2)


def test_only_one_image_is_unpacked_at_a_time(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Image.Image]] = []
    most = 0
    load = ImageFile.ImageFile.load

    def watched(image: ImageFile.ImageFile) -> Any:
        nonlocal most
        alive.append(weakref.ref(image))
        most = max(most, sum(one() not in (None, image) for one in alive))
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", watched)
    assert scores(model, *[file(image) for image in images()]).shape == (3, 2)
    assert alive
    assert most == 0


def test_a_text_of_spaces_is_refused_at_once(model: Model) -> None:
    with pytest.raises(BadInput, match="PNG or JPEG file, got 4000017 bytes"):
        scores(model, b"A" * 16 + b" " * 4_000_000 + b"!")  # hours, if its work were quadratic


@pytest.mark.parametrize(
    ("given", "message"),
    [(b"no image", "PNG or JPEG file, got 8 bytes"), (b"data:image/png;base64,x", "in base64")],
)
def test_what_is_no_image_is_refused(model: Model, given: bytes, message: str) -> None:
    with pytest.raises(BadInput, match=f"input 'image': expected .*{message}"):
        scores(model, given)


def test_the_example_is_an_image(model: Model) -> None:
    assert model.example is not None
    assert scores(model, model.example["image"][0].encode()).shape == (1, 2)
