"""A replica that dies or stops, in whatever way: quick answers, nothing left, and another one by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running import Running, in_background, leftovers, processes_of, segments_of, serve, wait_for

EXIT_PROCESS = -5.0
# What is done to which process.
WAYS = {
    "host-killed": ("host", signal.SIGKILL),
    "triton-killed": ("tritonserver", signal.SIGKILL),
    "stub-killed": ("stub", signal.SIGKILL),
    "guardian-killed": ("guardian", signal.SIGKILL),
    "host-stopped": ("host", signal.SIGSTOP),
    "triton-stopped": ("tritonserver", signal.SIGSTOP),
    "stub-stopped": ("stub", signal.SIGSTOP),
    "guardian-stopped": ("guardian", signal.SIGSTOP),
}
NOTICED_WITHIN_S = 20.0
"""However busy the machine is; a request that nobody answers takes longer. On one that does nothing else it is 2 s for
what is killed, and 3 s for what is stopped."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models put their marks."""
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def mortal(folder: Path) -> Iterator[Running]:
    """A server with one deployment for each way to die: a deployment that died often waits longer for its next try."""

    def slow(name: str, **more: Any) -> dict[str, Any]:
        batching = {"max_batch_size": 4, "max_in_flight": 2}
        return {
            "model": "faulty:Slow",
            "options": {"marker": str(folder / name)},
            "batching": batching,
            "warmup_batch_sizes": [],
            **more,
        }

    config = {
        "deployments": {
            **{way: slow(way) for way in WAYS},
            "two": slow("two", replicas=2),
            "exits": {"model": "faulty:Faulty"},
            "parent": {"model": "daemons:Parent", "warmup_batch_sizes": []},
        }
    }
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


@pytest.mark.parametrize("way", WAYS)
def test_requests_in_flight_end_soon_and_a_new_replica_comes(mortal: Running, folder: Path, way: str) -> None:
    role, number = WAYS[way]
    old = mortal.replica_folder(way)
    segments = segments_of(old)
    assert segments

    def ask() -> tuple[httpx.Response, float]:
        answer = mortal.infer(way, [25.0], shape=[1, 1])
        return answer, time.monotonic()

    with in_background(*[ask] * 32) as answers:
        wait_for((folder / way).exists, 60, "the first call")
        os.kill(mortal.process(way, role), number)
        killed = time.monotonic()
        wait_for(lambda: mortal.index(way)["state"] == "UNAVAILABLE", 60, "the model to be unavailable")
        assert mortal.index(way)["reason"]
        refused = mortal.infer(way, [0.0], shape=[1, 1])
        assert (refused.status_code, way in refused.json()["error"]) == (503, True), refused.text

    for answer, at in answers:
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["retry-after"]) >= 1
        assert at - killed < NOTICED_WITHIN_S
    wait_for(lambda: leftovers(old, segments) == [], 60, "everything of the old replica to be gone")
    wait_for(lambda: mortal.is_ready(way), 180, "a new replica")
    assert mortal.infer(way, [0.0], shape=[1, 1]).status_code == 200


def test_a_callable_that_ends_the_process_takes_only_its_own_replica(mortal: Running) -> None:
    old = mortal.replica_folder("exits")
    answer = mortal.infer("exits", [EXIT_PROCESS], shape=[1, 1])
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert "exits" in answer.json()["error"] or "replica" in answer.json()["error"]
    wait_for(lambda: "status 3" in mortal.index("exits")["reason"], what="the exit status as the reason")
    wait_for(lambda: mortal.is_ready("exits"), 180, "a new replica")
    assert not old.exists()
    assert mortal.infer("exits", [1.0], shape=[1, 1]).status_code == 200


