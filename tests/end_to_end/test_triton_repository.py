"""A Triton model repository behind the gateway: unmodified clients, and models that fail in each way."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http
import yaml
from tritonclient.utils import InferenceServerException

from tests.repositories import write_repository
from tests.running import Running, leaves_nothing, wait_for

NAMES = ["asks", "chain", "counts", "doubles", "ends", "slow_start", "typed"]
"""The models that can be loaded."""
BROKEN = "broken"
DEPLOYMENT = "models"

X_TO_Y = """
input [{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }]
output [{ name: "y", data_type: TYPE_FP32, dims: [ 2 ] }, { name: "joined", data_type: TYPE_INT32, dims: [ 1 ] }]
"""
MODELS: dict[str, tuple[str, str]] = {
    "doubles": (
        f"""
        backend: "python"
        max_batch_size: 8
        {X_TO_Y}
        dynamic_batching {{ preferred_batch_size: [ 4 ], max_queue_delay_microseconds: 100000 }}
        """,
        """
        class TritonPythonModel:
            def execute(self, requests):
                answers = []
                for request in requests:
                    x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                    if (x < 0).any():
                        code = pb_utils.TritonError.INVALID_ARG
                        error = pb_utils.TritonError("x: expected no negative numbers", code)
                        answers.append(pb_utils.InferenceResponse(error=error))
                        continue
                    joined = np.full((len(x), 1), len(requests), np.int32)
                    tensors = [pb_utils.Tensor("y", 2 * x), pb_utils.Tensor("joined", joined)]
                    answers.append(pb_utils.InferenceResponse(tensors))
                return answers
        """,
    ),
    "counts": (
        """
        backend: "python"
        input [{ name: "count", data_type: TYPE_INT32, dims: [ 1 ] }]
        output [{ name: "number", data_type: TYPE_INT32, dims: [ 1 ] }]
        model_transaction_policy { decoupled: true }
        """,
        """
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    count = request.inputs()[0].as_numpy().item()
                    if count < 0:
                        raise ValueError("a deliberate fault")
                    for number in range(count):
                        tensor = pb_utils.Tensor("number", np.array([number], np.int32))
                        sender.send(pb_utils.InferenceResponse([tensor]))
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
    ),
    "chain": (
        """
        platform: "ensemble"
        max_batch_size: 8
        input [{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }]
        output [{ name: "y", data_type: TYPE_FP32, dims: [ 2 ] }]
        ensemble_scheduling {
          step [
            { model_name: "doubles" model_version: -1
              input_map { key: "x" value: "x" } output_map { key: "y" value: "inner" } },
            { model_name: "doubles" model_version: -1
              input_map { key: "x" value: "inner" } output_map { key: "y" value: "y" } }
          ]
        }
        """,
        "",
    ),
    "asks": (
        """
        backend: "python"
        input [{ name: "x", data_type: TYPE_FP32, dims: [ 1, 2 ] }]
        input [{ name: "model", data_type: TYPE_STRING, dims: [ 1 ] }]
        output [{ name: "y", data_type: TYPE_FP32, dims: [ 1, 2 ] }]
        """,
        """
        class TritonPythonModel:
            async def execute(self, requests):
                return [await self.answer(request) for request in requests]

            async def answer(self, request):
                x, model = (pb_utils.get_input_tensor_by_name(request, name) for name in ("x", "model"))
                asked = pb_utils.InferenceRequest(
                    model_name=model.as_numpy()[0].decode(), requested_output_names=["y"], inputs=[x]
                )
                response = await asked.async_exec()
                if response.has_error():
                    return pb_utils.InferenceResponse(error=response.error())
                y = pb_utils.get_output_tensor_by_name(response, "y").as_numpy()
                return pb_utils.InferenceResponse([pb_utils.Tensor("y", y + 1)])
        """,
    ),
    "typed": (
        """
        backend: "python"
        input [
          { name: "fp16", data_type: TYPE_FP16, dims: [ -1 ], optional: true },
          { name: "int64", data_type: TYPE_INT64, dims: [ -1, -1 ], optional: true },
          { name: "bytes", data_type: TYPE_STRING, dims: [ -1 ], optional: true },
          { name: "bool", data_type: TYPE_BOOL, dims: [ -1 ], optional: true },
          { name: "bf16", data_type: TYPE_BF16, dims: [ -1 ], optional: true }
        ]
        output [
          { name: "fp16", data_type: TYPE_FP16, dims: [ -1 ] },
          { name: "int64", data_type: TYPE_INT64, dims: [ -1, -1 ] },
          { name: "bytes", data_type: TYPE_STRING, dims: [ -1 ] },
          { name: "bool", data_type: TYPE_BOOL, dims: [ -1 ] },
          { name: "bf16", data_type: TYPE_BF16, dims: [ -1 ] }
        ]
        """,
        """
        class TritonPythonModel:
            def execute(self, requests):
                return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
        """,
    ),
    "ends": (
        """
        backend: "python"
        input [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
        output [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
        """,
        """
        import os

        class TritonPythonModel:
            def execute(self, requests):
                value = requests[0].inputs()[0].as_numpy().item()
                if value == 1:
                    os._exit(3)
                if value == 2:
                    raise ValueError("a deliberate fault")
                return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
        """,
    ),
    "slow_start": (
        "",
        """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.add_input({"name": "x", "data_type": "TYPE_INT32", "dims": [1]})
                config.add_output({"name": "x", "data_type": "TYPE_INT32", "dims": [1]})
                return config

            def execute(self, requests):
                return [pb_utils.InferenceResponse(request.inputs()) for request in requests]
        """,
    ),
    BROKEN: (
        """
        backend: "python"
        input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
        output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
        """,
        """
        class TritonPythonModel:
            def initialize(self, args):
                raise RuntimeError("the weights are missing")
        """,
    ),
}


