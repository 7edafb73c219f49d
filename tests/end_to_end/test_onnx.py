"""An ONNX file behind the server: it answers as the same weights do in torch."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from inference.zoo.digits import Digit
from inference.zoo.training.export_digit_head import ONNX_FILE
from tests.running import Running, serve

ROWS = 40


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """The digit head, by a path that starts in the working folder."""
    deployment = {
        "model": f"onnx:{ONNX_FILE.name}",
        "options": {"rename": {"digit": "read"}},
        "batching": {"max_batch_size": 16},
        "threads": 1,
    }
    with serve({"deployments": {"head": deployment}}, cwd=ONNX_FILE.parent) as running:
        yield running


def test_its_metadata_is_the_files(running: Running) -> None:
    metadata = running.get("/v2/models/head").json()
    assert metadata["inputs"] == [{"name": "features", "datatype": "FP32", "shape": [-1, 64]}]
    assert [tensor["name"] for tensor in metadata["outputs"]] == ["logits", "read"]


def test_it_answers_as_torch_does(running: Running) -> None:
    features = np.abs(np.random.default_rng(1).normal(size=(ROWS, 64))).astype(np.float32)
    reference = Digit()
    reference.load("cpu")
    expected = reference(features=torch.from_numpy(features))

    answer = running.infer("head", features.tolist(), shape=[ROWS, 64], name="features")
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output for output in answer.json()["outputs"]}
    logits = np.array(outputs["logits"]["data"], np.float32).reshape(ROWS, 10)
    assert np.abs(logits - expected["logits"].numpy()).max() < 1e-5
    assert outputs["read"]["shape"] == [ROWS, 1]
    assert outputs["read"]["data"] == expected["digit"][:, 0].tolist()
