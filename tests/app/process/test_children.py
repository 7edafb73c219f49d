"""Children that are stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from app.process.children import ProcessWatch
from tests.running import wait_for


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def state(pid: int) -> str:
    return str(psutil.Process(pid).status())


def test_one_that_is_stopped_at_two_looks_is_found(child: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch()
    watch.add(child.pid)
    assert watch.look() == []
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: state(child.pid) == psutil.STATUS_STOPPED, what="the stop")
    assert watch.look() == []
    assert watch.look() == [child.pid]
    child.send_signal(signal.SIGCONT)
    wait_for(lambda: state(child.pid) != psutil.STATUS_STOPPED, what="the process to go on")
    assert watch.look() == []
    child.send_signal(signal.SIGSTOP)
    wait_for(lambda: state(child.pid) == psutil.STATUS_STOPPED, what="the stop")
    assert watch.look() == []  # looks before it went on don't count
    watch.discard(child.pid)
    assert watch.look() == []


def test_one_that_has_ended_or_is_no_child_is_not(child: subprocess.Popen[bytes]) -> None:
    watch = ProcessWatch()
    watch.add(child.pid)
    watch.add(1)
    child.kill()
    child.wait()
    assert [watch.look() for _ in range(3)] == [[], [], []]
