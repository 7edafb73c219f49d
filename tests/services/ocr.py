"""Steps of rapidocr as models, with its own files and code: find boxes, crop them upright, read the crops."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from headwater import BadInput, Model, Tensor

LONGEST = 2048
"""Pixels of the longest line that can be read, 48 pixels high."""
BLANK = np.full((64, 64, 3), 255).tolist()
"""An image without boxes."""


class _Reader(Model):
    """A part of rapidocr, which reads line by line: padding changes its answers slightly."""

    def load(self, device: str) -> None:
        """Open rapidocr's files."""
        package: Any = importlib.import_module("rapidocr_onnxruntime")
        self.ocr = package.RapidOCR(rec_batch_num=1, intra_op_num_threads=1)


class Detect(_Reader):
    """Finds lines of text in an image, from the top to the bottom."""

    inputs = (Tensor("image", "UINT8", [-1, -1, 3]),)
    outputs = (Tensor("boxes", "FP32", [-1, 4, 2], ragged=True),)
    example: ClassVar = {"image": BLANK}

    def __call__(self, image: npt.NDArray[np.uint8]) -> dict[str, Any]:
        """Find the boxes of each image."""
        found = [self.ocr.auto_text_det(pixels)[0] for pixels in image]
        return {"boxes": [np.array(boxes or [], "f4").reshape(-1, 4, 2) for boxes in found]}


class Crop(_Reader):
    """Cuts a line of text out of an image, turns it if it is upside down, and scales it to a height of 48 pixels."""

    inputs = (Tensor("image", "UINT8", [-1, -1, 3]), Tensor("boxes", "FP32", [4, 2]))
    outputs = (Tensor("line", "FP32", [3, 48, LONGEST]), Tensor("width", "INT32", [1]))
    example: ClassVar = {"image": BLANK, "boxes": [[0, 0], [60, 0], [60, 20], [0, 20]]}

    def __call__(self, image: npt.NDArray[np.uint8], boxes: npt.NDArray[np.float32]) -> dict[str, Any]:
        """Cut each box out of its image."""
        crops = [self.ocr.get_crop_img_list(*pair)[0] for pair in zip(image, boxes[:, None], strict=True)]
        lines, widths = np.zeros((len(crops), 3, 48, LONGEST), "f4"), np.zeros((len(crops), 1), "i4")
        for place, crop in enumerate(self.ocr.text_cls(crops)[0]):
            height, width = crop.shape[:2]
            line = self.ocr.text_rec.resize_norm_img(crop, max(320 / 48, width / height))
            widths[place] = line.shape[2]
            if line.shape[2] > LONGEST:
                raise BadInput(f"image: expected lines of at most {LONGEST} pixels, got {line.shape[2]}")
            lines[place, :, :, : line.shape[2]] = line
        return {"line": lines, "width": widths}


class Recognise(_Reader):
    """Reads a line, and says how many lines the call had."""

    inputs = (Tensor("line", "FP32", [3, 48, LONGEST]), Tensor("width", "INT32", [1]))
    outputs = (Tensor("text", "BYTES", [1]), Tensor("score", "FP32", [1]), Tensor("lines", "INT64", [1]))
    example: ClassVar = {"width": [320]}

    def __call__(self, line: npt.NDArray[np.float32], width: npt.NDArray[np.int32]) -> dict[str, Any]:
        """Read lines, those of the same width together."""
        texts, scores = np.zeros((len(line), 1), object), np.zeros((len(line), 1), "f4")
        for size in np.unique(width):
            rows = np.flatnonzero(width[:, 0] == size)
            found = self.ocr.text_rec.session(line[rows, :, :, :size])[0]
            for row, (text, score) in zip(rows, self.ocr.text_rec.postprocess_op(found), strict=True):
                texts[row], scores[row] = text, score
        return {"text": texts, "score": scores, "lines": np.full((len(line), 1), len(line))}
