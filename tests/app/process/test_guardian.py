"""A guardian, around a command of the test's own."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headwater_server.process.guardian import Guardian
from tests.running import wait_for

pytestmark = pytest.mark.slow
SLEEP = "import time; time.sleep(600)"
UNLOADS = """
import signal, sys, pathlib, time
signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(sys.argv[1]).write_text("unloaded"), sys.exit(0)))
print("up", flush=True)
while True:  # briefly: a signal just before a sleep begins does not end it
    time.sleep(0.05)
"""
HANGS = """
import ctypes, pathlib, sys, time
from headwater.runtime.watchdog import WATCHDOG_FILE, Watchdog
folder = pathlib.Path(sys.argv[1])
watchdog = Watchdog(folder / WATCHDOG_FILE, 0.3)
for _ in range(100):
    with watchdog.call():
        time.sleep(0.002)
(folder / "ready").touch()
with watchdog.call():
    ctypes.PyDLL(None).sleep(600)
"""
NAMED = """
import ctypes, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
child = os.fork()
if not child:
    ctypes.CDLL(None).prctl(15, sys.argv[2].encode())
    (folder / "named").write_text(str(os.getpid()))
    time.sleep(600)
while not (folder / "named").exists():
    time.sleep(0.01)
(folder / "ready").touch()
while True:
    try:
        os.waitpid(child, 0)
    except ChildProcessError:
        time.sleep(600)
"""
HAS_SEGMENT = """
import os, pathlib, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=10)
segment.close()
if sys.argv[2] == "held":
    held = resource_tracker._resource_tracker._fd
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], pass_fds=[held], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(segment.name)
time.sleep(600)
"""
HAS_CHILDREN = """
import subprocess, sys, time, pathlib
group = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
session = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(f"{group.pid} {session.pid}")
time.sleep(600)
"""


@dataclass
class Guarded:
    """A guardian and the test's ends of its pipes."""

    process: subprocess.Popen[bytes]
    directory: Path
    status: int
    command: int

    def statuses(self) -> list[dict[str, Any]]:
        """All status lines; waits for the guardian's end."""
        content = b""
        while chunk := os.read(self.status, 65536):
            content += chunk
        return [json.loads(line) for line in content.splitlines()]

    def host(self) -> int:
        """Process id of the guarded command."""
        path = self.directory / "journal.json"
        return int(json.loads(wait_for(lambda: path.exists() and path.read_text()))["host_pid"])


@contextlib.contextmanager
def guarding(tmp_path: Path, code: str, *arguments: str, session_nice: int = 0) -> Iterator[Guarded]:
    directory = tmp_path / "m-1"
    directory.mkdir()
    status_read, status_write = os.pipe()
    command_read, command_write = os.pipe()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "headwater_server.process.guardian", "m", str(directory), str(status_write),
            str(command_read), str(session_nice), "--", sys.executable, "-c", code, *arguments,
        ],
        pass_fds=(status_write, command_read),
        start_new_session=True,
    )  # fmt: skip
    os.close(status_write)
    os.close(command_read)
    guarded = Guarded(process, directory, status_read, command_write)
    try:
        yield guarded
    finally:
        with contextlib.suppress(OSError):
            os.close(command_write)
        process.wait(20)
        os.close(status_read)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_host_that_ends_is_reported_and_swept(tmp_path: Path) -> None:
    with guarding(tmp_path, "import sys; sys.exit(7)") as guarded:
        ending, ended = guarded.statuses()
        assert ending == {"event": "ending", "text": "exited with status 7"}
        assert (ended["exit_status"], ended["leftovers"]) == (7, [])
        assert guarded.process.wait(5) == 7
        assert not guarded.directory.exists()


def test_a_host_that_is_killed_is_reported_so(tmp_path: Path) -> None:
    with guarding(tmp_path, SLEEP) as guarded:
        os.kill(guarded.host(), signal.SIGKILL)
        assert guarded.statuses()[0]["text"] == "killed by SIGKILL"