@pytest.fixture(scope="module")
def repository() -> Iterator[Path]:
    """The folder of the repository."""
    with tempfile.TemporaryDirectory(prefix="hw-models-") as folder:
        write_repository(Path(folder), MODELS)
        yield Path(folder)


@pytest.fixture(scope="module")
def config(repository: Path) -> dict[str, Any]:
    """The configuration of a server with the repository."""
    return {"deployments": {DEPLOYMENT: {"model": f"triton:{repository}"}}}


@pytest.fixture(scope="module")
def running(config: dict[str, Any]) -> Iterator[Running]:
    """The server; nothing of it is left after the module."""
    with leaves_nothing(config) as server:
        yield server


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    """Triton's own client."""
    with tritonclient.http.InferenceServerClient(running.url.removeprefix("http://"), concurrency=8) as made:
        yield made


def tensor(name: str, array: Any, datatype: str, *, binary: bool = True) -> Any:
    """An input for Triton's client."""
    made = tritonclient.http.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def infer(running: Running, model: str, value: int) -> Any:
    """A request with the input ``x`` of one INT32."""
    return running.infer(model, [value], shape=[1], datatype="INT32")


class TestInfer:
    def test_json(self, running: Running) -> None:
        answer = running.infer("doubles", [[1, 2], [3, 4]], shape=[2, 2], id="7", outputs=[{"name": "y"}])
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["model_name"], body["model_version"], body["id"]) == ("doubles", "1", "7")
        (output,) = body["outputs"]
        assert output == {"name": "y", "datatype": "FP32", "shape": [2, 2], "data": [2, 4, 6, 8]}

    @pytest.mark.parametrize("binary", [False, True], ids=["json", "binary"])
    @pytest.mark.parametrize("version", ["", "1"])
    def test_tritons_client(self, client: Any, binary: bool, version: str) -> None:
        x = np.arange(6, dtype=np.float32).reshape(3, 2)
        outputs = [tritonclient.http.InferRequestedOutput("y", binary_data=binary)]
        inputs = [tensor("x", x, "FP32", binary=binary)]
        result = client.infer("doubles", inputs, outputs=outputs, model_version=version)
        assert np.array_equal(result.as_numpy("y"), 2 * x)
        assert result.as_numpy("joined") is None

    def test_each_datatype(self, client: Any) -> None:
        values = {
            "fp16": (np.array([0.5, -2], np.float16), "FP16"),
            "int64": (np.array([[-(2**63), 2**63 - 1]]), "INT64"),
            "bytes": (np.array([b"\xff\0", b""], object), "BYTES"),
            "bool": (np.array([True, False]), "BOOL"),
        }
        inputs = [tensor(name, array, datatype) for name, (array, datatype) in values.items()]
        result = client.infer("typed", inputs)
        for name, (array, _) in values.items():
            assert result.as_numpy(name).tolist() == array.tolist()
            assert result.as_numpy(name).dtype == array.dtype

    def test_bfloat16(self, client: Any) -> None:
        value = tritonclient.http.InferInput("bf16", [2], "BF16")
        value.set_data_from_numpy(np.array([0.5, -2], ml_dtypes.bfloat16))
        assert client.infer("typed", [value]).as_numpy("bf16").tolist() == [0.5, -2]

    def test_requests_are_joined_by_triton(self, running: Running) -> None:
        def ask(number: int) -> dict[str, Any]:
            answer = running.infer("doubles", [[number, number]], shape=[1, 2])
            return {output["name"]: output["data"] for output in answer.json()["outputs"]}

        def were_joined() -> bool:
            with ThreadPoolExecutor(8) as pool:  # Triton's client can't be used by several threads
                results = list(pool.map(ask, range(8)))
            assert [result["y"] for result in results] == [[2 * n, 2 * n] for n in range(8)]
            return any(result["joined"] > [1] for result in results)

        wait_for(were_joined, what="requests that Triton joined")

    @pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
    def test_json_that_would_end_triton_is_refused(self, running: Running, path: str) -> None:
        body = b'{"inputs":%b%b}' % (b"[" * 200_000, b"]" * 200_000)
        headers = {"content-type": "application/json"}
        answer = running.client.post(f"{running.url}/v2/models/doubles/{path}", content=body, headers=headers)
        assert (answer.status_code, "nested too deep" in answer.json()["error"]) == (400, True)
        assert running.infer("doubles", [[1, 2]], shape=[1, 2]).status_code == 200

    def test_an_error_of_a_request_has_its_code_and_text(self, running: Running) -> None:
        answer = running.infer("doubles", [[-1, 0]], shape=[1, 2])
        assert (answer.status_code, answer.json()) == (400, {"error": "x: expected no negative numbers"})

    @pytest.mark.parametrize(
        ("shape", "data"), [([1, 3], [1, 2, 3]), ([9, 2], [0] * 18), ([2], [1, 2])], ids=["dims", "batch", "rank"]
    )
    def test_tensors_that_do_not_fit_are_refused_by_triton(self, running: Running, shape: Any, data: Any) -> None:
        answer = running.infer("doubles", data, shape=shape)
        assert answer.status_code == 400
        assert "doubles" in answer.json()["error"]

    def test_an_ensemble(self, running: Running) -> None:
        answer = running.infer("chain", [[1, 2]], shape=[1, 2])
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == [4, 8]

    @pytest.mark.parametrize("model", ["doubles", "chain"])
    def test_a_model_that_asks_another_model(self, client: Any, model: str) -> None:
        inputs = [
            tensor("x", np.array([[1, 2]], np.float32), "FP32"),
            tensor("model", np.array([model], object), "BYTES"),
        ]
        factor = 2 if model == "doubles" else 4
        assert client.infer("asks", inputs).as_numpy("y").tolist() == [[factor + 1, 2 * factor + 1]]

    def test_a_model_that_asks_for_a_model_that_is_not_there(self, client: Any) -> None:
        inputs = [
            tensor("x", np.array([[1, 2]], np.float32), "FP32"),
            tensor("model", np.array(["absent"], object), "BYTES"),
        ]
        with pytest.raises(InferenceServerException, match="absent"):
            client.infer("asks", inputs)

    def test_a_model_without_a_configuration(self, running: Running) -> None:
        answer = infer(running, "slow_start", 5)
        assert answer.status_code == 200, answer.text
        assert answer.json()["outputs"][0]["data"] == [5]


