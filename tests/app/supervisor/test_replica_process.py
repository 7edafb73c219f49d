"""The environment that a replica's process gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.config.schema import Deployment
from app.supervisor import replica_process
from app.supervisor.replica_process import environment_of


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
