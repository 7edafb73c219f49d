"""Requests that end replicas, each another one: they harm the key that sends them, and the server stays."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater_server.security.keys import Key, make_key
from headwater_server.security.keys_file import change_file
from tests.running import Running, leaves_nothing, wait_for
from tests.services.deadly import SEGFAULT


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The keys, by name."""
    return {}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str]) -> Iterator[Running]:
    keys = []
    for name in ("mallory", "alice", "operator"):
        texts[name], digest = make_key()
        keys.append(Key(name, digest, ("admin", "infer") if name == "operator" else ("infer",)))
    path: Path = tmp_path_factory.mktemp("poison") / "keys.json"
    change_file(path, lambda _: keys)
    deadly = {"model": "deadly:Deadly", "warmup_batch_sizes": [], "max_crashes": 2}
    config = {
        "deployments": {"two": {**deadly, "replicas": 2}, "one": {**deadly, "max_crashes": 1}},
        "security": {"keys_file": str(path)},
    }
    with leaves_nothing(config) as running:
        yield running


def ask(server: Running, model: str, key: str, *values: float) -> httpx.Response:
    tensor: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [len(values), 1], "data": list(values)}
    return server.client.post(
        f"{server.url}/v2/models/{model}/infer", json={"inputs": [tensor]}, headers={"X-API-Key": key}
    )


def test_poison_requests_of_one_key_bar_that_key_and_not_the_model(server: Running, texts: dict[str, str]) -> None:
    poison = itertools.count(1)

    def refused() -> httpx.Response | None:
        answer = ask(server, "two", texts["mallory"], SEGFAULT, next(poison))
        return answer if answer.status_code == 429 else None

    wait_for(lambda: refused() is not None, 60, "the key to be refused")
    answer = refused()
    assert answer is not None
    assert "requests of `mallory` ended 2 replicas of model `two`" in answer.json()["error"]
    assert 1 <= int(answer.headers["retry-after"]) <= 300
    assert ask(server, "two", texts["mallory"], 1).status_code == 429
    wait_for(lambda: ask(server, "two", texts["alice"], 1).status_code == 200, 60, "the others' requests")
    assert ask(server, "one", texts["mallory"], 1).status_code == 200
    path = f"{server.url}/v2/repository/models/two/reload"
    assert server.client.post(path, headers={"X-API-Key": texts["operator"]}).status_code == 200
    assert ask(server, "two", texts["mallory"], 1).status_code == 200


def test_a_model_that_is_failed_for_its_crashes_does_not_end_the_server(server: Running, texts: dict[str, str]) -> None:
    os.kill(server.replica_pid("one"), signal.SIGKILL)  # it has no request
    headers = {"X-API-Key": texts["operator"]}

    def state() -> str:
        index = server.client.get(f"{server.url}/v2/repository/index", headers=headers).json()
        return str(next(one["state"] for one in index if one["name"] == "one"))

    wait_for(lambda: state() == "FAILED", 60, "the crash")
    assert server.client.get(f"{server.url}/v2/health/live").status_code == 200
    wait_for(lambda: state() == "READY", 120, "the next try")
    assert ask(server, "one", texts["alice"], 1).status_code == 200
