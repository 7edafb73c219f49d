"""Models with an async `__call__`, `load` and `unload`, behind a server: their calls overlap."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running import Running, leftovers, segments_of, serve, wait_for
from tests.services.coroutines import ALONE, BAD, HANGS

PARTIES = 32
FEW = 4


@pytest.fixture(scope="module")
def unloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Appears when ``plain`` is unloaded."""
    return tmp_path_factory.mktemp("coroutines") / "unloaded"


@pytest.fixture(scope="module")
def server(unloaded: Path) -> Iterator[Running]:
    one_row = {"batching": {"max_batch_size": 1, "max_in_flight": PARTIES}}
    meets = {"model": "coroutines:Meets", "options": {"parties": PARTIES, "unloaded": str(unloaded)}, **one_row}
    few = {"model": "coroutines:Meets", "options": {"parties": FEW}, "warmup_batch_sizes": []}
    head = {"model": "coroutines:Meets", "options": {"parties": FEW}, "inputs": {"x": "trunk.x"}}
    steps = {"trunk": {"model": "coroutines:Trunk"}, "heads": {"meets": head}}
    config = {
        "deployments": {
            "plain": {**meets, "warmup_batch_sizes": []},
            "steps": {
                "pipeline": steps, "warmup_batch_sizes": [], "batching": {"max_batch_size": 1, "max_in_flight": FEW},
            },
            "watched": {**few, **one_row, "max_compute_s": 1.0, "timeout_s": 60},
        }
    }  # fmt: skip
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert unloaded.exists()
        assert leftovers(running.folder, segments) == []


def at_once(running: Running, model: str, *values: float, name: str = "x", **body: Any) -> list[httpx.Response]:
    """The answers to one row each, asked at the same time."""
    with ThreadPoolExecutor(len(values)) as pool:
        return list(pool.map(lambda value: running.infer(model, [value], shape=[1, 1], name=name, **body), values))


def results(answers: list[httpx.Response]) -> list[float]:
    assert [answer.status_code for answer in answers] == [200] * len(answers), answers[0].text
    return [answer.json()["outputs"][0]["data"][0] for answer in answers]


def test_as_many_requests_are_computed_at_once_as_may_be_in_flight(server: Running) -> None:
    before = successes(server, "plain")
    values = [float(value) for value in range(PARTIES)]
    assert results(at_once(server, "plain", *values)) == [2 * value for value in values]
    assert successes(server, "plain") == before + PARTIES


def test_so_are_those_of_a_pipelines_step(server: Running) -> None:
    values = [float(value) for value in range(FEW)]
    assert results(at_once(server, "steps", *values, name="x0")) == [2 * (value + 1) for value in values]


def test_a_row_that_is_wrong_fails_while_others_wait(server: Running) -> None:
    with ThreadPoolExecutor(PARTIES) as pool:
        waiting = [pool.submit(server.infer, "plain", [float(value)], shape=[1, 1]) for value in range(PARTIES - 1)]
        wait_for(lambda: server.in_flight("plain") == PARTIES - 1)
        refused = server.infer("plain", [BAD], shape=[1, 1])
        assert (refused.status_code, "-1 on purpose" in refused.text) == (400, True)
        assert results([server.infer("plain", [ALONE], shape=[1, 1])]) == [2 * ALONE]
        late = server.infer("plain", [HANGS], shape=[1, 1], parameters={"timeout": 200_000})
        assert late.status_code == 504
        # What was late is cancelled, so its place is free again.
        assert results([server.infer("plain", [1.0], shape=[1, 1])]) == [2]
        assert results([one.result() for one in waiting]) == [2.0 * value for value in range(PARTIES - 1)]


def test_a_call_that_hangs_ends_its_replica_and_another_answers(server: Running) -> None:
    with ThreadPoolExecutor(1) as pool:
        hangs = pool.submit(server.infer, "watched", [HANGS], shape=[1, 1])
        assert hangs.result().status_code in (429, 500, 503)
    wait_for(lambda: server.is_ready("watched"), 60)
    values = [float(value) for value in range(FEW)]
    assert results(at_once(server, "watched", *values)) == [2 * value for value in values]


def test_an_unload_waits_for_calls_that_are_under_way(server: Running, unloaded: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        hangs = pool.submit(server.infer, "plain", [HANGS], shape=[1, 1], parameters={"timeout": 2_000_000})
        wait_for(lambda: server.in_flight("plain") == 1)
        answer = server.client.post(f"{server.url}/v2/repository/models/plain/unload")
        assert answer.status_code == 200, answer.text
        assert hangs.result().status_code == 504  # its own deadline, which the unload waited for
    assert unloaded.exists()


def successes(running: Running, model: str) -> int:
    """How many inferences of a model succeeded, as its statistics say."""
    (stats,) = running.get(f"/v2/models/{model}/stats").json()["model_stats"]
    return int(stats["inference_stats"]["success"]["count"])
