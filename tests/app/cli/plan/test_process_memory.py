"""What processes have: anonymous pages where they are, pages of files once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from app.cli.plan.process_memory import ProcessMemory, add_up, descendants, mark_peaks, measure_server, parse_smaps

SMAPS = """\
55b73491c000-55b73491e000 r--p 00000000 fe:00 260386                     /usr/lib/libtorch.so
Size:                  8 kB
Rss:                   8 kB
Anonymous:             0 kB
55b73491e000-55b734924000 rw-p 00002000 fe:00 260386                     /usr/lib/libtorch.so
Size:                 24 kB
Rss:                  24 kB
Anonymous:            20 kB
7f0000000000-7f0000100000 rw-p 00000000 00:00 0                          [heap]
Size:               1024 kB
Rss:                 100 kB
Anonymous:           100 kB
"""
TORCH = ("fe:00", "260386", "/usr/lib/libtorch.so")


def test_pages_of_a_file_that_were_written_are_the_process_own() -> None:
    assert parse_smaps(SMAPS) == (120 * 1024, {TORCH: 12 * 1024})


def test_a_library_counts_once_and_a_replicas_own_files_for_each() -> None:
    own = ("00:1", "7", "/run/hw/r1/workspace/tritonserver")
    other = ("00:1", "8", "/run/hw/r2/workspace/tritonserver")
    segment = ("00:1", "9", "/dev/shm/region")
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