def test_stop_lets_the_host_unload(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with guarding(tmp_path, UNLOADS, str(marker)) as guarded:
        pid = guarded.host()
        wait_for(lambda: b"SIGTERM" in _caught(pid), what="the handler")
        (guarded.directory / "ready").touch()
        os.write(guarded.command, b"stop\n")
        assert guarded.statuses()[0]["text"] == "stopped"
        assert marker.read_text() == "unloaded"


@pytest.mark.parametrize("session_nice", [0, 3])
def test_the_session_begins_with_its_priority(tmp_path: Path, session_nice: int) -> None:
    with guarding(tmp_path, SLEEP, session_nice=session_nice) as guarded:
        group = Path(f"/proc/{guarded.host()}/autogroup")
        assert not group.exists() or group.read_text().split()[-1] == str(session_nice)


def ignored_signals(pid: int | str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)


def test_what_it_starts_ignores_no_signal(tmp_path: Path) -> None:
    with guarding(tmp_path, SLEEP) as guarded:
        # But for those that were ignored before it, as under nohup.
        ignored = ignored_signals(guarded.host()) & ~ignored_signals("self")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert not ignored & (1 << (number - 1))


def test_a_host_that_is_not_ready_is_stopped_at_once(tmp_path: Path) -> None:
    with guarding(tmp_path, SLEEP) as guarded:
        guarded.host()
        os.write(guarded.command, b"stop\n")
        assert guarded.statuses()[0]["text"] == "stopped before it was ready"


def _caught(pid: int) -> bytes:
    """Whether a process catches SIGTERM, from the mask in /proc."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return b"SIGTERM" if mask & (1 << (signal.SIGTERM - 1)) else b""


def test_the_end_of_the_pipe_ends_everything_at_once(tmp_path: Path) -> None:
    with guarding(tmp_path, SLEEP) as guarded:
        host = guarded.host()
        os.close(guarded.command)
        assert guarded.statuses()[0]["text"] == "the supervisor is gone"
        assert not is_alive(host)


@pytest.mark.parametrize("kill", ["host", "pipe"])
def test_no_descendant_is_left_not_even_in_a_session_of_its_own(tmp_path: Path, kill: str) -> None:
    marker = tmp_path / "pids"
    with guarding(tmp_path, HAS_CHILDREN, str(marker)) as guarded:
        pids = [int(word) for word in wait_for(lambda: marker.exists() and marker.read_text()).split()]
        assert all(is_alive(pid) for pid in pids)
        if kill == "host":
            os.kill(guarded.host(), signal.SIGKILL)
        else:
            os.close(guarded.command)
        guarded.statuses()
        guarded.process.wait(10)
        assert not any(is_alive(pid) for pid in pids)


def test_a_call_that_hangs_and_keeps_the_interpreter_ends_the_replica(tmp_path: Path) -> None:
    with guarding(tmp_path, HANGS, str(tmp_path / "m-1")) as guarded:
        wait_for((tmp_path / "m-1" / "ready").exists, what="the call")
        ending, ended = guarded.statuses()
        assert ending["text"] == "a call has taken longer than max_compute_s = 0.3 s"
        assert ended["leftovers"] == []


@pytest.mark.parametrize(
    ("name", "number"),
    [("tritonserver", signal.SIGKILL), ("triton_python_b", signal.SIGSTOP)],
    ids=["killed", "stopped"],
)
def test_a_process_that_the_replica_needs_is_missed_soon(tmp_path: Path, name: str, number: signal.Signals) -> None:
    with guarding(tmp_path, NAMED, str(tmp_path / "m-1"), name) as guarded:
        wait_for((tmp_path / "m-1" / "ready").exists, what="the process")
        pid = int((tmp_path / "m-1" / "named").read_text())
        _await_look(guarded)  # only what it has seen can be missed
        os.kill(pid, number)
        state = "is stopped" if number is signal.SIGSTOP else "has ended"
        assert guarded.statuses()[0]["text"] == f"its process {name} ({pid}) {state}"


def _await_look(guarded: Guarded) -> None:
    """Wait until the guardian has looked around once more from beginning to end: it sleeps between two looks."""

    def sleeps() -> int:
        status = Path(f"/proc/{guarded.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("voluntary")).split()[1])

    first = sleeps()
    wait_for(lambda: sleeps() >= first + 2, what="a look")


class Looks:
    """A guardian that sees what a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "ready").touch()
        self.now_s = 100.0
        self.states = {os.getpid(): ("python", "S"), 2: ("tritonserver", "S"), 3: ("sleep", "S")}
        self.guardian = Guardian(folder, -1, -1, 0, [])
        # private: a guardian that runs has the processes and the times of the machine, not those of a test
        monkeypatch.setattr(self.guardian, "_host", SimpleNamespace(pid=os.getpid()), raising=False)
        monkeypatch.setattr(self.guardian, "_states", lambda: dict(self.states))  # private: for the same reason
        monkeypatch.setattr(
            "headwater_server.process.guardian.time",
            SimpleNamespace(monotonic=lambda: self.now_s, monotonic_ns=lambda: 0),
        )

    def after(self, pause_s: float, pid: int, state: str) -> str | None:
        """What a look says at which a process is in this state; an empty one: it is gone."""
        self.now_s += pause_s
        name, _ = self.states.pop(pid, ("tritonserver", ""))
        if state:
            self.states[pid] = name, state
        return self.guardian._inspect()  # private: a look by itself, of which `run` makes one after the other


