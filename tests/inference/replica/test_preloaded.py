"""A process that forks replicas: what it forks, when it doesn't, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from headwater.replica import preloaded
from headwater.wire.handshake import (
    COMMAND,
    GO,
    HOST,
    READY,
    STATUS,
    BinderProgram,
    ForkRequest,
    ReplicaSpec,
    ReplicaStatus,
)
from tests.running import wait_for

GUARDIAN = "import os, sys; os.waitpid(int(sys.argv[3]), 0)"


class Preloaded:
    """One, and what it says."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.folder = folder
        self.python, self.binder = sys.executable, "headwater_server.binder"
        self.changes: dict[str, str | None] = {}
        """Variables in which the binder's environment differs."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", preloaded.__name__, str(folder), str(theirs.fileno()), *modules, " " * 200],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.socket.settimeout(60)

    def prepare(self) -> None:
        self.socket.send(msgspec.json.encode(BinderProgram(self.python, self.binder, self.changes)))

    def fork(self, model: str, *user_paths: str, go: bytes = GO) -> list[ReplicaStatus]:
        """What a replica with a small guardian reports until its end, when its command pipe brings this."""
        (self.folder / "tmp").mkdir()
        spec = ReplicaSpec("m", model, "secret", user_paths, str(self.folder))
        (self.folder / "spec.json").write_bytes(msgspec.json.encode(spec))
        guardian = [sys.executable, "-c", GUARDIAN, STATUS, COMMAND, HOST]
        variables = {"TMPDIR": str(self.folder / "tmp")}
        request = ForkRequest("m", str(self.folder), user_paths, variables, guardian)
        (status_read, status), (command, command_write) = os.pipe(), os.pipe()
        with (self.folder / "output").open("wb") as output:
            self.prepare()
            socket.send_fds(self.socket, [msgspec.json.encode(request)], [status, command, output.fileno()])
            assert self.socket.recv(100).isdigit()
        os.close(status)
        os.close(command)
        os.write(command_write, go)
        os.close(command_write)
        with open(status_read, "rb") as lines:
            return [msgspec.json.decode(line, type=ReplicaStatus) for line in lines]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as ended:

        def start(*modules: str) -> Preloaded:
            one = Preloaded(tmp_path, *modules)
            ended.callback(one.process.wait, 60)
            ended.callback(one.socket.close)
            ended.callback(one.process.send_signal, signal.SIGCONT)
            return one

        yield start


def test_a_module_of_the_users_comes_before_one_that_was_imported_before(started: Any, tmp_path: Path) -> None:
    one = started("wave")
    assert one.socket.recv(100) == READY
    user = tmp_path / "user"
    user.mkdir()
    (user / "wave.py").touch()
    last = one.fork("wave:Model", str(user))[-1]
    assert (last.event, last.is_permanent) == ("failed", True)
    assert f"{user}/wave.py has no Model" in last.text


def test_a_replica_reports_as_one_that_was_not_forked(started: Any, tmp_path: Path) -> None:
    one = started()
    assert one.socket.recv(100) == READY
    user = tmp_path / "user"
    user.mkdir()
    (user / "forked.py").write_text("import sys\nraise ValueError(sys.argv[1:3], sys.orig_argv[2])\n")
    *_, last = one.fork("forked:Model", str(user))
    assert f"['m', '{tmp_path}'], '{preloaded.__name__}'" in last.text
    assert last.imported == [str(user / "forked.py")]
    assert "Traceback" in (tmp_path / "output").read_text()


BINDER = """
import json, os, sys
with open(os.environ["SAID"], "a") as said:
    print(json.dumps({"pid": os.getpid(), "orig": sys.orig_argv[2], "environment": dict(os.environ)}), file=said)
while os.read(int(sys.argv[1]), 1):
    pass
