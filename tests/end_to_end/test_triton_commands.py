"""Loads and unloads that clients ask for, of models of a repository whose replicas are killed, stopped and replaced."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.repositories import write_repository
from tests.running import Running, leaves_nothing, wait_for

REPLICAS = 2
CONFIG = """
    backend: "python"
    max_batch_size: 4
    input [{ name: "x", data_type: TYPE_FP32, dims: [ 1 ] }]
    output [{ name: "y", data_type: TYPE_FP32, dims: [ 1 ] }]
    parameters { key: "factor" value { string_value: "2" } }
"""
SCRIPT = """
import json
import os

class TritonPythonModel:
    def initialize(self, args):
        self.factor = np.float32(json.loads(args["model_config"])["parameters"]["factor"]["string_value"])

    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", self.factor * x)]) for x in tensors]
"""
NAMES = ("first", "loaded", "changed", "gone")


@pytest.fixture(scope="module")
def repository() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        write_repository(Path(name), dict.fromkeys(NAMES, (CONFIG, SCRIPT)))
        yield Path(name)


@pytest.fixture(scope="module")
def running(repository: Path) -> Iterator[Running]:
    deployment: dict[str, Any] = {"model": f"triton:{repository}", "replicas": REPLICAS, "max_crashes": 100}
    deployment["options"] = {"model_control": "explicit", "load_models": ["first"]}
    with leaves_nothing({"deployments": {"models": deployment}, "server": {"workers": 2}}) as server:
        yield server


def command(running: Running, model: str, action: str, config: dict[str, Any] | None = None) -> httpx.Response:
    body = {} if config is None else {"parameters": {"config": json.dumps(config)}}
    return running.client.post(f"{running.url}/v2/repository/models/{model}/{action}", json=body)


def changed_config(factor: str) -> dict[str, Any]:
    """An override with another parameter."""
    tensor = {"data_type": "TYPE_FP32", "dims": [1]}
    return {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "parameters": {"factor": {"string_value": factor}},
    }


def answers_of(running: Running, model: str) -> set[float | int]:
    """The factor, or else the status, of answers to requests at once, which go to all replicas."""

    def ask(number: int) -> float | int:
        answer = running.infer(model, [[1.0]], shape=[1, 1])
        if answer.status_code != httpx.codes.OK:
            return answer.status_code
        factor: float = answer.json()["outputs"][0]["data"][0]
        return factor

    with ThreadPoolExecutor(16) as pool:
        return set(pool.map(ask, range(64)))


def all_ready(running: Running) -> bool:
    return bool(running.index("models")["replicas"]["ready"] == REPLICAS)


def kill_one(running: Running) -> None:
    """Kill the oldest replica, and wait until another one serves in its place."""
    wait_for(functools.partial(all_ready, running), 120, "all replicas to be ready")
    before = running.replica_folders("models")
    os.kill(running.processes("models", "tritonserver")[0], signal.SIGKILL)
    wait_for(lambda: running.replica_folders("models")[-1] not in before, 120, "another replica")
    wait_for(functools.partial(all_ready, running), 120, "all replicas to be ready")


def test_commands_outlive_the_replicas_that_got_them(running: Running) -> None:
    assert command(running, "loaded", "load").status_code == httpx.codes.OK
    assert command(running, "changed", "load", changed_config("3")).status_code == httpx.codes.OK
    assert command(running, "first", "unload").status_code == httpx.codes.OK
    for _ in range(REPLICAS):
        kill_one(running)
    assert answers_of(running, "loaded") == {2.0}
    assert answers_of(running, "changed") == {3.0}
    wait_for(lambda: all(answer >= 400 for answer in answers_of(running, "first")), 30, "the end of the unload")


def test_a_command_that_a_starting_replica_missed_is_repeated(running: Running) -> None:
    assert command(running, "first", "load").status_code == httpx.codes.OK
    wait_for(functools.partial(all_ready, running), 120, "all replicas to be ready")
    os.kill(running.processes("models", "tritonserver")[0], signal.SIGKILL)
    wait_for(lambda: not all_ready(running), 60, "the loss to be known")
    assert command(running, "changed", "load", changed_config("4")).status_code == httpx.codes.OK
    wait_for(functools.partial(all_ready, running), 120, "all replicas to be ready")
    wait_for(lambda: answers_of(running, "changed") == {4.0}, 30, "the override at all replicas")


def test_a_load_that_can_not_be_repeated_is_a_warning(running: Running, repository: Path) -> None:
    assert command(running, "gone", "load").status_code == httpx.codes.OK
    shutil.rmtree(repository / "gone" / "1")
    kill_one(running)
    lines = [line for line in running.log.read_text().splitlines() if "model gone: a client's load" in line]
    assert len(lines) == 1
    assert "can't be repeated: " in lines[0]
    assert answers_of(running, "loaded") == {2.0}
    assert command(running, "gone", "unload").status_code == httpx.codes.OK


def test_a_replica_that_is_stopped_is_named_and_the_next_command_works(running: Running) -> None:
    wait_for(functools.partial(all_ready, running), 120, "all replicas to be ready")
    command(running, "loaded", "unload")
    stopped = running.processes("models", "tritonserver")[0]
    os.kill(stopped, signal.SIGSTOP)  # the guardian ends it
    answer = command(running, "loaded", "load")
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
    assert "ended before it answered load, and the other replicas keep what they did; send load again" in answer.text
    wait_for(functools.partial(all_ready, running), 120, "all replicas to be ready")
    assert command(running, "loaded", "load").status_code == httpx.codes.OK
    wait_for(lambda: answers_of(running, "loaded") == {2.0}, 30, "the load at all replicas")


def test_a_reload_keeps_commands_and_an_unload_of_the_deployment_forgets_them(running: Running) -> None:
    assert command(running, "models", "reload").status_code == httpx.codes.OK
    assert answers_of(running, "changed") == {4.0}
    assert command(running, "models", "unload").status_code == httpx.codes.OK
    assert command(running, "models", "load").status_code == httpx.codes.OK
    assert answers_of(running, "first") == {2.0}
    assert all(answer >= 400 for answer in answers_of(running, "changed"))
