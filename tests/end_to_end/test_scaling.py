"""Replicas of a running server: as many as an operator says, as the load takes, and as the memory budget allows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headwater_server.process.machine import HOST, measure_groups_by_place
from tests.running import Running, in_background, leftovers, segments_of, serve, wait_for

MIB = 2**20
LARGE = 400 * MIB
"""What a replica of ``large`` takes beside what each takes, which is 90 to 120 MiB."""
LIMIT = 1480 * MIB
"""Room for two of ``large`` and what else is there, and not for three."""
CLIENTS = 6


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """A server whose deployments are left with one replica each.

    - ``large``: takes `LARGE` of memory;
    - ``slow``: computes 0.1 s a row, one at a time, and has one or two replicas;
    - ``two``: has two instances, and answers only when both compute.
    """
    one_row: dict[str, Any] = {"batching": {"max_batch_size": 1}, "warmup_batch_sizes": []}
    config = {
        "deployments": {
            "large": {
                "model": "scaled:Large",
                "options": {"size_bytes": LARGE},
                "warmup_batch_sizes": [],
                "drain_timeout_s": 5,
            },
            "slow": {
                "model": "scaled:Slow",
                "options": {"seconds": 0.1},
                "replicas": {"min": 1, "max": 2},
                "scaling": {"queue_wait_ms": 50, "up_after_s": 1, "down_after_s": 1},
                **one_row,
            },
            "two": {"model": "scaled:Meeting", "options": {"parties": 2}, "instances": 2, **one_row},
        },
        "server": {"memory_limit": f"{LIMIT // MIB}MiB"},
    }
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def scale(running: Running, model: str, **bounds: int) -> httpx.Response:
    return running.client.post(f"{running.url}/v2/repository/models/{model}/scale", json=bounds)


def replicas(running: Running, model: str) -> dict[str, int]:
    found: dict[str, int] = running.index(model)["replicas"]
    return found


def taken(running: Running) -> int:
    """What all replicas have of the machine's memory."""
    folders = [folder for model in ("large", "slow", "two") for folder in running.replica_folders(model)]
    groups = {json.loads((folder / "journal.json").read_text())["host_pid"] for folder in folders}
    return sum(one[HOST] for one in measure_groups_by_place(groups).values())


def test_replicas_are_added_as_long_as_there_is_memory_and_the_budget_is_never_crossed(running: Running) -> None:
    before = taken(running)
    assert LARGE < before < LIMIT
    answer = scale(running, "large", replicas=2)
    assert (answer.status_code, answer.json()["replicas"]) == (200, {"ready": 2, "wanted": 2, "min": 2, "max": 2})
    assert before + LARGE < taken(running) < LIMIT

    folders = running.replica_folders("large")
    for bounds in ({"replicas": 3}, {"min": 3, "max": 5}):
        answer = scale(running, "large", **bounds)
        assert answer.status_code == 409
        error = answer.json()["error"]
        told = re.match(
            r"no capacity for another replica of `large`: memory of the machine: it takes (\d+) MiB, and of the "
            r"(\d+) MiB that replicas may take (\d+) MiB are taken",
            error,
        )
        assert told is not None, error
        needed, limit, already = (int(figure) * MIB for figure in told.groups())
        assert (needed > LARGE, already > 2 * LARGE, limit) == (True, True, LIMIT), error
        assert already + needed > limit
    # A reload would have both for a while.
    reload = running.client.post(f"{running.url}/v2/repository/models/large/reload")
    assert reload.status_code == 409
    assert "no capacity for 2 more replicas of `large`" in reload.json()["error"]
    assert "expected `strategy: recreate`" in reload.json()["error"]
    assert running.replica_folders("large") == folders
    assert replicas(running, "large") == {"ready": 2, "wanted": 2, "min": 2, "max": 2}
    assert running.infer("large", [5.0], shape=[1, 1]).status_code == 200

    segments = set().union(*map(segments_of, folders))
    answer = scale(running, "large", replicas=1)
    assert answer.status_code == 200
    assert answer.json()["leftovers"] == []
    assert answer.json()["freed"]["host_bytes"] > LARGE
    (left,) = running.replica_folders("large")
    (gone,) = set(folders) - {left}
    assert leftovers(gone, segments - segments_of(left)) == []
    assert taken(running) < before + LARGE // 2


def test_load_brings_a_second_replica_and_its_end_takes_it_away_without_an_error(running: Running) -> None:
    answered: list[int] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answered.append(running.infer("slow", [1.0], shape=[1, 1]).status_code)

    assert replicas(running, "slow") == {"ready": 1, "wanted": 1, "min": 1, "max": 2}
    with in_background(*[ask] * CLIENTS) as results:
        try:
            wait_for(lambda: replicas(running, "slow")["ready"] == 2, timeout_s=90, what="a second replica")
        finally:
            is_over.set()
    assert results == [None] * CLIENTS
    wait_for(lambda: replicas(running, "slow")["ready"] == 1, timeout_s=60, what="the end of the load to be noticed")
    wait_for(lambda: len(running.replica_folders("slow")) == 1, what="the second replica's end")
    assert set(answered) == {200}


def test_instances_compute_at_once_on_one_copy_of_the_model(running: Running) -> None:
    with in_background(*[lambda: running.infer("two", [1.0], shape=[1, 1])] * 4) as results:
        pass
    outputs = [{one["name"]: one["data"][0] for one in answer.json()["outputs"]} for answer in results]
    assert len({one["thread"] for one in outputs}) == 2
    assert {one["loads"] for one in outputs} == {1}


def test_what_cannot_be_is_refused_and_changes_nothing(running: Running) -> None:
    for status, model, bounds in (
        (400, "slow", {"replicas": 0}),
        (400, "slow", {"replicas": 1001}),
        (400, "slow", {"min": 3, "max": 2}),
        (400, "slow", {"replicas": 2, "min": 1}),
        (400, "slow", {"count": 2}),
        (404, "nothing", {"replicas": 2}),
    ):
        answer = scale(running, model, **bounds)
        assert (answer.status_code, "error" in answer.json()) == (status, True), answer.text
    assert replicas(running, "slow")["max"] == 2
