"""The environment and the priority that a replica's processes get."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.config.schema import Deployment
from app.process.priority import START_NICE, may_raise_priority
from app.supervisor import replica_process
from app.supervisor.replica_process import ReplicaProcess, environment_of
from inference.wire.handshake import GO, ForkRequest


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


def test_torch_obeys_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_process, "cpu_count", lambda: 1)
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout == "1\n"


@pytest.mark.skipif(not may_raise_priority(), reason="a priority can't be raised again by this user")
def test_a_fork_goes_on_at_a_lower_priority(tmp_path: Path) -> None:
    code = "import os; goes = os.read(0, 9); os.write(1, goes + str(os.getpriority(os.PRIO_PROCESS, 0)).encode())"
    forks: list[subprocess.Popen[bytes]] = []

    def fork(request: ForkRequest, fds: Sequence[int]) -> int:
        _, command, _ = fds
        forks.append(subprocess.Popen([sys.executable, "-c", code], stdin=command, stdout=subprocess.PIPE))
        return forks[0].pid

    async def start() -> None:
        replica = ReplicaProcess("m", "m-1", Deployment(model="m:M"), tmp_path / "m-1", (), lambda stage: None)
        replica.start(fork)
        said, _ = await asyncio.to_thread(forks[0].communicate, timeout=60)
        replica.kill()
        exited = asyncio.get_running_loop().create_future()
        exited.set_result(0)
        await replica.follow(exited)
        assert said == GO + str(os.getpriority(os.PRIO_PROCESS, 0) + START_NICE).encode()

    asyncio.run(start())