class TestStreams:
    def events(self, running: Running, count: int) -> tuple[int, list[Any]]:
        """The status and the events of a stream."""
        url = f"{running.url}/v2/models/counts/generate_stream"
        answer = running.client.post(url, json={"count": count})
        lines = [line for line in answer.text.splitlines() if line.startswith("data:")]
        return answer.status_code, [json.loads(line.removeprefix("data:")) for line in lines] or [answer.text]

    def test_each_answer_is_an_event(self, running: Running) -> None:
        status, events = self.events(running, 5)
        assert status == 200
        assert [event["number"] for event in events] == list(range(5))

    def test_an_error_before_the_first_answer_is_the_answer(self, running: Running) -> None:
        status, (answer,) = self.events(running, -1)
        assert status == 400
        assert answer["error"].startswith("ValueError: a deliberate fault; at 1/model.py(")

    def test_infer_of_a_decoupled_model_is_refused_by_triton(self, running: Running) -> None:
        answer = running.infer("counts", [1], shape=[1], datatype="INT32", name="count")
        assert answer.status_code == 501

    def test_generate(self, running: Running) -> None:
        answer = running.client.post(f"{running.url}/v2/models/slow_start/generate", json={"x": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["x"] == 3


class TestReads:
    def test_metadata(self, client: Any) -> None:
        metadata = client.get_model_metadata("doubles")
        assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("doubles", ["1"], "python")
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]

    def test_config(self, client: Any) -> None:
        content = client.get_model_config("doubles")
        assert (content["name"], content["max_batch_size"], content["backend"]) == ("doubles", 8, "python")
        assert content["dynamic_batching"]["preferred_batch_size"] == [4]

    def test_statistics(self, running: Running, client: Any) -> None:
        def count() -> int:
            (entry,) = client.get_inference_statistics("slow_start")["model_stats"]
            return int(entry["inference_count"])

        before = count()
        assert infer(running, "slow_start", 1).status_code == 200
        wait_for(lambda: count() == before + 1, what="Triton to count the request")  # it answers first
        everything = {entry["name"] for entry in client.get_inference_statistics()["model_stats"]}
        assert everything >= set(NAMES)

    @pytest.mark.parametrize("name", NAMES)
    def test_each_model_is_ready(self, running: Running, client: Any, name: str) -> None:
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, "1")
        assert running.get(f"/v2/models/{name}").status_code == 200

    def test_the_index_has_each_model_and_says_why_one_is_unavailable(self, client: Any) -> None:
        index = {entry["name"]: entry for entry in client.get_model_repository_index()}
        assert {name for name, entry in index.items() if entry["state"] == "READY"} >= set(NAMES)
        assert index[BROKEN]["state"] == "UNAVAILABLE"
        assert "RuntimeError: the weights are missing" in index[BROKEN]["reason"]

    def test_the_model_that_failed_is_not_ready(self, running: Running, client: Any) -> None:
        assert not client.is_model_ready(BROKEN)
        assert running.infer(BROKEN, [1], shape=[1]).status_code in (400, 404, 503)

    @pytest.mark.parametrize("path", ["", "/config", "/stats", "/versions/1"])
    def test_an_unknown_model_is_not_found(self, running: Running, path: str) -> None:
        assert running.get(f"/v2/models/absent{path}").status_code == 404

    def test_a_request_for_an_unknown_model_or_version_is_refused(self, running: Running) -> None:
        assert running.infer("absent", [1], shape=[1]).status_code == 404
        answer = running.infer("slow_start/versions/9", [1], shape=[1], datatype="INT32")
        assert answer.status_code in (400, 404)
        assert "9" in answer.json()["error"]

    def test_the_deployment_itself_is_no_model(self, running: Running) -> None:
        answer = running.infer(DEPLOYMENT, [1], shape=[1])
        assert answer.status_code in (400, 404)
        assert DEPLOYMENT in answer.json()["error"]


class TestFaults:
    def test_a_model_whose_process_ends_answers_the_next_request(self, running: Running) -> None:
        for _ in range(2):
            answer = infer(running, "ends", 1)
            assert answer.status_code == 500
            assert "the model's process exited with status 3" in answer.json()["error"]
            assert infer(running, "ends", 0).status_code == 200

    def test_an_exception_is_told_with_its_class_text_and_place(self, running: Running) -> None:
        answer = infer(running, "ends", 2)
        assert answer.status_code == 500
        assert "ValueError: a deliberate fault; at 1/model.py(" in answer.json()["error"]

    def test_a_body_that_is_no_json_is_refused(self, running: Running) -> None:
        answer = running.client.post(f"{running.url}/v2/models/doubles/infer", content=b"{")
        assert answer.status_code in (400, 500)
        assert answer.json()["error"]


def test_the_check_names_the_models_without_a_start(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "headwater_server", "check", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name in (*NAMES, BROKEN):
        assert f"model {name}" in done.stdout
    assert "ensemble, versions 1, at most 8 rows" in done.stdout
