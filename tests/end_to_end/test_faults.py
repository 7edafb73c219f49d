"""Callables that take their replica down or hold it up: who notices, how soon, and what clients see of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.asking import events_in
from tests.running import Running, leftovers, segments_of, serve, wait_for
from tests.services.deadly import EXHAUST, EXIT, HANG, INTERRUPT, KILL, LEAVE, SEGFAULT, STOP, WAIT

MAX_COMPUTE_S = 0.5
NOTICED_WITHIN_S = 30.0
"""However busy the machine is; a request that nobody answers takes 60 s. On one that does nothing else it is 2 s, and
3 s for what stops or hangs."""
# What a row asks for, and what the reason says.
WAYS = {
    "segfaults": (SEGFAULT, "killed by SIGSEGV"),
    "killed": (KILL, "killed by SIGKILL"),
    "stops": (STOP, "is stopped"),
    "hangs": (HANG, "a call has taken longer than max_compute_s = 0.5 s"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Deployments that fail for good with their first loss, so that nothing starts meanwhile; and ``two``, with two
    replicas."""

    def deadly(**more: Any) -> dict[str, Any]:
        return {"model": "deadly:Deadly", "warmup_batch_sizes": [], "max_compute_s": MAX_COMPUTE_S, **more}

    pipeline = {
        "trunk": {"model": "devices:Trunk"},
        "heads": {
            "a": {"model": "deadly:Head", "options": {"output": "ya"}},
            "c": {"model": "deadly:Head", "options": {"output": "yc", "deadly": True}},
        },
    }
    config = {
        "deployments": {
            **{way: deadly(max_crashes=1) for way in WAYS},
            "heads": {"pipeline": pipeline, "warmup_batch_sizes": [], "max_compute_s": MAX_COMPUTE_S, "max_crashes": 1},
            "two": deadly(replicas=2, batching={"max_batch_size": 8}, max_compute_s=30),
        }
    }
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def ask(running: Running, model: str, *values: float) -> httpx.Response:
    return running.infer(model, list(values), shape=[len(values), 1])


@pytest.mark.parametrize("way", WAYS)
def test_a_replica_that_can_not_go_on_is_noticed_and_its_last_lines_are_told(server: Running, way: str) -> None:
    value, reason = WAYS[way]
    old, segments = server.replica_folder(way), segments_of(server.replica_folder(way))
    assert ask(server, way, 1).status_code == 200
    started = time.monotonic()
    answer = ask(server, way, value)
    assert time.monotonic() - started < NOTICED_WITHIN_S
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1

    wait_for(lambda: server.index(way)["state"] == "FAILED", 60, "too many crashes")
    told = server.index(way)["reason"]
    assert reason in told
    assert "1 replicas were lost within 300 s" in told
    assert f"asked for {value:g}" in told
    refused = ask(server, way, 1)
    assert (refused.status_code, reason in refused.text, "asked for" in refused.text) == (503, True, False)
    assert leftovers(old, segments) == []


def test_a_head_that_hangs_ends_its_replica_and_heads_that_answered_are_kept(server: Running) -> None:
    started = time.monotonic()
    answer = server.client.post(f"{server.url}/v2/models/heads/generate_stream", json={"x": WAIT})
    assert time.monotonic() - started < NOTICED_WITHIN_S
    events = list(events_in(answer))
    assert [(event["head"], event["status"]) for event in events if "head" in event] == [
        ("a", "ok"),
        ("c", "unavailable"),
    ]
    assert events[-1]["heads"] == {"a": "ok", "c": "unavailable"}
    wait_for(lambda: "max_compute_s" in server.index("heads")["reason"], 60, "the reason")


@pytest.mark.parametrize(
    ("value", "name"), [(LEAVE, "SystemExit"), (INTERRUPT, "KeyboardInterrupt"), (EXHAUST, "MemoryError")]
)
def test_what_would_end_a_program_ends_no_replica(server: Running, value: float, name: str) -> None:
    before = server.replica_folders("two")
    answer = ask(server, "two", value)
    assert (answer.status_code, name in answer.json()["error"]) == (500, True), answer.text
    assert ask(server, "two", 1).json()["outputs"][0]["data"] == [2.0]
    assert server.replica_folders("two") == before


def test_a_killed_replica_costs_no_answer_where_there_are_two(server: Running) -> None:
    """Under load, answers go on in every second that the client itself runs for, and each of them is right."""
    wait_for(lambda: _both_are_ready(server), 60, "both replicas")
    victim = server.replica_pid("two")
    answers: list[tuple[int, bool]] = []
    answers_per_second: list[int] = []
    url = f"{server.url}/v2/models/two/infer"
    ended = False

    async def one_after_another(first: int) -> None:
        async with httpx.AsyncClient(timeout=60, verify=False, trust_env=False) as client:
            value = first
            while not ended:
                value += 32
                tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
                answer = await client.post(url, json={"inputs": [tensor]})
                is_right = answer.status_code == 200 and answer.json()["outputs"][0]["data"] == [2 * value]
                answers.append((answer.status_code, is_right))

    async def load() -> None:
        nonlocal ended
        running = [asyncio.create_task(one_after_another(first)) for first in range(32)]
        while len(answers) < 200:  # noqa: ASYNC110 - what is awaited is on the other side
            await asyncio.sleep(0.01)
        os.kill(victim, signal.SIGKILL)
        for _ in range(3):
            before = len(answers)
            for _ in range(20):  # a machine that stands still for a second stops this loop, too
                await asyncio.sleep(0.05)
            answers_per_second.append(len(answers) - before)
        ended = True
        await asyncio.gather(*running)

    asyncio.run(load())
    assert {status for status, _ in answers} == {200}
    assert all(is_right for _, is_right in answers)
    assert min(answers_per_second) > 0, answers_per_second
    assert server.index("two")["state"] == "READY"


def _both_are_ready(server: Running) -> bool:
    replicas: Any = server.index("two")["replicas"]
    return bool(replicas["ready"] == 2)


def test_a_request_that_takes_two_replicas_down_is_refused_then(server: Running) -> None:
    wait_for(lambda: _both_are_ready(server), 60, "both replicas")
    old = server.replica_folders("two")
    answer = ask(server, "two", 5, EXIT)
    assert answer.status_code == 503, answer.text
    assert "the request took two replicas down, and is not tried again" in answer.json()["error"]
    # The request may be answered before the supervisor knows.
    wait_for(lambda: not set(old) & set(server.replica_folders("two")), 60, "the end of both replicas")
    wait_for(lambda: server.is_ready("two"), 180, "another replica")
    again = ask(server, "two", 5, EXIT)
    assert again.status_code == 422, again.text
    assert "refused for another" in again.json()["error"]
    assert ask(server, "two", 5, 6).json()["outputs"][0]["data"] == [10.0, 12.0]