"""


def said(folder: Path) -> Any:
    """What the last stand-in for a binder has said; None: nothing yet."""
    lines = (folder / "said").read_text().splitlines() if (folder / "said").exists() else []
    return json.loads(lines[-1]) if lines else None


@pytest.mark.parametrize(("name", "module"), [("OMP_NUM_THREADS", preloaded.__name__), ("LD_LIBRARY_PATH", "stand_in")])
def test_a_binder_has_another_environment_and_is_forked_unless_this_decides_what_it_loads(
    started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    (tmp_path / "stand_in.py").write_text(BINDER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("OF_MODEL", "yes")
    one = started()
    assert one.socket.recv(100) == READY
    one.binder, one.changes = "stand_in", {name: "1", "OF_MODEL": None, "SAID": str(tmp_path / "said")}
    (tmp_path / "failing.py").write_text("raise ValueError\n")
    one.fork("failing:Model", str(tmp_path))

    binder = wait_for(lambda: said(tmp_path), 30, "a binder")
    assert binder["orig"] == module
    assert binder["environment"][name] == "1"
    assert "OF_MODEL" not in binder["environment"]


@pytest.fixture
def waiting(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Preloaded, int]:
    """A preloaded process, and the process id of a binder that waits for a replica."""
    (tmp_path / "stand_in.py").write_text(BINDER)
    (tmp_path / "failing.py").write_text("raise ValueError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = started()
    assert one.socket.recv(100) == READY
    one.binder, one.changes = "stand_in", {"LD_LIBRARY_PATH": None, "SAID": str(tmp_path / "said")}
    one.prepare()
    one.prepare()
    return one, wait_for(lambda: said(tmp_path), 30, "a binder")["pid"]


@pytest.mark.slow
def test_a_binder_that_waits_binds_the_next_replica(waiting: tuple[Preloaded, int], tmp_path: Path) -> None:
    one, pid = waiting
    assert one.fork("failing:Model", str(tmp_path))[-1].event == "failed"
    assert said(tmp_path)["pid"] == pid
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 30, "its end")


@pytest.mark.parametrize("ancestor", [0, 1, 2, 3])
def test_processes_that_were_killed_while_they_waited_are_replaced(
    waiting: tuple[Preloaded, int], tmp_path: Path, ancestor: int
) -> None:
    one, binder = waiting
    family = [binder]
    while family[-1] != one.process.pid:
        family.append(psutil.Process(family[-1]).ppid())
    assert len(family) == 5
    os.kill(family[ancestor], signal.SIGKILL)
    if ancestor < 3:  # the others go on without the guardian's parent
        wait_for(lambda: not Path(f"/proc/{family[3]}/cwd").exists(), 30, "the end of all")
    assert one.fork("failing:Model", str(tmp_path))[-1].event == "failed"
    wait_for(lambda: (said(tmp_path)["pid"] == binder) == (ancestor == 3), 30, "the replica's binder")


def test_processes_that_wait_end_with_the_supervisor(waiting: tuple[Preloaded, int]) -> None:
    one, binder = waiting
    one.socket.close()
    assert one.process.wait(60) == 0
    assert not Path(f"/proc/{binder}").exists()


def test_processes_that_wait_end_with_a_killed_process(waiting: tuple[Preloaded, int]) -> None:
    one, binder = waiting
    one.process.kill()
    wait_for(lambda: not Path(f"/proc/{binder}/cwd").exists(), 30, "its end")


def test_a_guardian_that_nobody_waits_for_forks_nothing(started: Any) -> None:
    one = started()
    assert one.socket.recv(100) == READY
    assert one.fork("wave:Model", go=b"") == []


def test_what_starts_threads_when_it_is_imported_is_not_forked(started: Any, tmp_path: Path, monkeypatch: Any) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert started("threaded").socket.recv(100) == b"the imports started 1 threads"


def test_what_opens_a_gpu_when_it_is_imported_is_not_forked(started: Any, tmp_path: Path, monkeypatch: Any) -> None:
    device = tmp_path / "nvidiactl"
    code = (
        f"import __main__\n__main__.GPU_DEVICES = {str(tmp_path / 'nvidia')!r}\nopened = open({str(device)!r}, 'w')\n"
    )
    (tmp_path / "greedy.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert started("greedy").socket.recv(100) == b"the imports opened a GPU"


def test_after_a_package_was_installed_nothing_is_forked(started: Any, tmp_path: Path, monkeypatch: Any) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (tmp_path / "elsewhere.py").write_text(f"import sysconfig\nsysconfig.get_path = lambda name: {str(packages)!r}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = started("elsewhere")
    assert one.socket.recv(100) == READY
    (packages / "torch-2.dist-info").mkdir()
    with Path(os.devnull).open() as file:
        socket.send_fds(one.socket, [b"a request"], [file.fileno()])
    assert one.socket.recv(100) == b"packages were installed or removed"


def test_it_ends_with_the_supervisor(started: Any) -> None:
    one = started()
    assert one.socket.recv(100) == READY
    one.socket.close()
    assert one.process.wait(60) == 0


def test_it_is_ended_with_the_supervisor_even_while_it_imports(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "endless.py").write_text(
        f"open({str(tmp_path / 'began')!r}, 'w').close()\nimport time\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = (
        "import pathlib, sys\nfrom tests.inference.replica.test_preloaded import Preloaded\n"
        "print(Preloaded(pathlib.Path(sys.argv[1]), 'endless').process.pid, flush=True)\nsys.stdin.read()"
    )
    root = str(Path(__file__).parents[3])
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    )
    with supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        wait_for((tmp_path / "began").exists, 60, "the import")
        supervisor.kill()
    wait_for(lambda: not Path(f"/proc/{pid}/cwd").exists(), 30, "it to end")
