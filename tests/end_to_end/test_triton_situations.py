"""What people who build pipelines on Triton meet, as repositories: each case must be right."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.repositories import write_repository
from tests.running import Running, leaves_nothing, processes_of, wait_for

WIDE = 150_000
"""Elements of a tensor between two models: 600 KB."""
TOKENS = 6
PLAIN = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", ANSWER)])
"""


def vectors(dims: str, more: str = "") -> str:
    """The configuration of a model of a vector that gives a vector."""
    return f"""
        backend: "python"
        input [{{ name: "x", data_type: TYPE_FP32, dims: [ {dims} ] }}]
        output [{{ name: "y", data_type: TYPE_FP32, dims: [ {dims} ] }}]
        {more}
    """


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    """A step of an ensemble."""
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'{{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def ensemble(inputs: str, outputs: str, *steps: str) -> str:
    return f'platform: "ensemble"\n{inputs}\n{outputs}\nensemble_scheduling {{ step [ {", ".join(steps)} ] }}'


X = 'input [{ name: "x", data_type: TYPE_FP32, dims: [ -1 ] }]'
MODELS: dict[str, tuple[str, str]] = {
    # Intermediate tensors.
    "widens": (vectors("-1"), PLAIN.replace("ANSWER", f"np.repeat(x, {WIDE})")),
    "adds": (vectors("-1"), PLAIN.replace("ANSWER", "x + np.float32(1)")),
    "chain": (
        ensemble(
            X,
            'output [{ name: "y", data_type: TYPE_FP32, dims: [ -1 ] }]',
            step("widens", {"x": "x"}, {"y": "between"}),
            step("adds", {"x": "between"}, {"y": "y"}),
        ),
        "",
    ),
    # One trunk, two heads.
    "trunk": (
        vectors("-1").replace(
            'output [{ name: "y"', 'output [{ name: "calls", data_type: TYPE_INT32, dims: [ 1 ] }, { name: "y"'
        ),
        """
        class TritonPythonModel:
            calls = 0

            def execute(self, requests):
                answers = []
                for request in requests:
                    self.calls += 1
                    x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                    tensors = [pb_utils.Tensor("y", 2 * x), pb_utils.Tensor("calls", np.array([self.calls], np.int32))]
                    answers.append(pb_utils.InferenceResponse(tensors))
                return answers
        """,
    ),
    "head_b": (vectors("-1"), PLAIN.replace("ANSWER", "x + np.float32(10)")),
    "head_c": (vectors("-1"), PLAIN.replace("ANSWER", "x + np.float32(20)")),
    "both": (
        ensemble(
            X,
            """output [
              { name: "b", data_type: TYPE_FP32, dims: [ -1 ] },
              { name: "c", data_type: TYPE_FP32, dims: [ -1 ] },
              { name: "calls", data_type: TYPE_INT32, dims: [ 1 ] }
            ]""",
            step("trunk", {"x": "x"}, {"y": "features", "calls": "calls"}),
            step("head_b", {"x": "features"}, {"y": "b"}),
            step("head_c", {"x": "features"}, {"y": "c"}),
        ),
        "",
    ),
    # Tokens: pre, infer, post.
    "pre": (
        """
        backend: "python"
        input [{ name: "text", data_type: TYPE_STRING, dims: [ 1 ] }]
        output [{ name: "ids", data_type: TYPE_INT32, dims: [ -1 ] }]
        """,
        """
        class TritonPythonModel:
            def execute(self, requests):
                texts = [pb_utils.get_input_tensor_by_name(request, "text").as_numpy()[0] for request in requests]
                ids = [np.frombuffer(text, np.uint8).astype(np.int32) for text in texts]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("ids", one)]) for one in ids]
        """,
    ),
    "tokens": (
        """
        backend: "python"
        input [{ name: "ids", data_type: TYPE_INT32, dims: [ -1 ] }]
        output [{ name: "id", data_type: TYPE_INT32, dims: [ 1 ] }]
        model_transaction_policy { decoupled: true }
        """,
        f"""
        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    last = int(pb_utils.get_input_tensor_by_name(request, "ids").as_numpy()[-1])
                    for number in range(1, {TOKENS} + 1):
                        tensor = pb_utils.Tensor("id", np.array([last + number], np.int32))
                        sender.send(pb_utils.InferenceResponse([tensor]))
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
    ),
    "post": (
        """
        backend: "python"
        input [{ name: "id", data_type: TYPE_INT32, dims: [ 1 ] }]
        output [{ name: "piece", data_type: TYPE_STRING, dims: [ 1 ] }]
        """,
        """
        class TritonPythonModel:
            def execute(self, requests):
                ids = [pb_utils.get_input_tensor_by_name(request, "id").as_numpy() for request in requests]
                pieces = [np.array([chr(one.item()).encode()], object) for one in ids]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("piece", one)]) for one in pieces]
        """,
    ),
    "language": (
        ensemble(
            'input [{ name: "text", data_type: TYPE_STRING, dims: [ 1 ] }]',
            'output [{ name: "piece", data_type: TYPE_STRING, dims: [ 1 ] }]',
            step("pre", {"text": "text"}, {"ids": "ids"}),
            step("tokens", {"ids": "ids"}, {"id": "id"}),
            step("post", {"id": "id"}, {"piece": "piece"}),
        ),
        "",
    ),
    # A stream that is unloaded, and a queue with a limit.
    "endless": (
        vectors("1", "model_transaction_policy { decoupled: true }"),
        """
        import time

        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    sender = request.get_response_sender()
                    for number in range(50):
                        tensor = pb_utils.Tensor("y", np.array([number], np.float32))
                        sender.send(pb_utils.InferenceResponse([tensor]))
                        time.sleep(0.05)
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
    ),
    "limited": (
        vectors("1", "max_batch_size: 1\ndynamic_batching { default_queue_policy { max_queue_size: 2 } }"),
        """
        import time

        class TritonPythonModel:
            def execute(self, requests):
                time.sleep(0.2)
                tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", one)]) for one in tensors]
        """,
    ),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        write_repository(Path(name), MODELS)
        options = {"model_control": "explicit", "load_models": ["*"]}
        config = {
            "deployments": {"models": {"model": f"triton:{name}", "options": options}},
            "server": {"grpc_port": 0},
        }
        with leaves_nothing(config) as server:
            yield server


