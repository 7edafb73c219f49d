"""Sequences of a Triton repository's models over several replicas, some of which are killed."""

from __future__ import annotations

import functools
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as pb_grpc

from tests.repositories import write_repository
from tests.running import Running, leaves_nothing, wait_for

REPLICAS = 2
SEQUENCES = 50
STEPS = 12
KILL_EVERY_S = 2.0
KILLS = 3
LOST = 409
UNAVAILABLE = 503
BATCHING = """
    backend: "python"
    max_batch_size: 64
    input [{ name: "x", data_type: TYPE_INT32, dims: [ 1 ] }]
    output [{ name: "y", data_type: TYPE_INT32, dims: [ 1 ] }, { name: "starts", data_type: TYPE_INT32, dims: [ 1 ] }]
    sequence_batching {
      max_sequence_idle_microseconds: 600000000
      oldest { max_candidate_sequences: 4096 }
      control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
      control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
      STATE
    }
"""
MODELS = {
    "implicit": (
        'state [{ input_name: "in" output_name: "out" data_type: TYPE_INT32 dims: [ 1 ] }]',
        """
        class TritonPythonModel:
            def execute(self, requests):
                answers = []
                for request in requests:
                    x, total, start = (
                        pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("x", "in", "START")
                    )
                    assert start.item() == request.flags() & 1, "flags and control differ"
                    assert "headwater" not in request.parameters()
                    total = total + x
                    tensors = [("y", total), ("out", total), ("starts", start)]
                    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor(*one) for one in tensors]))
                return answers
        """,
    ),
    "explicit": (
        "",
        """
        class TritonPythonModel:
            def initialize(self, args):
                self.totals = {}

            def execute(self, requests):
                answers = []
                for request in requests:
                    x, start, id = (
                        pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("x", "START", "ID")
                    )
                    total = x if start.item() else self.totals[id.item()] + x
                    self.totals[id.item()] = total
                    tensors = [("y", total), ("starts", start)]
                    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor(*one) for one in tensors]))
                return answers
        """,
    ),
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        write_repository(
            Path(name), {m: (BATCHING.replace("STATE", state), code) for m, (state, code) in MODELS.items()}
        )
        deployment = {"model": f"triton:{name}", "replicas": REPLICAS, "max_crashes": 100}
        server = {"workers": 2, "grpc_port": 0}
        with leaves_nothing({"deployments": {"models": deployment}, "server": server}) as server_of_them:
            wait_for(lambda: server_of_them.index("models")["replicas"]["ready"] == REPLICAS, 120)
            yield server_of_them


class Sequence:
    """A sequence of a client, which adds up numbers.

    Args:
        running: the server.
        model: ``implicit`` or ``explicit``.
        id: its correlation id.
    """

    def __init__(self, running: Running, model: str, id: int | str) -> None:
        self.running = running
        self.url = f"{running.url}/v2/models/{model}/infer"
        self.model = model
        self.id = id
        self.total = self.right = self.lost = 0
        self.wrong: list[str] = []
        self._begins = True
        self._chosen = random.Random(id)

    def step(self, x: int, *, is_start: bool = False, is_end: bool = False) -> tuple[int, Any]:
        """The status, and the sum or the error's message."""
        body = {
            "inputs": [{"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [x]}],
            "parameters": {"sequence_id": self.id, "sequence_start": is_start, "sequence_end": is_end},
        }
        with httpx.Client(trust_env=False, timeout=60) as client:  # one for each thread
            answer = client.post(self.url, json=body)
        if answer.status_code != httpx.codes.OK:
            return answer.status_code, answer.json()["error"]
        outputs = {output["name"]: output["data"][0] for output in answer.json()["outputs"]}
        assert outputs["starts"] == is_start
        return answer.status_code, outputs["y"]

    def advance(self, *, is_end: bool) -> None:
        """Take a step, and note how it ended; a lost sequence begins again with its next step."""
        x = self._chosen.randrange(100)
        status, found = self.step(x, is_start=self._begins, is_end=is_end)
        while status == UNAVAILABLE and self.model == "implicit":  # then nothing of the request has an effect
            status, found = self.step(x, is_start=self._begins, is_end=is_end)
        expected = x if self._begins else self.total + x
        if (status, found) == (httpx.codes.OK, expected):
            self.right += 1
            self.total, self._begins = expected, False
        elif self.model == "explicit" and status in (LOST, UNAVAILABLE):
            self.lost += 1
            self._begins = True
        else:
            self.wrong.append(f"{self.id}: expected {expected}, got {status} {found}")


def interleaved(running: Running, model: str, count: int, steps: int, kills: int) -> list[Sequence]:
    """Take the steps of many sequences in turn, at least until this number of processes was killed."""
    done = threading.Event()
    killed = 0

    def kill() -> None:
        nonlocal killed
        while killed < kills and not done.wait(KILL_EVERY_S):
            what = ("tritonserver", "stub", "guardian")[killed % 3]
            pids = running.processes("models", what)
            if running.index("models")["replicas"]["ready"] > 1:  # one is left
                os.kill(random.Random(killed).choice(pids), signal.SIGKILL)
                killed += 1

    killer = threading.Thread(target=kill)
    killer.start()
    sequences = [Sequence(running, model, number) for number in range(1, count + 1)]
    try:
        with ThreadPoolExecutor(16) as pool:
            number = 0
            while number < steps:
                number += killed >= kills or number < steps - 1
                is_end = number == steps
                list(pool.map(functools.partial(Sequence.advance, is_end=is_end), sequences))
    finally:
        done.set()
        killer.join()
    return sequences


@pytest.mark.parametrize("model", list(MODELS))
def test_no_answer_is_wrong_although_replicas_are_killed(running: Running, model: str) -> None:
    sequences = interleaved(running, model, SEQUENCES, STEPS, KILLS)
    assert [wrong for sequence in sequences for wrong in sequence.wrong] == []
    lost = sum(sequence.lost for sequence in sequences)
    assert lost == 0 or model == "explicit"
    assert sum(sequence.right for sequence in sequences) + lost >= SEQUENCES * STEPS


def replace_all(running: Running) -> None:
    """Kill all replicas once all are ready, and wait until others serve."""
    wait_for(lambda: running.index("models")["replicas"]["ready"] == REPLICAS, 120, "all replicas to be ready")
    before = set(running.replica_folders("models"))
    for pid in running.processes("models", "tritonserver"):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not before & set(running.replica_folders("models")), 120, "all replicas to end")
    wait_for(lambda: running.index("models")["replicas"]["ready"] == REPLICAS, 120, "all others to be ready")


class TestSequences:
    @pytest.mark.parametrize(("model", "id"), [("implicit", 7), ("implicit", "seven"), ("explicit", 7)])
    def test_an_unknown_sequence_is_refused_in_tritons_words(self, running: Running, model: str, id: Any) -> None:
        status, message = Sequence(running, model, id).step(1)
        assert status == httpx.codes.BAD_REQUEST
        assert message == (
            f"inference request for sequence {id} to model '{model}' must specify the START flag on the first request "
            "of the sequence"
        )

    def test_a_sequence_that_has_ended_is_not_known(self, running: Running) -> None:
        sequence = Sequence(running, "explicit", 8)
        assert sequence.step(1, is_start=True) == (200, 1)
        assert sequence.step(2, is_end=True) == (200, 3)
        assert sequence.step(3)[0] == httpx.codes.BAD_REQUEST

    def test_a_sequence_may_begin_anew(self, running: Running) -> None:
        for model in MODELS:
            sequence = Sequence(running, model, 9)
            assert [sequence.step(1, is_start=True), sequence.step(2), sequence.step(5, is_start=True)] == [
                (200, 1), (200, 3), (200, 5),
            ]  # fmt: skip
            assert sequence.step(1, is_end=True) == (200, 6)

    def test_the_loss_of_an_explicit_state_is_said_once(self, running: Running) -> None:
        sequence = Sequence(running, "explicit", 10)
        sequence.step(1, is_start=True)
        replace_all(running)
        status, message = sequence.step(1)
        assert (status, "sequence 10 of model `explicit` is lost" in message) == (LOST, True)
        assert sequence.step(1)[0] == httpx.codes.BAD_REQUEST
        assert sequence.step(2, is_start=True, is_end=True) == (200, 2)

    def test_an_implicit_state_outlives_all_replicas(self, running: Running) -> None:
        sequence = Sequence(running, "implicit", 11)
        sequence.step(1, is_start=True)
        replace_all(running)
        assert sequence.step(2, is_end=True) == (200, 3)

    def test_steps_that_a_client_sends_at_once_are_taken_one_after_another(self, running: Running) -> None:
        sequence = Sequence(running, "implicit", 12)
        sequence.step(0, is_start=True)
        with ThreadPoolExecutor(8) as pool:
            sums = [found for _, found in pool.map(lambda _: sequence.step(1), range(8))]
        assert sorted(sums) == list(range(1, 9))
        assert sequence.step(0, is_end=True)[0] == 200

    @pytest.mark.parametrize("model", list(MODELS))
    def test_over_grpc(self, running: Running, model: str) -> None:
        def request(step: int) -> Any:
            message = pb.ModelInferRequest(model_name=model, id=str(step))
            message.inputs.add(name="x", datatype="INT32", shape=[1, 1]).contents.int_contents.append(step)
            message.parameters["sequence_id"].int64_param = 13
            message.parameters["sequence_start"].bool_param = step == 1
            message.parameters["sequence_end"].bool_param = step == 5
            return message

        with grpc.insecure_channel(running.grpc_address) as channel:
            stub = pb_grpc.GRPCInferenceServiceStub(channel)
            answers = list(stub.ModelStreamInfer(map(request, range(1, 6))))
            assert [answer.error_message for answer in answers] == [""] * 5
            sums = [int.from_bytes(answer.infer_response.raw_output_contents[0], "little") for answer in answers]
            assert sums == [1, 3, 6, 10, 15]
            assert int.from_bytes(stub.ModelInfer(request(1)).raw_output_contents[0], "little") == 1
            unknown = request(3)
            unknown.parameters["sequence_id"].int64_param = 14
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(unknown)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_states_of_ended_sequences_are_swept(running: Running) -> None:
    (folder,) = running.folder.glob("headwater-*/states/models")
    sequence = Sequence(running, "implicit", "swept")
    before = set(folder.iterdir())
    sequence.step(1, is_start=True)
    sequence.step(1)
    paths = set(folder.iterdir()) - before
    assert len(paths) == 2
    assert all(path.stat().st_mtime > time.time() - 60 for path in paths)
    sequence.step(1, is_end=True)
    assert all(path.stat().st_mtime < time.time() - 60 for path in paths)
    for path in paths:
        os.utime(path, (0, 0))
    wait_for(lambda: not paths & set(folder.iterdir()), 60)
