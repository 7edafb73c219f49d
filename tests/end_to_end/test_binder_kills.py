"""A binder that is killed at any stage of a start: the start fails and says so, the next one succeeds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater_server.supervisor.slot import FAILED_STARTS_LIMIT
from tests.running import SERVICES, Running, leftovers, segments_of, serve, wait_for

NAME = "staged"
ENDED = "the process that binds the model to Triton has ended"
NOT_STARTED = "Triton did not start (it ended)"


def begun(running: Running) -> int:
    """The id of the process that is held; 0: none is."""
    path = running.gates / "begun"
    return int(path.read_text()) if path.exists() else 0


def bare_binder(running: Running) -> int:
    """The id of a binder that has no signature to bind yet."""
    return next(iter(running.processes(NAME, "binder")), 0) if begun(running) else 0


def triton(running: Running) -> int:
    """The id of a Triton that starts."""
    return next(iter(running.processes(NAME, "tritonserver")), 0)


def warm_up(running: Running) -> int:
    """The id of the process that calls the model, once it does."""
    return running.process(NAME, "binder") if begun(running) else 0


FORKED = "staged_forked:Forked"


@pytest.mark.parametrize(
    ("stage", "find", "reason", "model"),
    [
        pytest.param("fork", begun, ENDED, "staged:Staged", id="forked"),
        pytest.param("import", begun, ENDED, "staged:Staged", id="importing"),
        pytest.param("construct", bare_binder, ENDED, "staged:Staged", id="waiting for the model"),
        pytest.param("execute", begun, NOT_STARTED, "staged:Staged", id="bound"),
        pytest.param("load", triton, NOT_STARTED, "staged:Staged", id="Triton starting"),
        pytest.param("call", warm_up, ENDED, "staged:Staged", id="warming up"),
        pytest.param("construct", bare_binder, ENDED, FORKED, id="preloaded, waiting"),
        pytest.param("call", warm_up, ENDED, FORKED, id="preloaded, warming up"),
    ],
)
def test_the_next_try_serves(
    stage: str, find: Callable[[Running], int], reason: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = [str(SERVICES / "held"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("HOLD", stage)
    with serve({"deployments": {NAME: {"model": model, "device": "cpu"}}}, ready=False) as running:
        pid = wait_for(lambda: find(running), 60, "the stage")
        first = running.replica_folder(NAME)
        segments = segments_of(first)
        os.kill(pid, signal.SIGKILL)
        Path(running.gates, "open").touch()
        wait_for(lambda: running.is_ready(NAME), 60, "the next try")
        assert f"did not start (1 of {FAILED_STARTS_LIMIT}): {reason}" in running.log.read_text()
        assert leftovers(first, segments) == []
        answer = running.infer(NAME, [2.0], shape=[1, 1])
        assert answer.json()["outputs"][0]["data"] == [2.0]
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []
