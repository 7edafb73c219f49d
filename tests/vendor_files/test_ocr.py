"""Text in images by rapidocr's three files, as a pipeline of three steps: the boxes of an image are rows of the steps
that follow, and the answers are rapidocr's own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferInput

from tests.running import Running, serve
from tests.vendor_files.test_vendor_files import ENVIRONMENT

pytestmark = [pytest.mark.heavy, pytest.mark.vendor_files]

STEPS = {
    "detect": {"model": "ocr:Detect", "inputs": {"image": "input.image"}},
    "crop": {"model": "ocr:Crop", "expand": "detect", "inputs": {"image": "input.image"}},
    "recognise": {"model": "ocr:Recognise"},
}
PLACEMENTS = ["fused", "graph"]


@pytest.fixture(scope="module")
def python() -> str:
    return f"{os.environ[ENVIRONMENT]}/bin/python"


@pytest.fixture(scope="module")
def running(python: str) -> Iterator[Running]:
    deployments = {
        placement: {
            "pipeline": {"placement": placement, "steps": STEPS, "heads": ["detect", "recognise"]},
            "python": python, "warmup_batch_sizes": [1], "batching": {"max_batch_size": 8, "max_queue_delay_ms": 50},
        }
        for placement in PLACEMENTS
    }  # fmt: skip
    with serve({"deployments": deployments}) as running:
        yield running


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_lines_of_many_images_are_read_together_as_rapidocr_reads_them(
    running: Running, placement: str, python: str, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("rapidocr_answers.py")
    subprocess.run([python, script, tmp_path], check=True)
    images = np.load(tmp_path / "images.npy")
    expected = json.loads((tmp_path / "answers.json").read_text())

    def read(image: Any) -> Any:
        with InferenceServerClient(running.url.removeprefix("http://"), network_timeout=120) as client:
            tensor = InferInput("image", [1, *image.shape], "UINT8").set_data_from_numpy(image[None])
            return client.infer(placement, [tensor])

    with ThreadPoolExecutor(len(images)) as pool:
        answers = list(pool.map(read, images))
    shared = False
    for lines, answer in zip(expected, answers, strict=True):
        count = answer.as_numpy("boxes_count")[0, 0]
        assert answer.as_numpy("text_count")[0, 0] == count
        boxes, texts, scores = (answer.as_numpy(name)[0] for name in ("boxes", "text", "score"))
        kept = scores[:, 0] >= 0.5  # as rapidocr does
        assert [text.decode() for text in texts[kept, 0]] == [text for _, text, _ in lines]
        np.testing.assert_array_equal(boxes[kept], np.array([box for box, _, _ in lines]).reshape(-1, 4, 2))
        np.testing.assert_allclose(scores[kept, 0], [score for _, _, score in lines], atol=1e-4)
        shared |= bool((answer.as_numpy("lines") > count).any())
    assert shared, "no call had lines of several images"
