"""The actor that holds a process, in a process of its own whose parent stands for Ray's raylet."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from headwater_server.cluster.holder import read_spec, write_spec
from tests.running import wait_for

ACTOR = """
import os, sys, types
def kill(actor, no_restart):
    assert actor == "this actor" and no_restart
    print("killed, not to be started again", flush=True)
    os._exit(7)
context = types.SimpleNamespace(
    gcs_address="head:6379", current_actor="this actor", get_node_id=lambda: "a1"
)
ray = types.ModuleType("ray")
ray.kill = kill
ray.get_runtime_context = lambda: context
ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "10.0.0.7")
sys.modules["ray"] = ray
from headwater_server.cluster.holder import Holder
holder = Holder([sys.executable, "-c", sys.argv[1]], b"the spec", {"MINE": "yes", "PWD": "/"}, sys.argv[2] == "True")
print("said", holder.said(), flush=True)
for line in sys.stdin:
    holder.order(line.strip())
"""
RAYLET = """
import subprocess, sys
actor = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdin=sys.stdin, stdout=sys.stdout)
print(actor.pid, flush=True)
actor.wait()
"""
HELD = """
import os, sys
from headwater_server.cluster.holder import outlive_no_holder, read_spec
outlive_no_holder()
spec = read_spec(sys.stdin.buffer)
names = ("MINE", "HEADWATER_NODE", "HEADWATER_NODE_ID", "HEADWATER_RAY")
print(os.getpid(), spec.decode(), *(os.environ[name] for name in names),
      os.getcwd(), os.getsid(0) == os.getpid(), flush=True)
for line in sys.stdin:
    print("got", line.strip(), flush=True)
    if line.startswith("end"):
        os._exit(int(line.split()[1]))
"""


class Raylet:
    """What stands for a raylet, with one actor."""

    def __init__(self, is_restarted: bool) -> None:
        environment = {**os.environ, "PYTHONPATH": os.getcwd()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RAYLET, ACTOR, HELD, str(is_restarted)],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.actor = os.pidfd_open(int(self.next()))
        said = self.next().split()
        self.held, self.said = int(said[1]), said[2:]

    def next(self) -> str:
        """The next line of the actor's output; empty: it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def order(self, line: str) -> None:
        """Have the actor order something."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def rest(self) -> list[str]:
        """The lines that come until the actor and what it holds have ended."""
        assert self.process.stdout is not None
        return [line.strip() for line in self.process.stdout]


@contextlib.contextmanager
def raylet(is_restarted: bool = False) -> Iterator[Raylet]:
    """A raylet, which ends with the context."""
    found = Raylet(is_restarted)
    try:
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(found.actor, signal.SIGKILL)
        os.close(found.actor)
        found.process.kill()
        assert found.process.stdin is not None
        assert found.process.stdout is not None
        found.process.stdin.close()
        found.process.stdout.close()
        found.process.wait()


@pytest.mark.parametrize("spec", [b"", b"x", bytes(range(256)) * 1000])
def test_a_spec_is_read_as_it_was_written_and_what_follows_is_not(spec: bytes) -> None:
    source, sink = os.pipe()

    def write() -> None:
        with open(sink, "wb") as stream:
            write_spec(stream, spec)
            stream.write(b"orders\n")

    writing = threading.Thread(target=write)  # the pipe holds less than the largest
    writing.start()
    with open(source, "rb") as stream:
        assert read_spec(stream) == spec
        assert os.read(source, 100) == b"orders\n"
    writing.join()


@pytest.mark.parametrize("written", [b"", b"\x05\0\0", (5).to_bytes(8, "little") + b"four"])
def test_a_spec_that_is_incomplete_is_none(written: bytes) -> None:
    source, sink = os.pipe()
    os.write(sink, written)
    os.close(sink)
    with open(source, "rb") as stream, pytest.raises(EOFError, match="the specification is incomplete"):
        read_spec(stream)


def test_the_process_gets_its_spec_its_environment_and_orders() -> None:
    with raylet() as found:
        assert found.said == ["the", "spec", "yes", "10.0.0.7", "a1", "head:6379", "/", "True"]
        found.order("stop")
        assert found.next() == "got stop"


@pytest.mark.parametrize(
    ("status", "is_restarted", "stays_ended"), [(0, False, True), (3, False, True), (0, True, True), (3, True, False)]
)
def test_an_actor_ends_with_its_process(status: int, is_restarted: bool, stays_ended: bool) -> None:
    """A supervisor's is started again by Ray unless its process has ended with status 0."""
    with raylet(is_restarted) as found:
        found.order(f"end {status}")
        rest = found.rest()
        assert ("killed, not to be started again" in rest) is stays_ended
        assert f"got end {status}" in rest
        found.process.wait()


def test_the_process_ends_with_the_raylet() -> None:
    with raylet() as found:
        found.process.kill()
        found.rest()
        assert not os.path.exists(f"/proc/{found.held}")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_process_ends_with_the_actor(is_stopped: bool) -> None:
    with raylet() as found:
        pidfd = os.pidfd_open(found.held)
        if is_stopped:
            os.kill(found.held, signal.SIGSTOP)
            wait_for(lambda: psutil.Process(found.held).status() == psutil.STATUS_STOPPED)
        signal.pidfd_send_signal(found.actor, signal.SIGKILL)
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)
