"""Traffic shared by two versions while their replicas are killed: no request is lost, and a rollback is for cause."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running import Running, leaves_nothing, wait_for

CLIENTS = 8
KILLS = 2
MIN_REQUESTS = 50
RULE = {"errors": 2, "p99": 100, "min_requests": MIN_REQUESTS}
CONFIGURED = {"1": 0.5, "2": 0.5}


@pytest.fixture(scope="module")
def fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that makes version 2 worse."""
    return tmp_path_factory.mktemp("fault") / "fault"


@pytest.fixture(scope="module")
def running(fault: Path) -> Iterator[Running]:
    """A server with two versions of ``c``, each of two replicas."""
    deployment = {
        "model": "canary:Canary",
        "versions": {"1": {"options": {"version": 1}}, "2": {"options": {"version": 2, "fault": str(fault)}}},
        "traffic": {**CONFIGURED, "rollback": RULE},
        "replicas": 2,
        "max_crashes": 100,
        "warmup_batch_sizes": [],
    }
    with leaves_nothing({"deployments": {"c": deployment}, "server": {"access_log": False}}) as running:
        yield running


class Clients:
    """Ask ``c`` without end, each request with a row of its own."""

    def __init__(self, running: Running) -> None:
        self._url = f"{running.url}/v2/models/c/infer"
        self._numbers = iter(range(10**9))
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.answers: Counter[tuple[str, int]] = Counter()
        """By version and status."""
        self.refusals: list[str] = []
        """Bodies of answers that are neither a 200 nor the callable's error."""

    def ask(self) -> None:
        """Ask until the end."""
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._is_over.is_set():
                with self._lock:
                    number = next(self._numbers)
                tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [number]}
                answer = client.post(self._url, json={"inputs": [tensor]}, headers={"X-Request-Id": f"r{number}"})
                with self._lock:
                    self.answers[answer.headers.get("headwater-version", ""), answer.status_code] += 1
                    if answer.status_code != 200 and "the regression of version 2" not in answer.text:
                        self.refusals.append(answer.text)

    def wait_for_each(self, count: int) -> None:
        """Wait until both versions have answered so many requests more."""
        before = Counter(self.answers)
        wait_for(lambda: all(self.answers[one, 200] - before[one, 200] >= count for one in CONFIGURED), 120, "answers")

    @contextlib.contextmanager
    def asking(self) -> Iterator[Clients]:
        """Ask while the block runs."""
        threads = [threading.Thread(target=self.ask) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()


def entry(running: Running, name: str = "c") -> dict[str, Any]:
    found: list[dict[str, Any]] = running.get("/v2/status").json()["deployments"]
    return next(one for one in found if one["name"] == name)


def kill_one(running: Running, version: str) -> None:
    """Kill a replica of a version, and wait until another has taken its place."""
    name = f"c.{version}"
    wait_for(lambda: entry(running, name)["replicas"]["ready"] == 2, 120, "two replicas")
    folder = running.replica_folder(name)
    os.kill(running.replica_pid(name), signal.SIGKILL)
    wait_for(lambda: not folder.exists() and entry(running, name)["replicas"]["ready"] == 2, 120, "another replica")


@pytest.mark.parametrize("version", ["1", "2"])
def test_killed_replicas_of_either_version_lose_no_request_and_no_share(running: Running, version: str) -> None:
    with Clients(running).asking() as clients:
        clients.wait_for_each(MIN_REQUESTS)
        for _ in range(KILLS):
            kill_one(running, version)
            clients.wait_for_each(MIN_REQUESTS)
    assert clients.refusals == []
    assert {status for _, status in clients.answers} == {200}
    assert entry(running)["traffic"] == CONFIGURED


def test_a_version_that_fails_while_replicas_of_both_are_killed_is_rolled_back_for_its_failures(
    running: Running, fault: Path
) -> None:
    try:
        with Clients(running).asking() as clients:
            clients.wait_for_each(MIN_REQUESTS)
            kill_one(running, "1")
            fault.write_text("fails")
            kill_one(running, "2")
            wait_for(lambda: entry(running)["traffic"] == {"1": 1.0, "2": 0.0}, 120, "the rollback")
            kill_one(running, "1")
    finally:
        fault.unlink(missing_ok=True)
    assert clients.refusals == []
    assert {answer for answer in clients.answers if answer[1] != 200} == {("2", 500)}
    reason = entry(running)["reason"]
    told = re.search(
        r"version `2` lost its share by itself: (\S+) % of its requests failed, 0 % of the default's", reason
    )
    assert told is not None, reason
    failed, answered = clients.answers["2", 500], clients.answers["2", 200]
    assert 100 * 2 / MIN_REQUESTS <= float(told[1]) <= 100  # rounded to three digits
    assert failed + answered >= MIN_REQUESTS
