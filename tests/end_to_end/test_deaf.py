"""Replicas that run and answer nothing: they are replaced, and no request is blamed that didn't cause it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.running import Running, leaves_nothing, wait_for
from tests.services.deaf import CLOSE, FORK


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    deaf = {"model": "deaf:Deaf", "timeout_s": 5, "max_crashes": 100}
    with leaves_nothing({"deployments": {"two": {**deaf, "replicas": 2}, "one": deaf}}) as running:
        yield running


def _ready(server: Running) -> int:
    replicas: Any = server.index("two")["replicas"]
    return int(replicas["ready"])


def ask(server: Running, model: str, value: float) -> httpx.Response:
    return server.infer(model, [value], shape=[1, 1])


def test_replicas_whose_files_were_closed_are_replaced_and_no_other_request_is_told_that_it_did_it(
    server: Running,
) -> None:
    wait_for(lambda: _ready(server) == 2, 120, "both replicas")
    before = set(server.replica_folders("two"))
    assert ask(server, "two", CLOSE).status_code == 503
    answers: list[httpx.Response] = []

    def is_replaced() -> bool:
        answers.append(ask(server, "two", 1))
        return before.isdisjoint(server.replica_folders("two"))

    wait_for(is_replaced, 120, "both replicas to be replaced")
    wait_for(lambda: ask(server, "two", 1).status_code == 200, 60, "an answer")
    assert {answer.status_code for answer in answers} <= {200, 503, 504}
    assert not any("took two replicas down" in answer.text for answer in answers)


def test_a_replica_whose_callable_forks_answers_on_and_each_call_gets_its_own_answer(server: Running) -> None:
    wait_for(lambda: ask(server, "one", 1).status_code == 200, 60, "an answer")
    before = server.replica_folder("one")
    for value in (FORK, 10, FORK, 11, 12):
        answer = ask(server, "one", value)
        assert answer.status_code == 200
        assert answer.json()["outputs"][0]["data"] == [2 * value]
    assert server.replica_folder("one") == before


def test_a_replica_that_nobody_asks_is_replaced_too(server: Running) -> None:
    before = server.replica_folder("one")
    ask(server, "one", CLOSE)
    wait_for(lambda: before not in server.replica_folders("one"), 240, "the replica's end")
    wait_for(lambda: ask(server, "one", 1).status_code == 200, 60, "an answer")
    assert "it does not answer" in server.log.read_text()
