"""What processes have: anonymous pages where they are, pages of files once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headwater_server.cli.plan.process_memory import (
    ProcessMemory,
    add_up,
    descendants,
    mark_peaks,
    measure_server,
    process_memory,
)

TORCH = "/usr/lib/libtorch.so"


def test_pages_of_a_file_that_were_written_are_the_process_own(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(b"x" * (4 << 20))
    program = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'rb')\n"
        "mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)\n"
        "sum(mapped[::4096])\n"
        "print(flush=True); sys.stdin.readline()\n"
        "mapped[: 3 << 20] = b'y' * (3 << 20)\n"
        "sum(mapped[::4096])\n"  # the kernel may have unmapped the rest of a large page
        "print(flush=True); sys.stdin.readline()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin, child.stdout:
        child.stdout.readline()
        read = process_memory(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        written = process_memory(child.pid)
    assert read is not None
    assert written is not None
    assert read.files[str(file)] == 4 << 20
    assert written.files[str(file)] == 1 << 20
    assert written.anonymous - read.anonymous >= 3 << 20
    assert process_memory(child.pid) is None


@pytest.mark.parametrize("status", [psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD])
def test_a_process_that_has_ended_is_no_descendant(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with child, child.stdin:
        assert child.pid in descendants(os.getpid())
        monkeypatch.setattr(psutil.Process, "status", lambda self: status)
        assert child.pid not in descendants(os.getpid())


def test_a_library_counts_once_and_a_replicas_own_files_for_each() -> None:
    own = "/run/hw/r1/workspace/tritonserver"
    other = "/run/hw/r2/workspace/tritonserver"
    segment = "/dev/shm/region"
    found = add_up(
        [ProcessMemory(10, {TORCH: 5})],
        [
            [ProcessMemory(100, {TORCH: 50, own: 3, segment: 4}), ProcessMemory(20, {segment: 6})],
            [ProcessMemory(200, {TORCH: 40, other: 3})],
        ],
        "/run/hw",
    )
    assert (found.server, found.replicas, found.files) == (10, (100 + 20 + 3 + 6, 203), 50)
    assert found.host == 10 + 129 + 203 + 50


def test_a_peak_since_the_mark_is_seen_although_the_memory_was_given_back(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "before = bytearray(b'x') * (64 << 20)\n"  # before the mark: must not count
        "del before\n"
        "print(flush=True); sys.stdin.readline()\n"
        "since = bytearray(b'x') * (32 << 20)\n"
        "del since\n"
        "print(flush=True); sys.stdin.readline()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    with child, child.stdin, child.stdout:
        child.stdout.readline()
        assert descendants(child.pid) == [child.pid]
        unmarked = measure_server(child.pid, tmp_path).server
        mark_peaks([child.pid])
        before = measure_server(child.pid, tmp_path).server
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = measure_server(child.pid, tmp_path).server
    assert unmarked - before > 60 << 20
    assert 30 << 20 < after - before < 40 << 20


def test_what_a_process_started_is_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with child, child.stdin:
        assert {os.getpid(), child.pid} <= set(descendants(os.getpid()))
