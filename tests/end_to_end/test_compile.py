"""Models whose modules are compiled, served on this machine's CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.running import Running, leftovers, segments_of, serve, wait_for

COMPILED = {"model": "headwater.zoo.digits:Digits", "device": "cpu", "options": {"compile": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    config = {
        "deployments": {
            "plain": {**COMPILED, "options": {}},
            "compiled": {**COMPILED, "batching": {"max_batch_size": 4}},
            "without": {**COMPILED, "environment": {"CXX": "no-such-compiler"}},
        }
    }
    with serve(config, ready=False) as running:
        wait_for(lambda: running.is_ready("plain") and running.is_ready("compiled"), 300, "both to be ready")
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def logits(running: Running, model: str, image: list[float], rows: int) -> list[float]:
    answer = running.infer(model, image, shape=[rows, 1, 8, 8], name="image")
    assert answer.status_code == 200, answer.text
    outputs: dict[str, Any] = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    found: list[float] = outputs["logits"]
    return found


@pytest.mark.parametrize("rows", [1, 3, 4, 7])
def test_the_answers_are_those_of_the_model_as_it_is(server: Running, rows: int) -> None:
    chance = random.Random(rows)
    image = [float(chance.randint(0, 16)) for _ in range(rows * 64)]
    assert logits(server, "compiled", image, rows) == pytest.approx(logits(server, "plain", image, rows), abs=1e-4)


def test_without_a_compiler_it_does_not_start_and_says_why(server: Running) -> None:
    wait_for(lambda: server.index("without")["state"] == "FAILED", 60, "the failed start")
    told = "options.compile: it needs a C++ compiler, and there is no no-such-compiler"
    assert told in server.index("without")["reason"]
