"""Sweeping what a replica leaves behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from headwater_server.process.sweep import Journal, make_instance_folder, segments_mapped_by, sweep_replica, sweep_stale


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=4096)
    yield memory
    memory.close()
    path = Path("/dev/shm") / memory.name
    if path.exists():
        memory.unlink()
    else:
        from multiprocessing import resource_tracker

        resource_tracker.unregister(f"/{memory.name}", "shared_memory")


def replica_in(folder: Path) -> Path:
    replica = folder / "m-1"
    (replica / "workspace").mkdir(parents=True)
    (replica / "workspace" / "binary").write_text("x")
    return replica


def test_segments_that_a_process_has_mapped_are_found(segment: SharedMemory) -> None:
    assert segment.name in segments_mapped_by([os.getpid()])


def test_a_process_that_is_gone_has_none() -> None:
    assert segments_mapped_by([2**22 + 1]) == set()


def test_the_journal_survives_its_writer(tmp_path: Path) -> None:
    Journal(tmp_path).note(17, ["psm_a"])
    again = Journal(tmp_path)
    again.note(17, ["psm_b"])
    assert (Journal(tmp_path).host_pid, Journal(tmp_path).segments) == (17, {"psm_a", "psm_b"})


def test_a_damaged_journal_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "journal.json").write_text("{")
    assert Journal(tmp_path).host_pid == 0


def test_the_folder_the_named_segments_and_those_of_the_host_go(tmp_path: Path, segment: SharedMemory) -> None:
    replica = replica_in(tmp_path)
    pid = 4_000_000_000 + secrets.randbelow(1_000_000)
    backend = Path(f"/dev/shm/headwater-{pid}-abc")
    backend.write_text("x")
    Journal(replica).note(pid, [segment.name])
    assert sweep_replica(replica) == []
    assert not replica.exists()
    assert not backend.exists()
    assert not (Path("/dev/shm") / segment.name).exists()


def test_segments_that_are_gone_already_are_no_failure(tmp_path: Path) -> None:
    replica = replica_in(tmp_path)
    Journal(replica).note(1, ["psm_never_was"])
    assert sweep_replica(replica) == []


def test_an_instance_that_ended_without_sweeping_is_swept_later(tmp_path: Path) -> None:
    folder, lock = make_instance_folder(tmp_path)
    Journal(replica_in(folder)).note(1, [])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sweep_stale(tmp_path) == []  # it lives: its lock is held
    os.close(lock)
    assert sweep_stale(tmp_path) == [folder]
    assert not folder.exists()


HAS_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_triton_that_outlived_its_host_guardian_and_supervisor_is_ended(tmp_path: Path) -> None:
    folder, lock = make_instance_folder(tmp_path)
    replica = replica_in(folder)
    command = [sys.executable, "-c", HAS_A_CHILD, f"{replica}/w/tritonserver"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as stray:
        assert stray.stdout is not None
        stranger = int(stray.stdout.readline())  # of the same group, but nothing says that it is ours
        Journal(replica).note(stray.pid, [])
        os.close(lock)
        threading.Thread(target=stray.wait, daemon=True).start()  # as init reaps orphans
        sweep_stale(tmp_path)
        assert stray.wait(10) == -signal.SIGKILL
        os.kill(stranger, signal.SIGKILL)  # fails if it is gone


def test_folders_that_are_not_ours_stay(tmp_path: Path) -> None:
    other = tmp_path / f"headwater-{os.getuid()}-notes"
    other.mkdir()
    assert sweep_stale(tmp_path) == []
    assert other.exists()


def test_folders_of_the_backend_that_were_made_while_the_replica_started_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater_server.process.sweep.BACKEND_FOLDERS", tmp_path)
    replica = replica_in(tmp_path)
    for number, name in enumerate(
        ["python_env_early", "spec", "python_env_own", "python_env_used", "ready", "python_env_late"]
    ):
        path = tmp_path / name
        if name in ("spec", "ready"):
            path = replica / {"spec": "spec.json", "ready": "ready"}[name]
            path.touch()
        else:
            path.mkdir()
            if name == "python_env_used":
                (path / "unpacked").touch()
        os.utime(path, (1000 + number, 1000 + number))
    assert sweep_replica(replica) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "python_env_early",
        "python_env_late",
        "python_env_used",
    ]
