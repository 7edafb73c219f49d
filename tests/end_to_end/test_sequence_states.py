"""A model's states between the requests of a sequence, while processes are killed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import model_config_pb2 as config_pb
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.running import Running, leaves_nothing, wait_for

REPLICAS = 2
KILL_EVERY_S = 1.5
SEQUENCES = 40
STEPS = 12


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    deployment = {"model": "remembering:Sums", "replicas": REPLICAS, "max_crashes": 100}
    server = {"workers": 2, "grpc_port": 0}
    with leaves_nothing({"deployments": {"sums": deployment}, "server": server}) as server_of_them:
        wait_for(lambda: server_of_them.index("sums")["replicas"]["ready"] == REPLICAS, 120)
        yield server_of_them


def step(running: Running, id: int | str, x: int, *, start: bool = False, end: bool = False) -> httpx.Response:
    body = {
        "inputs": [{"name": "x", "datatype": "INT64", "shape": [1, 1], "data": [x]}],
        "parameters": {"sequence_id": id, "sequence_start": start, "sequence_end": end},
    }
    with httpx.Client(trust_env=False, timeout=60) as client:  # one for each thread
        return client.post(f"{running.url}/v2/models/sums/infer", json=body)


def total(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    outputs = {output["name"]: output["data"][0] for output in answer.json()["outputs"]}
    assert outputs.keys() == {"y", "rows"}
    return int(outputs["y"])


class TestSequence:
    def test_a_sequence_from_start_to_end(self, running: Running) -> None:
        assert total(step(running, 1, 5, start=True)) == 5
        assert [total(step(running, 1, 1)) for _ in range(4)] == [6, 7, 8, 9]
        assert total(step(running, 1, 1, end=True)) == 10
        refused = step(running, 1, 1)
        assert refused.status_code == 400
        assert "must specify the START flag" in refused.json()["error"]

    def test_a_refused_row_changes_nothing(self, running: Running) -> None:
        assert total(step(running, "text", 5, start=True)) == 5
        assert step(running, "text", -1).status_code == 400
        assert total(step(running, "text", 1, end=True)) == 6

    def test_generate(self, running: Running) -> None:
        url = f"{running.url}/v2/models/sums/generate"
        for route, start, expected in (("", True, '"y":3'), ("", False, '"y":6'), ("_stream", False, '"y":9')):
            answer = running.client.post(url + route, json={"x": 3, "sequence_id": 2, "sequence_start": start})
            assert answer.status_code == 200
            assert expected in answer.text
        lacking = running.client.post(url, json={"x": 3})
        assert (lacking.status_code, "parameters.sequence_id: expected the id" in lacking.text) == (400, True)

    def test_the_descriptions_have_no_states(self, running: Running) -> None:
        metadata = running.get("/v2/models/sums").json()
        assert [tensor["name"] for tensor in metadata["inputs"]] == ["x"]
        assert [tensor["name"] for tensor in metadata["outputs"]] == ["y", "rows"]
        states = running.get("/v2/models/sums/config").json()["sequence_batching"]["state"]
        assert [state["output_name"] for state in states] == ["total", "new_count"]
        body = running.get("/openapi.json").json()["paths"]["/v2/models/sums/infer"]["post"]["requestBody"]
        example = body["content"]["application/json"]["example"]
        assert example["parameters"] == {"sequence_id": 1, "sequence_start": True}
        assert running.client.post(f"{running.url}/v2/models/sums/infer", json=example).status_code == 200

    def test_over_grpc(self, running: Running) -> None:
        def request(x: int) -> Any:
            message = pb.ModelInferRequest(model_name="sums", id=str(x))
            message.inputs.add(name="x", datatype="INT64", shape=[1, 1]).contents.int64_contents.append(x)
            message.parameters["sequence_id"].int64_param = 3
            message.parameters["sequence_start"].bool_param = x == 1
            return message

        with grpc.insecure_channel(running.grpc_address) as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            answers = list(stub.ModelStreamInfer(iter(map(request, range(1, 6)))))
            sums = [int.from_bytes(one.infer_response.raw_output_contents[0], "little") for one in answers]
            assert sums == list(itertools.accumulate(range(1, 6)))
            config = stub.ModelConfig(pb.ModelConfigRequest(name="sums")).config
            assert isinstance(config, config_pb.ModelConfig)
            assert [state.input_name for state in config.sequence_batching.state] == ["total", "count"]


class Walk:
    """A client's sequence, in which the client adds up the numbers, too."""

    def __init__(self, running: Running, id: int) -> None:
        self.running = running
        self.id = id
        self.chosen = random.Random(id)
        self.total: int | None = None
        self.right = self.unknown = 0
        self.wrong: list[str] = []

    def advance(self) -> None:
        """Take a step; where the connection ends without an answer, begin anew with the next."""
        x, before = self.chosen.randrange(100), self.total
        expected = x if before is None else before + x
        while True:
            try:
                answer = step(self.running, self.id, x, start=before is None)
            except httpx.TransportError:  # a worker was killed: whether the step counts is not known
                self.total, self.unknown = None, self.unknown + 1
                return
            if answer.status_code != 503:  # without effect, as it says
                break
        if answer.status_code == 200 and total(answer) == expected:
            self.total, self.right = expected, self.right + 1
        else:
            self.wrong.append(f"{self.id}: expected {expected}, got {answer.status_code} {answer.text}")


@pytest.mark.parametrize("targets", [("tritonserver", "host", "guardian"), ("worker",)], ids=["replicas", "workers"])
def test_no_answer_is_wrong_although_processes_are_killed(running: Running, targets: tuple[str, ...]) -> None:
    done, killed = threading.Event(), 0

    def kill() -> None:
        nonlocal killed
        while killed < 3 and not done.wait(KILL_EVERY_S):
            target = targets[killed % len(targets)]
            pids = running.workers() if target == "worker" else running.processes("sums", target)
            if running.index("sums")["replicas"]["ready"] > 1:
                os.kill(random.Random(killed).choice(pids), signal.SIGKILL)
                killed += 1

    killer = threading.Thread(target=kill)
    killer.start()
    walks = [Walk(running, id) for id in range(1000, 1000 + SEQUENCES)]
    try:
        with ThreadPoolExecutor(16) as pool:
            steps = 0
            while steps < STEPS or (killed < 3 and killer.is_alive()):
                list(pool.map(Walk.advance, walks))
                steps += 1
    finally:
        done.set()
        killer.join()
    assert killed == 3
    assert [wrong for walk in walks for wrong in walk.wrong] == []
    unknown = sum(walk.unknown for walk in walks)
    assert unknown == 0 or targets == ("worker",)
    assert sum(walk.right for walk in walks) + unknown >= SEQUENCES * STEPS
    wait_for(lambda: running.index("sums")["replicas"]["ready"] == REPLICAS, 120)


def test_rows_of_several_sequences_share_a_call(running: Running) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda id: step(running, id, 1, start=True).json(), range(2000, 2200)))
    rows = [{output["name"]: output["data"][0] for output in answer["outputs"]}["rows"] for answer in answers]
    assert max(rows) > 1
