"""Child processes of the supervisor: those that are stopped, and how long to wait before one is started again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from headwater_server.control.control_server import ControlServer
from headwater_server.supervisor.child_processes import Backoff, ChildProcesses
from headwater_server.supervisor.memory_budget import ReplicaMemory
from tests.running import wait_for


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def state(pid: int) -> str:
    return str(psutil.Process(pid).status())


def new_children() -> ChildProcesses:
    return ChildProcesses(ReplicaMemory(), (), ControlServer().drain, lambda: None)


async def test_a_child_that_is_stopped_at_two_looks_is_found(child: subprocess.Popen[bytes]) -> None:
    children = new_children()
    exited = children.follow(child, "a child")
    assert children.stopped() == []
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: state(child.pid) == psutil.STATUS_STOPPED, what="the stop")
    assert children.stopped() == []
    assert children.stopped() == [child.pid]
    child.send_signal(signal.SIGCONT)
    wait_for(lambda: state(child.pid) != psutil.STATUS_STOPPED, what="the process to go on")
    assert children.stopped() == []
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: state(child.pid) == psutil.STATUS_STOPPED, what="the stop")
    assert children.stopped() == []  # looks before it went on don't count
    child.kill()
    wait_for(lambda: state(child.pid) == psutil.STATUS_ZOMBIE, what="the end")
    assert children.stopped() == []
    children.reap()
    assert await exited == child.returncode == -signal.SIGKILL
    assert children.stopped() == []


async def test_a_child_that_was_reaped_elsewhere_is_not_found(child: subprocess.Popen[bytes]) -> None:
    children = new_children()
    children.follow(child, "a child")
    child.kill()
    child.wait()
    assert [children.stopped() for _ in range(3)] == [[], [], []]


def test_a_backoff_doubles_up_to_a_bound_and_begins_anew_after_a_process_that_lived_long() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [backoff.after(61), backoff.after(1)] == [0.5, 1]
