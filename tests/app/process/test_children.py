"""Children that are stopped."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from app.process.children import Children
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
    async def scenario() -> None:
        children = Children()
        exited = children.follow(child)
        assert children.look() == []
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: state(child.pid) == psutil.STATUS_STOPPED, what="the stop")
        assert children.look() == []
        assert children.look() == [child.pid]
        child.send_signal(signal.SIGCONT)
        wait_for(lambda: state(child.pid) != psutil.STATUS_STOPPED, what="the process to go on")
        assert children.look() == []
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: state(child.pid) == psutil.STATUS_STOPPED, what="the stop")
        assert children.look() == []  # looks before it went on don't count
        child.kill()
        wait_for(lambda: state(child.pid) == psutil.STATUS_ZOMBIE, what="the end")
        assert children.look() == []
        children.reap()
        assert await exited == -signal.SIGKILL
        assert children.look() == []

    asyncio.run(scenario())


def test_one_that_another_has_reaped_is_not_found(child: subprocess.Popen[bytes]) -> None:
    async def scenario() -> None:
        children = Children()
        children.follow(child)
        child.kill()
        child.wait()
        assert [children.look() for _ in range(3)] == [[], [], []]

    asyncio.run(scenario())
