"""Gateway workers whose event loop hangs, as the supervisor sees them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from headwater_server.config.schema import Config
from headwater_server.control.control_server import ControlServer
from headwater_server.supervisor.child_processes import ChildProcesses, until
from headwater_server.supervisor.front import Workers
from headwater_server.supervisor.memory_budget import ReplicaMemory
from headwater_server.telemetry.observer import Observer


class Pings:
    """Stands for the control socket: says how often each worker has not answered."""

    def __init__(self) -> None:
        self.unanswered: dict[int, int] = {}

    def ping(self) -> dict[int, int]:
        return self.unanswered


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Three processes that sleep."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(subprocess.Popen(command)) for _ in range(3)]
        for process in found:
            stack.callback(process.kill)
        yield found


async def test_a_worker_that_gives_no_sign_of_life_is_killed_and_no_other(
    sleepers: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"deployments": {"m": {"model": "m:M"}}})
    monkeypatch.setattr("headwater_server.supervisor.front.PING_TIMEOUT_S", 4)
    silent, alive, stranger = sleepers

    control, pings = ControlServer(), Pings()
    children = ChildProcesses(ReplicaMemory(), (), control.drain, lambda: None)
    workers = Workers(config, children, cast(ControlServer, pings), Observer(None))
    workers.pids = {0: silent.pid, 1: alive.pid}
    pings.unanswered = {silent.pid: 3, alive.pid: 0, stranger.pid: 99}
    workers.end_silent()
    assert silent.poll() is None
    pings.unanswered[silent.pid] = 4
    workers.end_silent()
    assert silent.wait(10) == -signal.SIGKILL
    assert (alive.poll(), stranger.poll()) == (None, None)
    assert f"gateway worker 0 ({silent.pid}) has given no sign of life for 4 s" in caplog.text


@pytest.mark.slow
async def test_the_log_says_why_a_worker_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = {"certificate": str(tmp_path / "server.pem"), "key": str(tmp_path / "server.key")}
    config = Config.model_validate({"server": {"tls": tls}, "deployments": {"m": {"model": "m:M"}}})

    control = ControlServer()
    children = ChildProcesses(ReplicaMemory(), (), control.drain, lambda: None)
    children.folder = tmp_path
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, children.reap)
    workers = Workers(config, children, control, Observer(None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        workers.start(listener, None)
        await until(lambda: "starting another" in caplog.text, 60)
        children.stop()
        workers.kill()
        await children.finish()
    reason = f"server.tls.certificate: {tls['certificate']}: can't be read: No such file or directory"
    assert f"gateway worker 0 ended with 1: {reason}; starting another" in caplog.text
