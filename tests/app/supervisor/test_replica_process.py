"""The environment and the priority that a replica's processes get."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.wire.handshake import GO, ForkRequest
from headwater_server.config.deployment_kinds import VLLM
from headwater_server.config.schema import Deployment
from headwater_server.process.priority import START_NICE, may_raise_priority
from headwater_server.supervisor import replica_process
from headwater_server.supervisor.kind_programs import program_of
from headwater_server.supervisor.replica_process import ReplicaProcess, environment_of
from tests.app.serving import until


def environment(**fields: Any) -> dict[str, str]:
    """That of a replica of such a deployment."""
    return environment_of(Deployment(**{"model": "m:M", **fields}))


@pytest.fixture(autouse=True)
def three_of_four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quota leaves of the CPUs; and nobody has said how many threads there should be."""
    monkeypatch.setattr(replica_process, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_without_threads_libraries_get_what_the_quota_allows(tmp_path: Path) -> None:
    assert environment()["OMP_NUM_THREADS"] == "3"


def test_without_a_quota_libraries_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "cpu_count", lambda: 4)
    assert "OMP_NUM_THREADS" not in environment()


def test_vllm_decides_itself(tmp_path: Path) -> None:
    assert "OMP_NUM_THREADS" not in environment(model="vllm:x", python=Path(sys.executable))


def test_what_an_operator_says_is_more_than_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment(threads=7)["OMP_NUM_THREADS"] == "7"
    assert environment(environment={"OMP_NUM_THREADS": 6})["OMP_NUM_THREADS"] == "6"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert environment()["OMP_NUM_THREADS"] == "5"


@pytest.mark.heavy
def test_torch_obeys_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "cpu_count", lambda: 1)
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout == "1\n"


STARTS = """
import os, pathlib, subprocess, sys, threading, time
from headwater_server.process.sweep import Journal
goes = os.read(0, 9)
apart = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, start_new_session=True)
nice, policy = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
os.write(1, f"{goes.decode()} {nice} {policy} {apart.pid}".encode())
os.close(1)
for _ in range(3):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
Journal(pathlib.Path(sys.argv[1])).note(os.getpid(), ())
os.read(0, 1)
apart.kill()
"""
OWN = os.getpriority(os.PRIO_PROCESS, 0)


def priorities(pid: int) -> tuple[int, set[int], set[int]]:
    """The number of a process's threads, and their nice values and policies."""
    threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
    nices = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
    return len(threads), nices, {os.sched_getscheduler(thread) for thread in threads}


def session_priority(pid: int) -> str:
    """Empty: the kernel does not group sessions."""
    group = Path(f"/proc/{pid}/autogroup")
    return group.read_text().split()[-1] if group.exists() else ""


@pytest.mark.skipif(not may_raise_priority(), reason="a priority can't be raised again by this user")
@pytest.mark.parametrize(("model", "session_nice"), [("m:M", 0), ("vllm:x", program_of(VLLM).nice)])
@pytest.mark.parametrize(("idle_s", "policy"), [(600.0, os.SCHED_IDLE), (0.1, os.SCHED_OTHER)])
async def test_what_starts_comes_after_what_serves(
    idle_s: float, policy: int, model: str, session_nice: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_process, "IDLE_S", idle_s)
    forks: list[subprocess.Popen[bytes]] = []

    def fork(request: ForkRequest, fds: Sequence[int]) -> int:
        command = [sys.executable, "-c", STARTS, request.directory]
        forks.append(subprocess.Popen(command, stdin=fds[1], stdout=subprocess.PIPE, start_new_session=True))
        return forks[0].pid

    deployment = Deployment(model=model, python=Path(sys.executable) if model == "vllm:x" else None)
    replica = ReplicaProcess("m", "m-1", deployment, tmp_path / "m-1", (), lambda stage: None)
    replica.start(fork)
    with forks[0] as process, contextlib.ExitStack() as ending:
        ending.callback(replica.kill)  # the process waits for this
        assert process.stdout is not None
        goes, nice, first, apart = (await asyncio.to_thread(process.stdout.read)).split()
        assert (goes, int(nice)) == (GO.strip(), OWN + START_NICE)
        assert int(first) in (os.SCHED_IDLE, policy)
        pid = process.pid
        await until(lambda: priorities(pid) == (4, {OWN + START_NICE}, {policy}))
        await until(lambda: priorities(int(apart)) == (1, {OWN + START_NICE}, {policy}))
        assert session_priority(pid) in ("", str(START_NICE))
        await until(lambda: replica.group == pid)
        replica.ready.set_result(True)
        await until(lambda: priorities(pid) == (4, {OWN}, {os.SCHED_OTHER}))
        await until(lambda: priorities(int(apart)) == (1, {OWN}, {os.SCHED_OTHER}))
        assert session_priority(pid) in ("", str(session_nice))
    exited = asyncio.get_running_loop().create_future()
    exited.set_result(0)
    await replica.follow(exited)
