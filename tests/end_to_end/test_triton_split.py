"""A Triton model repository that is split into two deployments by ``options.models``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.repositories import write_repository
from tests.running import Running, leaves_nothing

CONFIG = """
    backend: "python"
    input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
    output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
"""
DOUBLES = """
class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)]) for x in tensors]
"""
ASKS = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        asked = pb_utils.InferenceRequest(model_name="doubles", requested_output_names=["y"], inputs=request.inputs())
        response = asked.exec()
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        return pb_utils.InferenceResponse(response.output_tensors())
"""
STEP = """
    step {
      model_name: "doubles" model_version: -1
      input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }
    }
"""
ENSEMBLE = CONFIG.replace('backend: "python"', 'platform: "ensemble"') + f"ensemble_scheduling {{ {STEP} }}"
MODELS = {
    "doubles": (CONFIG, DOUBLES),
    "ensemble": (ENSEMBLE, ""),
    "asks": (CONFIG, ASKS),
    "outside": (CONFIG, "raise SystemExit"),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        write_repository(Path(name), MODELS)
        chosen = {"one": ["doubles", "ensemble"], "two": ["asks"]}
        deployments = {
            deployment: {"model": f"triton:{name}", "options": {"models": models}}
            for deployment, models in chosen.items()
        }
        with leaves_nothing({"deployments": deployments}) as server:
            yield server


def test_each_deployment_has_its_models(running: Running) -> None:
    for model in ("doubles", "ensemble"):
        assert running.infer(model, [3.0], shape=[1]).json()["outputs"][0]["data"] == [6.0]
    index = running.client.post(f"{running.url}/v2/repository/index", json={}).json()
    assert [(entry["name"], entry["state"]) for entry in index] == [
        ("doubles", "READY"), ("ensemble", "READY"), ("asks", "READY"),
    ]  # fmt: skip
    outside = running.infer("outside", [3.0], shape=[1])
    assert outside.status_code == httpx.codes.NOT_FOUND


def test_a_model_of_another_deployment_is_unknown_to_a_model(running: Running) -> None:
    answer = running.infer("asks", [3.0], shape=[1])
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert "Model 'doubles' is not ready" in answer.json()["error"]