def test_what_a_callable_started_in_sessions_of_its_own_ends_with_its_replica_even_if_the_guardian_is_killed(
    mortal: Running,
) -> None:
    pids = [int(mortal.infer("parent", [value], shape=[1, 1]).json()["outputs"][0]["data"][0]) for value in (0, 1, 0)]
    assert all(_runs(pid) for pid in pids)
    os.kill(mortal.process("parent", "guardian"), signal.SIGKILL)
    wait_for(lambda: not any(_runs(pid) for pid in pids), 60, "the end of what the callable started")
    wait_for(lambda: mortal.is_ready("parent"), 180, "a new replica")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_other_replica_of_a_deployment_goes_on_answering(mortal: Running) -> None:
    folders = mortal.replica_folders("two")
    assert len(folders) == 2
    hosts = [int(pid) for path in folders for pid, line in processes_of(path).items() if _is_host(line)]
    assert len(hosts) == 2
    os.kill(hosts[0], signal.SIGKILL)
    wait_for(lambda: not folders[0].exists() or not folders[1].exists(), 60, "the killed replica's folder to be gone")
    for _ in range(20):
        assert mortal.infer("two", [0.0], shape=[1, 1]).status_code == 200
    assert mortal.index("two")["state"] == "READY"

    def both_are_ready() -> bool:
        return sum((folder / "ready").exists() for folder in mortal.replica_folders("two")) == 2

    wait_for(both_are_ready, 180, "the second replica to be back")


def _is_host(command: str) -> bool:
    return "headwater.replica" in command and "headwater_server.process.guardian" not in command


def test_a_model_that_fails_to_load_keeps_no_other_from_serving() -> None:
    deployments = {
        "good": {"model": "faulty:Faulty", "warmup_batch_sizes": []},
        "bad": {"model": "faulty:FailsToLoad", "warmup_batch_sizes": []},
    }
    with serve({"deployments": deployments}, ready=False) as running:
        wait_for(lambda: running.is_ready("good"), 60, "the good model")
        assert running.infer("good", [2.0], shape=[1, 1]).json()["outputs"][0]["data"] == [4.0]
        wait_for(lambda: "RuntimeError: no weights here" in running.index("bad")["reason"], 30, "the reason")
        assert running.index("bad")["state"] == "LOADING"
        assert running.infer("bad", [2.0], shape=[1, 1]).status_code == 503
        assert not running.is_ready()

        wait_for(lambda: running.index("bad")["state"] == "FAILED", 120, "the tries to be over")

        assert running.index("bad")["reason"] == "RuntimeError: no weights here"
        refused = running.infer("bad", [2.0], shape=[1, 1])
        assert refused.status_code == 503
        assert refused.json()["error"] == "model `bad` is FAILED: RuntimeError: no weights here"
        assert running.infer("good", [2.0], shape=[1, 1]).status_code == 200
        assert running.replica_folders("bad") == []
        assert running.stop() == 0


def test_a_server_that_can_serve_nothing_ends_and_says_so() -> None:
    config = {"deployments": {"bad": {"model": "faulty:FailsToLoad", "warmup_batch_sizes": []}}}
    with serve(config, ready=False) as running:
        assert running.popen.wait(90) == 1
        log = running.log.read_text()
        assert "bad: FAILED and not tried again" in log
        assert "no weights here" in log
        assert "serves nothing yet" in log
        assert "every deployment has failed: bad: RuntimeError: no weights here" in log.splitlines()[-1]
        assert leftovers(running.folder) == []


@pytest.mark.parametrize(
    ("when", "says"),
    [
        ("load", "TypeError: load() can't do this"),
        ("call", "warm-up with a batch of 1: RuntimeError: shapes cannot be multiplied"),
    ],
)
def test_a_start_that_fails_because_of_a_fault_in_the_model_is_not_tried_again(when: str, says: str) -> None:
    config = {"deployments": {"bad": {"model": "faulty:AlwaysFails", "options": {"when": when}}}}
    with serve(config, ready=False) as running:
        assert running.popen.wait(90) == 1
        log = running.log.read_text()
        assert f"bad-1: did not start (not tried again): {says}" in log
        assert "bad-2" not in log
        assert "in __call__" in log or "in load" in log  # the traceback


def test_a_server_of_a_class_that_is_missing_ends_at_the_first_try() -> None:
    config = {"deployments": {"bad": {"model": "faulty:Fault", "warmup_batch_sizes": []}}}
    with serve(config, ready=False) as running:
        assert running.popen.wait(90) == 1
        log = running.log.read_text()
        assert log.count(": did not start (") == 1
        assert "Traceback" not in log
        assert "every deployment has failed: bad: faulty.py has no Fault" in log.splitlines()[-1]
        assert leftovers(running.folder) == []