def test_who_is_stopped_or_gone_for_long_enough_is_reason_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state, reason in (("T", "is stopped"), ("Z", "has ended"), ("", "has ended")):
        looks = Looks(tmp_path, monkeypatch)
        assert looks.after(0.5, 2, "S") is None
        assert looks.after(0.5, 2, state) is None
        assert looks.after(0.01, 2, state) is None  # whatever woke it up, it is too soon
        assert looks.after(0.5, 2, state) == f"its process tritonserver (2) {reason}"


def test_who_goes_on_in_time_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(tmp_path, monkeypatch)
    for state in "STSTSS":
        assert looks.after(0.5, 2, state) is None
    assert looks.after(0.5, 3, "T") is None  # and neither is a process that the replica can do without
    assert looks.after(0.5, 3, "T") is None
    assert looks.after(0.5, 3, "") is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_meant_for_the_supervisor_are_left_to_it(tmp_path: Path, number: signal.Signals) -> None:
    with guarding(tmp_path, SLEEP) as guarded:
        host = guarded.host()
        guarded.process.send_signal(number)
        os.close(guarded.command)
        assert guarded.statuses()[0]["text"] == "the supervisor is gone"
        assert not is_alive(host)


FULL_DISK = """
import mmap, pathlib, signal, sys, time
folder, segment = map(pathlib.Path, sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
while not (folder / "journal.json").exists():
    pass
(folder / "journal.new").mkdir()
segment.write_bytes(bytes(4096))
with segment.open("r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
(folder / "ready").touch()
while True:
    time.sleep(0.05)
"""


def test_a_journal_that_cannot_be_written_ends_nothing_that_serves_and_what_it_lacks_is_swept(tmp_path: Path) -> None:
    segment = Path(f"/dev/shm/psm_headwater_test_{os.getpid()}")
    with guarding(tmp_path, FULL_DISK, str(tmp_path / "m-1"), str(segment)) as guarded:
        wait_for((tmp_path / "m-1" / "ready").exists, what="the segment")
        _await_look(guarded)
        os.write(guarded.command, b"stop\n")
        ending, ended = guarded.statuses()
        assert (ending["text"], ended["leftovers"]) == ("stopped", [])
        assert not segment.exists()


@pytest.mark.parametrize("held", ["", "held"])
def test_a_segment_that_nobody_has_mapped_goes_with_the_resource_tracker(tmp_path: Path, held: str) -> None:
    name = tmp_path / "name"
    with guarding(tmp_path, HAS_SEGMENT, str(name), held) as guarded:
        segment = Path("/dev/shm", wait_for(lambda: name.exists() and name.read_text()))
        assert segment.exists()
        began_s = time.monotonic()
        os.kill(guarded.host(), signal.SIGKILL)
        assert guarded.statuses()[-1]["leftovers"] == []
        assert time.monotonic() - began_s < 10
    if held:  # by a process of another session, for which no tracker waits for ever
        segment.unlink()
    assert not segment.exists()


@pytest.mark.parametrize(("number", "lacks"), [(errno.EAGAIN, True), (errno.ENOSPC, True), (errno.ENOENT, False)])
def test_a_host_that_cannot_be_started_is_reported_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, lacks: bool
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("headwater_server.process.guardian.subprocess.Popen", fails)
    monkeypatch.setattr("headwater_server.process.guardian.signal.set_wakeup_fd", lambda *_, **__: None)
    monkeypatch.setattr("headwater_server.process.guardian.signal.signal", lambda *_: None)
    monkeypatch.setattr("headwater_server.process.guardian.ctypes.CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    directory = tmp_path / "m-1"
    directory.mkdir()
    status_read, status_write = os.pipe()
    assert Guardian(directory, status_write, -1, 0, ["nothing"]).run() == 1
    failed, ended = (json.loads(line) for line in os.read(status_read, 65536).splitlines())
    assert failed["event"] == "failed"
    assert failed["is_shortage"] is lacks
    assert os.strerror(number) in failed["text"]
    assert (ended["event"], ended["leftovers"]) == ("ended", [])
    assert not directory.exists()
    os.close(status_read)
    os.close(status_write)
