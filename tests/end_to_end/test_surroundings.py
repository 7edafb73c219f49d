"""Starts in poor surroundings: a server works there, or ends at once with one line that says what is wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import SERVICES, leftovers, segments_of, serve, wait_for

MODEL = "light:Trunk"
READ_ONLY = "".join(
    f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder} && " for folder in ("/tmp", "/var/tmp")
)


def _can_mount() -> bool:
    try:
        return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def command(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line from a shell, which ends with ``exec "$@"``."""
    return subprocess.run(
        ["sh", "-c", script, "sh", sys.executable, "-m", "headwater_server", *arguments],
        cwd=SERVICES, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize(
    "prefix",
    [
        ("sh", "-c", 'exec "$@" <&- >&-', "sh"),
        ("env", "-i", "PYTHONSAFEPATH=1"),
        ("sh", "-c", 'ulimit -Sn 40; exec "$@"', "sh"),
    ],
    ids=["standard streams closed", "no environment", "a low soft limit of open files"],
)
def test_a_server_works(prefix: tuple[str, ...]) -> None:
    with serve({"deployments": {"light": {"model": MODEL}}}, prefix=prefix) as running:
        segments = segments_of(running.folder)
        answer = running.infer("light", [1, 2, 3, 4], shape=[1, 4])
        assert answer.status_code == 200, answer.text
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def test_replicas_are_replaced_where_another_folder_has_the_place_of_the_working_folder(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    shutil.copytree(SERVICES, folder)
    with serve({"deployments": {"light": {"model": MODEL}}}, cwd=folder) as running:
        before = running.replica_pid("light")
        shutil.rmtree(folder)
        shutil.copytree(SERVICES, folder)
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: "light-2 ready" in running.log.read_text(), 180, "another replica")
        assert running.infer("light", [1, 2, 3, 4], shape=[1, 4]).status_code == 200


def test_a_check_without_standard_streams_says_by_its_status_what_it_found() -> None:
    for what, status in ((MODEL, 0), ("light:Nothing", 1)):
        assert command('exec "$@" <&- >&- 2>&-', "check", what, "--port", "0").returncode == status


mounts = pytest.mark.skipif(not _can_mount(), reason="needs leave to make a mount namespace")


@pytest.mark.parametrize(
    ("script", "reason", "fix"),
    [
        ("d=$(mktemp -d) && cd $d && rmdir $d && ", "the working folder was removed", "cd to an existing folder"),
        ("ulimit -n 40 && ", "a process may open 40 files here; expected 256", "LimitNOFILE="),
        # In a folder that can be written, wherever this clone lies.
        pytest.param(
            f"{READ_ONLY}cd /dev/shm && ", "can't write in /tmp, where Triton writes", "mount a tmpfs", marks=mounts
        ),
        pytest.param(f"{READ_ONLY}cd /tmp && ", "no folder for temporary files", "mount a tmpfs at /tmp", marks=mounts),
        pytest.param(
            "mount -t tmpfs -o ro none /dev/shm && ", "can't write in /dev/shm", "mount a tmpfs at /dev/shm",
            marks=mounts,
        ),
    ],
    ids=["a removed working folder", "few open files", "read-only /tmp", "nothing but read-only", "read-only /dev/shm"],
)  # fmt: skip
def test_a_server_ends_with_one_line_and_check_finds_the_same(script: str, reason: str, fix: str) -> None:
    script += 'exec "$@"'
    if "mount " in script:
        script = f'exec unshare --mount sh -c \'{script}\' "$0" "$@"'
    served = command(script, "serve", MODEL, "--port", "0")
    assert served.returncode == 1
    (line,) = [line for line in served.stderr.splitlines() if not line.startswith("{")]  # but for the log
    assert line.startswith("headwater: ")
    assert reason in line
    assert fix in line
    assert served.stdout == ""
    checked = command(script, "check", MODEL, "--port", "0")
    assert checked.returncode == 1
    assert "Traceback" not in checked.stderr
    assert reason in checked.stdout + checked.stderr
    assert fix in checked.stdout + checked.stderr
