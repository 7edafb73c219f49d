"""Errors of a device, without one: memory that does not suffice harms nobody else, and a poisoned context ends the
replica."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.conftest import TINY
from tests.end_to_end.test_metrics import Scrape
from tests.running import Running, leftovers, segments_of, serve, wait_for
from tests.services.devices import BREAKS, NEVER_FITS


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    pipeline = {
        "trunk": {"model": "devices:Trunk"},
        "heads": {
            "a": {"model": "devices:Head", "options": {"output": "ya"}},
            "c": {"model": "devices:Head", "options": {"output": "yc", "device": True}},
        },
    }
    config = {
        "deployments": {
            "plain": {"model": "devices:Device", "options": {"most": 3}, "warmup_batch_sizes": [1]},
            "heads": {"pipeline": pipeline, "warmup_batch_sizes": [1]},
            "lm": {"model": TINY, "options": {"engine": "devices:engine"}, "warmup_batch_sizes": []},
        }
    }
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def test_a_batch_that_does_not_fit_is_computed_in_parts_and_the_operator_is_told(server: Running) -> None:
    before = server.replica_pid("plain")
    values = [float(value) for value in range(10)]
    for _ in range(2):
        answer = server.infer("plain", values, shape=[10, 1])
        assert answer.json()["outputs"][0]["data"] == [2 * value for value in values]
    told = "plain: out of memory with 10 rows at once; computes at most 3 for 300 s"
    wait_for(lambda: told in server.log.read_text(), 10, "the warning")
    assert server.log.read_text().count("out of memory with") == 1
    replica = wait_for(
        lambda: Scrape(server).of("headwater_replica_batch_limit", deployment="plain") == 3, 30, "the metric"
    )
    assert replica
    assert server.replica_pid("plain") == before


@pytest.mark.parametrize("model", ["plain", "heads"])
def test_a_row_that_never_fits_fails_alone_and_the_replica_goes_on(server: Running, model: str) -> None:
    before = server.replica_pid(model)
    answer = server.infer(model, [1, NEVER_FITS, 3], shape=[3, 1])
    error = answer.json()["error"]
    assert answer.status_code == 500
    assert "row 1: out of memory on cpu with 1 row alone; send a smaller input" in error
    assert server.infer(model, [1, 3], shape=[2, 1]).status_code == 200
    assert server.replica_pid(model) == before


@pytest.mark.parametrize("model", ["plain", "heads"])
def test_a_poisoned_context_replaces_the_replica(server: Running, model: str) -> None:
    before = server.replica_folders(model)
    answer = server.infer(model, [1, BREAKS], shape=[2, 1])
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    wait_for(lambda: not set(before) & set(server.replica_folders(model)), 60, "the replica's end")
    wait_for(lambda: server.infer(model, [1, 3], shape=[2, 1]).status_code == 200, 60, "another one's answers")


def test_a_poisoned_context_of_an_engine_replaces_the_replica(server: Running) -> None:
    before = server.replica_folders("lm")

    def ask(*prompt: int) -> int:
        body = {"model": "lm", "prompt": prompt, "max_tokens": 2}
        return server.client.post(f"{server.url}/v1/completions", json=body).status_code

    assert ask(5, 6, 7) == 200
    assert ask(5) == 503
    wait_for(lambda: not set(before) & set(server.replica_folders("lm")), 60, "the replica's end")
    wait_for(lambda: ask(5, 6, 7) == 200, 60, "another one's answers")
