"""Replicas that are forked from a process with their imports are as those that are started anew."""

from __future__ import annotations

import json
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater_server.process.priority import START_NICE, may_raise_priority
from tests.environments import make_environment
from tests.running import Running, leaves_nothing, leftovers, processes_of, segments_of, serve, wait_for

ATTEMPTS = 4
PRELOADED = "headwater.replica.preloaded"
MODELS = {"forked": "circumstances:Forked", "other": "circumstances:Forked", "cold": "circumstances_late:Cold"}
CONFIG = {
    "deployments": {
        f"{name}-{threads or 'all'}": {
            "model": model,
            "environment": {"OF_MODEL": "yes"},
            "device": "cpu",
            "python": "own",
            "warmup_batch_sizes": [1],
            **({"threads": threads} if threads else {}),
        }
        for name, model in MODELS.items()
        for threads in (None, 1)
        if threads or name != "other"
    }
}


@pytest.fixture(scope="module")
def forking() -> Iterator[Running]:
    with serve(CONFIG) as running:
        for model in CONFIG["deployments"]:
            if not model.startswith("cold"):
                start_until_forked(running, model)
        yield running


def start_until_forked(running: Running, model: str) -> None:
    """Start a model's replica anew until it is forked: on a busy machine the imports or a fork may take too long."""
    for _ in range(ATTEMPTS):
        if seen(running, model)["is_forked"]:
            return
        assert running.client.post(f"{running.url}/v2/repository/models/{model}/reload").status_code == 200
    raise AssertionError(f"{model} is never forked:\n{running.log.read_text()[-3000:]}")


def seen(running: Running, model: str) -> dict[str, Any]:
    """What one of a model's replicas says."""
    answer = running.infer(model, ["x"], shape=[1, 1], datatype="BYTES")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = json.loads(answer.json()["outputs"][0]["data"][0])
    return found


def parents(running: Running) -> list[int]:
    """The processes that fork."""
    return [pid for pid, command in processes_of(running.folder).items() if PRELOADED in command]


def waiting(running: Running) -> list[int]:
    """The processes that wait for a replica: its guardian's parent, its guardian and its host."""
    found = [pid for pid, command in processes_of(running.folder).items() if "headwater.replica waiting" in command]
    return found if len(found) == 3 else []


@pytest.mark.parametrize("threads", ["all", "1"])
def test_a_forked_replica_has_the_circumstances_of_one_that_is_started_anew(forking: Running, threads: str) -> None:
    forked, cold = seen(forking, f"forked-{threads}"), seen(forking, f"cold-{threads}")
    assert (forked["is_forked"], cold["is_forked"]) == (True, False)

    def same(model: str, found: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps({**found["same"], "threads": found["threads"], "device": found["device"]})
        return dict(json.loads(text.replace(str(forking.replica_folder(model)), "FOLDER").replace(model, "MODEL")))

    assert same(f"forked-{threads}", forked) == same(f"cold-{threads}", cold)


@pytest.mark.skipif(not may_raise_priority(), reason="a priority can't be raised again by this user")
@pytest.mark.parametrize("model", ["forked-1", "cold-1"])
def test_a_replica_loads_at_a_lower_priority_than_it_serves_at(forking: Running, model: str) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = seen(forking, model)
    assert found["same"]["nice"] == own + START_NICE
    assert found["same"]["session_nice"] in (START_NICE, None)
    guardian = int(Path(f"/proc/{found['pid']}/stat").read_text().rpartition(") ")[2].split()[1])
    for pid in (found["pid"], guardian):
        threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {own}


def test_two_forks_draw_different_numbers(forking: Running) -> None:
    first, second = seen(forking, "forked-1"), seen(forking, "other-1")
    assert (first["is_forked"], second["is_forked"]) == (True, True)
    assert all(one != other for one, other in zip(first["random"], second["random"], strict=True))


def test_the_process_that_forks_has_one_thread_and_is_replaced_if_it_is_killed(forking: Running) -> None:
    before = parents(forking)
    assert len(before) == 2  # one for each environment
    for pid in before:
        assert len(os.listdir(f"/proc/{pid}/task")) == 1
        os.kill(pid, signal.SIGKILL)
    assert seen(forking, "forked-1")["is_forked"]  # it serves on
    host = seen(forking, "forked-all")["pid"]
    os.kill(host, signal.SIGKILL)  # the next one is started without a fork, or with one: whichever is there
    wait_for(lambda: not Path(f"/proc/{host}").exists(), 30, "it to be gone")
    wait_for(lambda: forking.is_ready("forked-all"), 120, "the next")
    wait_for(lambda: len(parents(forking)) == 2 and not set(parents(forking)) & set(before), 60, "others that fork")


def test_under_another_python_replicas_are_forked_too(forking: Running, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", *os.listdir(sysconfig.get_path("purelib")))
    deployment = {**CONFIG["deployments"]["forked-1"], "python": str(python)}
    with leaves_nothing({"deployments": {"theirs": deployment}}) as running:
        start_until_forked(running, "theirs")
        forked, ours = seen(running, "theirs"), seen(forking, "forked-1")
        assert (forked["prefix"], ours["prefix"]) == (str(tmp_path / "env"), sys.prefix)
        assert forked["threads"] == ours["threads"]
        for what in ("leads", "signals", "limits", "umask"):
            assert forked["same"][what] == ours["same"][what]
        assert len(forked["same"]["descriptors"]) == len(ours["same"]["descriptors"])
        host = running.process("theirs", "host")
        next_hosts = wait_for(lambda: waiting(running), 30, "the next replica's processes")
        os.kill(running.process("theirs", "tritonserver"), signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{host}").exists(), 30, "it to be gone")
        wait_for(lambda: running.is_ready("theirs"), 60, "the next")
        assert running.process("theirs", "host") in next_hosts


def test_nothing_is_left(forking: Running) -> None:
    segments = segments_of(forking.folder)
    forking.popen.kill()
    wait_for(lambda: not processes_of(forking.folder), 60, "every process to end")
    stale: Path = next(forking.folder.glob("headwater-*"))
    wait_for(lambda: leftovers(next(iter(stale.glob("r*")), stale / "r"), segments) == [], 60, "replicas to be swept")
