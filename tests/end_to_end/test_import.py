"""A Triton model repository as `headwater import` writes it, and as it lies there: both answer alike."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater_server.cli.import_triton import import_repository
from tests.repositories import write_repository
from tests.running import Running, serve

pytestmark = pytest.mark.heavy

TENSORS = """
backend: "{backend}"
max_batch_size: 8
input [{{ name: "x", data_type: TYPE_FP32, dims: [ 4 ] }}]
output [{{ name: "y", data_type: TYPE_FP32, dims: [ 4 ] }}]
"""
COUNTS = """
import os

class TritonPythonModel:
    def initialize(self, args):
        self.file = args["model_repository"] + "/calls"

    def execute(self, requests):
        with open(self.file, "a") as file:
            file.write("." * len(requests))
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if (x < 0).any():
                error = pb_utils.TritonError("x: expected no negative numbers", pb_utils.TritonError.INVALID_ARG)
                answers.append(pb_utils.InferenceResponse(error=error))
            else:
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.sqrt(x))]))
        return answers
"""
ROLLS = """
class TritonPythonModel:
    def execute(self, requests):
        inputs = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.roll(x, 1, axis=1))]) for x in inputs]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [{ name: "image", data_type: TYPE_FP32, dims: [ 4 ] }]
output [{ name: "rolled", data_type: TYPE_FP32, dims: [ 4 ] }, { name: "doubled", data_type: TYPE_FP32, dims: [ 4 ] }]
ensemble_scheduling {
  step { model_name: "trunk" model_version: -1
         input_map { key: "x" value: "image" } output_map { key: "y" value: "features" } }
  step { model_name: "rolls" model_version: -1
         input_map { key: "x" value: "features" } output_map { key: "y" value: "rolled" } }
  step { model_name: "doubles" model_version: -1
         input_map { key: "x" value: "features" } output_map { key: "y" value: "doubled" } }
}
"""
MODELS = {
    "trunk": (TENSORS.format(backend="python") + "dynamic_batching { }", COUNTS),
    "rolls": (TENSORS.format(backend="python"), ROLLS),
    "doubles": (TENSORS.format(backend="onnxruntime"), ""),
    "both": (ENSEMBLE, ""),
}


def write_onnx(path: Path) -> None:
    """y = x + x, rows of four."""
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "doubles", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder with the repository, and the configuration that was imported."""
    with tempfile.TemporaryDirectory(prefix="hw-import-") as name:
        repository = Path(name, "repository")
        write_repository(repository, MODELS)
        write_onnx(repository / "doubles" / "1" / "model.onnx")
        assert import_repository(f"triton:{repository}", Path(name, "imported"), overwrites=False, flags=FREE) == 0
        yield Path(name)


FREE = {"server.port": 0}


@pytest.fixture(scope="module")
def imported(folder: Path) -> Iterator[Running]:
    """A server of the imported configuration."""
    with serve({}, what=str(folder / "imported" / "headwater.yaml"), cwd=folder) as running:
        yield running


@pytest.fixture(scope="module")
def native(folder: Path) -> Iterator[Running]:
    """A server of the repository itself."""
    with serve({"deployments": {"repository": {"model": f"triton:{folder / 'repository'}"}}}) as running:
        yield running


def calls(folder: Path) -> int:
    """The number of requests that the trunk has computed."""
    path = folder / "repository" / "trunk" / "calls"
    return path.stat().st_size if path.exists() else 0


def outcome(server: Running, model: str, name: str, rows: list[list[float]], **body: Any) -> Any:
    """The status of a request, and its outputs by name or its error."""
    answer = server.infer(model, rows, shape=[len(rows), len(rows[0])], name=name, **body)
    content = answer.json()
    if answer.status_code != 200:
        return answer.status_code, content["error"]
    return answer.status_code, {
        output["name"]: (output["datatype"], output["shape"], np.array(output["data"], np.float32).tolist())
        for output in content["outputs"]
    }


ROWS = [[1.0, 4, 9, 16], [0.25, 2, 3, 5], [7.0, 8, 9, 10]]


@pytest.mark.parametrize(
    ("model", "name", "body"),
    [
        ("both", "image", {}),
        ("both", "image", {"outputs": [{"name": "rolled"}]}),
        ("both", "image", {"outputs": [{"name": "doubled"}]}),
        ("trunk", "x", {}),
        ("rolls", "x", {}),
        ("doubles", "x", {}),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_answers_are_equal(
    imported: Running, native: Running, model: str, name: str, body: dict[str, Any], count: int
) -> None:
    answers = [outcome(server, model, name, ROWS[:count], **body) for server in (imported, native)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 200


@pytest.mark.parametrize("server_name", ["imported", "native"])
def test_the_trunk_is_computed_once_for_both_heads(
    folder: Path, server_name: str, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue(server_name)
    before = calls(folder)
    for row in ROWS:
        assert outcome(server, "both", "image", [row])[0] == 200
    assert calls(folder) - before == len(ROWS)


def test_an_error_of_a_script_has_its_status_and_text(imported: Running, native: Running) -> None:
    for model, name in (("trunk", "x"), ("both", "image")):
        answers = [outcome(server, model, name, [[-1, 0, 0, 0]]) for server in (imported, native)]
        assert [status for status, _ in answers] == [400, 400]
        assert all("x: expected no negative numbers" in text for _, text in answers)


def test_the_metadata_has_the_same_names_and_types(imported: Running, native: Running) -> None:
    for model in MODELS:
        metadata = [server.get(f"/v2/models/{model}").json() for server in (imported, native)]
        for side in ("inputs", "outputs"):
            tensors = [{(tensor["name"], tensor["datatype"]) for tensor in content[side]} for content in metadata]
            assert tensors[0] == tensors[1]
