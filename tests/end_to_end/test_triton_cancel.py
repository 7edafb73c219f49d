"""Decoupled models of a Triton repository that generate until their request has ended."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.repositories import write_repository
from tests.running import Running, leaves_nothing, wait_for

NOTICE_S = 20
ENDLESS = 1_000_000
FEW = 2
VECTORS = """
    input [{ name: "count", data_type: TYPE_INT32, dims: [ 1 ] }]
    output [{ name: "number", data_type: TYPE_INT32, dims: [ 1 ] }]
"""
MODELS = {
    "streams": (
        f'backend: "python"\n{VECTORS}\nmodel_transaction_policy {{ decoupled: true }}',
        """
        import time

        class TritonPythonModel:
            def initialize(self, args):
                family = pb_utils.MetricFamily("noticed", "Requests that were cancelled", pb_utils.MetricFamily.COUNTER)
                self.noticed = family.Metric({})

            def execute(self, requests):
                for request in requests:
                    assert "headwater" not in request.parameters()
                    sender = request.get_response_sender()
                    number, count = 0, request.inputs()[0].as_numpy().item()
                    while not sender.is_cancelled():
                        if number < count:
                            tensor = pb_utils.Tensor("number", np.array([number], np.int32))
                            sender.send(pb_utils.InferenceResponse([tensor]))
                            number += 1
                        time.sleep(0.001)
                    self.noticed.increment(1)
                    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        """,
    ),
    "chain": (
        f"""
        platform: "ensemble"
        {VECTORS}
        ensemble_scheduling {{ step [{{
          model_name: "streams" model_version: -1
          input_map {{ key: "count" value: "count" }} output_map {{ key: "number" value: "number" }}
        }}] }}
        """,
        "",
    ),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        write_repository(Path(name), MODELS)
        deployment = {"model": f"triton:{name}", "timeout_s": 2}
        with leaves_nothing({"deployments": {"models": deployment}, "server": {"grpc_port": 0}}) as server:
            yield server


@pytest.fixture
def noticed(running: Running) -> Iterator[None]:
    """The model notices the end of a request that the test sends, and takes the next."""
    before = count_of(running)
    yield
    wait_for(lambda: count_of(running) == before + 1, NOTICE_S, "the model to notice the end")


def count_of(running: Running) -> float:
    """How many requests the model has seen cancelled."""
    counts = re.findall(r"^noticed\{[^}]*\} (\S+)", running.get("/metrics").text, re.MULTILINE)
    return sum(map(float, counts))


@pytest.mark.usefixtures("noticed")
class TestHttp:
    @pytest.mark.parametrize("model", list(MODELS))
    def test_a_client_that_leaves_ends_the_model(self, running: Running, model: str) -> None:
        url = f"{running.url}/v2/models/{model}/generate_stream"
        body = {"count": ENDLESS, "headwater_request": "0-0-0000000000000000"}  # a client can't name a request
        with running.client.stream("POST", url, json=body) as answer:
            assert answer.status_code == httpx.codes.OK
            events = (line for line in answer.iter_lines() if line)
            assert '"number":0' in next(events)
            assert '"number":1' in next(events)

    def test_a_worker_that_is_killed_ends_the_model(self, running: Running) -> None:
        body = {"count": ENDLESS}
        with running.client.stream("POST", f"{running.url}/v2/models/streams/generate_stream", json=body) as answer:
            assert '"number":0' in next(answer.iter_lines())
            (worker,) = running.workers()
            os.kill(worker, signal.SIGKILL)
        wait_for(lambda: running.workers() not in ([], [worker]), NOTICE_S, "the next worker")

    def test_a_deadline_ends_the_model(self, running: Running) -> None:
        answer = running.client.post(f"{running.url}/v2/models/streams/generate_stream", json={"count": FEW})
        *numbers, last = answer.text.strip().split("\n\n")
        assert len(numbers) == FEW
        assert "the deadline of 2 s passed" in last

    def test_a_deadline_of_a_whole_answer_ends_the_model(self, running: Running) -> None:
        answer = running.client.post(f"{running.url}/v2/models/streams/generate", json={"count": 1})
        assert answer.status_code == httpx.codes.GATEWAY_TIMEOUT

    def test_a_client_that_leaves_before_a_whole_answer_ends_the_model(self, running: Running) -> None:
        with pytest.raises(httpx.ReadTimeout):
            running.client.post(f"{running.url}/v2/models/streams/generate", json={"count": 1}, timeout=0.3)


@pytest.mark.usefixtures("noticed")
def test_a_client_over_grpc_that_leaves_ends_the_model(running: Running) -> None:
    message = pb.ModelInferRequest(model_name="streams")
    message.inputs.add(name="count", datatype="INT32", shape=[1]).contents.int_contents.append(ENDLESS)
    with grpc.insecure_channel(running.grpc_address) as channel:
        stub: Any = pb_grpc.GRPCInferenceServiceStub(channel)
        stream = stub.ModelStreamInfer(iter([message]))
        for _ in range(FEW):
            assert next(stream).infer_response.raw_output_contents
        stream.cancel()
