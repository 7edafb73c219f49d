"""An ONNX file behind the server: it answers as the same weights do in torch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from examples.training.export_digit_head import ONNX_FILE
from headwater.zoo.digits import Digit
from tests.running import Running, serve

ROWS = 40


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The digit head, by a path that starts in the working folder, and a file without a batch axis."""
    deployment = {
        "model": f"onnx:{ONNX_FILE.name}",
        "options": {"rename": {"digit": "read"}},
        "batching": {"max_batch_size": 16},
        "threads": 1,
    }
    folder = tmp_path_factory.mktemp("onnx")
    inputs: list[tuple[str, list[str | int]]] = [("x", ["seq", 3]), ("h", [1, 1, 3]), ("rate", [])]
    graph = helper.make_graph(
        [helper.make_node("ReduceSum", ["x", "time"], ["heard"]),
         helper.make_node("Mul", ["heard", "rate"], ["scaled"]),
         helper.make_node("Add", ["h", "scaled"], ["next_h"])],
        "detector",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs],
        [helper.make_tensor_value_info("next_h", TensorProto.FLOAT, [1, 1, 3])],
        [numpy_helper.from_array(np.array([0]), "time")],
    )  # fmt: skip
    file = folder / "detector.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    detector = {"model": f"onnx:{file}", "options": {"batch": "none"}, "threads": 1}
    with serve({"deployments": {"head": deployment, "detector": detector}}, cwd=ONNX_FILE.parent) as running:
        yield running


def test_a_file_without_a_batch_axis_answers_its_vendors_own_call(running: Running) -> None:
    def ask(steps: int) -> httpx.Response:
        inputs: dict[str, tuple[list[int], list[float]]] = {
            "x": ([steps, 3], [1.0] * steps * 3), "h": ([1, 1, 3], [0.0, 1.0, 2.0]), "rate": ([], [0.5]),
        }  # fmt: skip
        body = [
            {"name": name, "datatype": "FP32", "shape": shape, "data": data} for name, (shape, data) in inputs.items()
        ]
        return running.client.post(f"{running.url}/v2/models/detector/infer", json={"inputs": body})

    with ThreadPoolExecutor(8) as pool:  # at once, and none shares a call
        answers = list(pool.map(ask, range(1, 9)))
    for steps, answer in enumerate(answers, start=1):
        assert answer.status_code == 200, answer.text
        (output,) = answer.json()["outputs"]
        assert output["shape"] == [1, 1, 3]
        assert output["data"] == [steps / 2, steps / 2 + 1, steps / 2 + 2]


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
