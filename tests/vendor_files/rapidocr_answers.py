"""Draws images with text and reads them with rapidocr, under a Python that has it: ``images.npy``, ``answers.json``."""

from __future__ import annotations

import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

WORDS = ["Headwater", "serves", "models", "row", "by", "each", "request", "gets", "boxes", "back", "2026", "42", "100"]
IMAGES = 20


def main(folder: Path) -> None:
    """Write both files into the folder."""
    cv2: Any = importlib.import_module("cv2")
    ocr: Any = importlib.import_module("rapidocr_onnxruntime").RapidOCR(rec_batch_num=1, intra_op_num_threads=1)
    chance = random.Random(3)
    images = np.full((IMAGES, 240, 480, 3), 255, "u1")
    for number, image in enumerate(images):
        for place in range(number % 5):
            text = " ".join(chance.sample(WORDS, chance.randint(1, 3)))
            cv2.putText(image, text, (15, 45 + 50 * place), cv2.FONT_HERSHEY_SIMPLEX, 0.9, (0, 0, 0), 2)
    images[7] = images[7][::-1, ::-1]  # upside down
    np.save(folder / "images.npy", images)
    (folder / "answers.json").write_text(json.dumps([ocr(image)[0] or [] for image in images]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