@pytest.fixture
def stub(running: Running) -> Iterator[Any]:
    with grpc.insecure_channel(running.grpc_address) as channel:
        yield pb_grpc.GRPCInferenceServiceStub(channel)


def outputs_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == httpx.codes.OK, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def test_a_tensor_between_two_models_is_whole(running: Running) -> None:
    """Under numpy 2, Triton's Python backend passes tensors of size 0: "expected N, got 0"."""
    found = outputs_of(running.infer("chain", [1.5], shape=[1]))
    assert found["y"] == [2.5] * WIDE


def test_two_heads_share_a_trunk_that_is_computed_once(running: Running) -> None:
    first, second = (outputs_of(running.infer("both", [1.0, 2.0], shape=[2])) for _ in range(2))
    assert (first["b"], first["c"]) == ([12, 14], [22, 24])
    assert second["calls"][0] == first["calls"][0] + 1


def test_each_step_gives_one_new_token(stub: Any) -> None:
    message = pb.ModelInferRequest(model_name="language", id="a")
    message.inputs.add(name="text", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"xyA")
    responses = [answer.infer_response for answer in stub.ModelStreamInfer(iter([message]))]
    pieces = [response.raw_output_contents[0][4:].decode() for response in responses if response.outputs]
    assert pieces == ["B", "C", "D", "E", "F", "G"]


def state_of(running: Running, model: str) -> str:
    entries: list[dict[str, str]] = running.client.post(f"{running.url}/v2/repository/index", json={}).json()
    return next(entry["state"] for entry in entries if entry["name"] == model)


def test_an_unload_while_a_model_streams_frees_everything(running: Running, stub: Any) -> None:
    def scripts() -> list[str]:
        commands = processes_of(running.replica_folder("models")).values()
        return [command for command in commands if "endless" in command]

    assert scripts()
    message = pb.ModelInferRequest(model_name="endless")
    message.inputs.add(name="x", datatype="FP32", shape=[1]).contents.fp32_contents.append(0)
    stream = stub.ModelStreamInfer(iter([message]))
    numbers = [np.frombuffer(next(stream).infer_response.raw_output_contents[0], np.float32).item()]
    answer = running.client.post(f"{running.url}/v2/repository/models/endless/unload")
    assert answer.status_code == httpx.codes.OK, answer.text
    numbers += [
        np.frombuffer(one.infer_response.raw_output_contents[0], np.float32).item()
        for one in stream
        if one.infer_response.raw_output_contents
    ]
    assert numbers == list(range(50))  # the unload waits for what runs
    wait_for(lambda: not scripts(), 30, "the model's processes to end")
    wait_for(lambda: state_of(running, "endless") == "UNAVAILABLE", 30, "the end of the unload")
    assert running.client.post(f"{running.url}/v2/repository/models/endless/load").status_code == httpx.codes.OK
    assert scripts()


def test_a_full_queue_refuses_and_is_counted(running: Running) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: running.infer("limited", [[1.0]], shape=[1, 1]).status_code, range(12)))
    assert set(answers) == {200, 503}
    line = r'^headwater_requests_total\{(?=[^}]*deployment="limited")(?=[^}]*outcome="unavailable")[^}]*\} (\S+)'
    counts = re.findall(line, running.get("/metrics").text, re.MULTILINE)
    assert sum(map(float, counts)) == answers.count(503)
    assert outputs_of(running.infer("limited", [[2.0]], shape=[1, 1]))["y"] == [2.0]
