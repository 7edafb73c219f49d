"""Image classification with a transformers folder."""

from __future__ import annotations

import base64
import io
import math
from typing import Any, Final

import torch

from headwater.errors import BadInput
from headwater.hf.classes import scores_of
from headwater.hf.files import file_of
from headwater.hf.folder import HfFolder
from headwater.model import Classification, Model, Tensor
from headwater.wire.arrays import Array

__all__ = ["ImageClassification"]

MOST_PIXELS: Final = 40_000_000
"""The most pixels of an image: they take 160 MB in Pillow, and another 160 MB while the image is converted."""
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "AVIF")
"""The accepted formats, in which the header tells the size. Not accepted, for example: ICO and ICNS, which
contain images of any size, and EPS, for which Pillow runs Ghostscript."""
_TILE: Final = (322, 323)
"""TIFF tags for the width and height of a tile; a tile is unpacked as a whole."""


class ImageClassification(Model):
    """Scores the classes of an image, as transformers' pipeline does with all scores.

    Args:
        folder: a folder with the weights of a network for image classification, and its ``preprocessor_config.json``.

    Inputs:
        image: BYTES [1], a file in a format of `FORMATS` with at most 40,000,000 pixels; or this file in base64, or as
            a data URL. It is turned as its EXIF orientation says. The images of a batch are unpacked successively.

    Outputs:
        label: BYTES [1], the class with the highest score.
        scores: FP32 [classes].

    Raises:
        LoadError: the folder can't be served for this task.
    """

    inputs = (Tensor("image", "BYTES", [1]),)
    arrays = "torch"
    classification = Classification("image", "scores", media="image")

    def __init__(self, folder: HfFolder) -> None:
        self._folder = folder
        self._labels = folder.labels
        # These outputs depend on the folder.
        self.outputs = (  # type: ignore[misc]
            Tensor("label", "BYTES", [1]), Tensor("scores", "FP32", [len(self._labels)], labels=self._labels),
        )  # fmt: skip
        self._pillow = folder.need("PIL.Image")
        self._image_ops = folder.need("PIL.ImageOps")
        self.example = {"image": [_blank(self._pillow)]}  # type: ignore[misc]

    def load(self, device: str) -> None:
        self._network = self._folder.network("AutoModelForImageClassification", device)
        self._processor = self._folder.load("AutoImageProcessor")
        self._device = device

    @torch.inference_mode()
    def __call__(self, image: Array) -> dict[str, Any]:
        rows = [
            self._processor(self._read(raw), return_tensors="pt").to(self._device, self._network.dtype)
            for raw in image[:, 0].tolist()
        ]
        fields = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return scores_of(self._folder, self._labels, self._network(**fields).logits.float())

    def _read(self, raw: bytes) -> Any:
        try:
            with self._pillow.open(io.BytesIO(file_of("image", raw)), formats=FORMATS) as image:
                _check_size(image)
                self._image_ops.exif_transpose(image, in_place=True)
                return image.convert("RGB")
        except BadInput:
            raise
        # Pillow's limits are higher; it raises these errors when it reads the header.
        except (self._pillow.DecompressionBombError, self._pillow.DecompressionBombWarning) as error:
            raise BadInput(f"input 'image': expected at most {MOST_PIXELS} pixels: {error}") from error
        except Exception as error:  # Pillow's decoders raise errors of many classes
            raise BadInput(
                f"input 'image': expected an image such as a PNG or JPEG file, got {len(raw)} bytes that Pillow "
                f"can't read ({type(error).__name__})"
            ) from error


def _check_size(image: Any) -> None:
    """Refuse an image that is too large to be unpacked. Pillow has read only its header.

    Raises:
        BadInput: the image, or a tile of it, has more than `MOST_PIXELS` pixels.
    """
    tile = math.prod(getattr(image, "tag_v2", {}).get(tag, 1) for tag in _TILE)
    if (pixels := max(image.width * image.height, tile)) > MOST_PIXELS:
        raise BadInput(
            f"input 'image': expected at most {MOST_PIXELS} pixels, got {pixels} in an image of {image.width} x "
            f"{image.height}"
        )


def _blank(pillow: Any) -> str:
    """A grey PNG image, in base64."""
    file = io.BytesIO()
    pillow.new("RGB", (32, 32), (128, 128, 128)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
