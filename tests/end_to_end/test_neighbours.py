"""A deployment that has more to do than it can, and another one beside it."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.running import Running, in_background, serve, wait_for

SENDERS = 24
BATCH_S = 0.04
REQUESTS = 40


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Room for 16 rows, which ``greedy`` alone could fill; 8 are sure to each."""
    batching = {"max_batch_size": 4, "max_in_flight": 1, "max_queue_size": 1000, "priority_weights": {1: 3, 10: 1}}
    slow = {"model": "faulty:Slow", "batching": batching, "threads": 1, "warmup_batch_sizes": []}
    config = {"deployments": {"greedy": slow, "quiet": slow}, "server": {"max_queue_size": 16}}
    with serve(config) as running:
        yield running


def statistics(server: Running, model: str) -> dict[str, Any]:
    """What the server itself counted."""
    (found,) = server.get(f"/v2/models/{model}/stats").json()["model_stats"]
    counts: dict[str, Any] = found["inference_stats"]
    return counts


def test_one_that_is_saturated_costs_another_neither_answers_nor_time(server: Running) -> None:
    statuses: Counter[int] = Counter()
    served: Counter[int] = Counter()
    """By priority, while there was more to do than could be."""
    messages: set[str] = set()
    done = threading.Event()
    lock = threading.Lock()

    def send(priority: int) -> None:
        while not done.is_set():
            answer = server.infer("greedy", [BATCH_S], shape=[1, 1], parameters={"priority": priority})
            with lock:
                statuses[answer.status_code] += 1
                served[priority] += answer.status_code == 200 and not done.is_set()
                if answer.status_code == 429:
                    messages.add(answer.json()["error"].partition(": ")[2].partition(":")[0])
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
                done.wait(BATCH_S)

    calls = [functools.partial(send, priority) for priority in (1, 10)] * (SENDERS // 2)
    with in_background(*calls) as senders:
        try:
            wait_for(lambda: statuses[429], 30, "the room to be full")
            for value in range(REQUESTS):
                answer = server.infer("quiet", [BATCH_S, -value], shape=[2, 1])
                assert answer.status_code == 200, answer.text
                assert answer.json()["outputs"][0]["data"] == [pytest.approx(BATCH_S), -value]
        finally:
            done.set()
    assert senders == [None] * SENDERS
    assert set(statuses) == {200, 429}
    assert served[10] < served[1] < 10 * served[10]  # 3 to 1, had both always something waiting
    assert messages == {"the server's queues are full"}
    quiet = statistics(server, "quiet")
    assert quiet["success"]["count"] == REQUESTS
    assert quiet["queue"]["ns"] / REQUESTS < quiet["compute_infer"]["ns"] / REQUESTS
    greedy = statistics(server, "greedy")
    assert greedy["queue"]["ns"] / greedy["success"]["count"] > BATCH_S * 1e9  # it was saturated indeed
