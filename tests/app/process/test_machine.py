"""What the machine has, and what its cgroups allow of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater_server.process.machine import HOST, cpu_count, host_capacity, measure_groups_by_place


def fake_root(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


MEMINFO = "MemTotal:       16000 kB\nMemFree:        1000 kB\n"


def test_the_machine_has_what_its_tightest_cgroup_allows(tmp_path: Path) -> None:
    root = fake_root(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/a.slice/b.service\n")
    assert host_capacity(root) == 16_000 * 1024
    group = root / "sys/fs/cgroup/a.slice/b.service"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    assert host_capacity(root) == 16_000 * 1024
    (group.parent / "memory.max").write_text("4000000\n")
    assert host_capacity(root) == 4_000_000
    (group / "memory.max").write_text("3000000\n")
    assert host_capacity(root) == 3_000_000


def test_a_container_sees_its_limit_at_the_mount_whatever_path_it_is_told(tmp_path: Path) -> None:
    root = fake_root(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/docker/0123\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text("5000000\n")
    assert host_capacity(root) == 5_000_000


def test_cgroup_v1_too(tmp_path: Path) -> None:
    lines = "12:cpu,cpuacct:/x\n4:memory:/x\n"
    root = fake_root(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup=lines)
    group = root / "sys/fs/cgroup/memory/x"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert host_capacity(root) == 16_000 * 1024
    (group / "memory.limit_in_bytes").write_text("6000000\n")
    assert host_capacity(root) == 6_000_000


def test_where_nothing_can_be_read_nothing_is_known(tmp_path: Path) -> None:
    assert host_capacity(tmp_path) is None


@pytest.fixture
def sixteen_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may run on so many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000", 16), ("150000 100000", 2), ("200000 100000", 2), ("200001 100000", 3), ("5000 100000", 1),
        ("3200000 100000", 16), ("rubbish", 16),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("sixteen_cpus")
def test_a_quota_of_cpu_time_counts_as_so_many_whole_cpus(tmp_path: Path, quota: str, cpus: int) -> None:
    files = {"proc__self__cgroup": "0::/pod\n", "sys__fs__cgroup__pod__cpu.max": f"{quota}\n"}
    assert cpu_count(fake_root(tmp_path, **files)) == cpus


@pytest.mark.usefixtures("sixteen_cpus")
def test_the_tightest_quota_holds_wherever_it_is(tmp_path: Path) -> None:
    root = fake_root(tmp_path, proc__self__cgroup="0::/a.slice/b.service\n")
    assert cpu_count(root) == 16
    fake_root(root, **{"sys__fs__cgroup__a.slice__b.service__cpu.max": "800000 100000\n"})
    assert cpu_count(root) == 8
    fake_root(root, **{"sys__fs__cgroup__a.slice__cpu.max": "300000 100000\n"})
    assert cpu_count(root) == 3
    fake_root(root, **{"sys__fs__cgroup__cpu.max": "50000 50000\n"})  # a container's own
    assert cpu_count(root) == 1


@pytest.mark.usefixtures("sixteen_cpus")
def test_a_quota_of_cgroup_v1(tmp_path: Path) -> None:
    root = fake_root(tmp_path, proc__self__cgroup="4:memory:/x\n3:cpu,cpuacct:/x\n")
    quota, period = (f"sys__fs__cgroup__cpu__x__cpu.cfs_{one}_us" for one in ("quota", "period"))
    assert cpu_count(fake_root(root, **{quota: "-1\n", period: "100000\n"})) == 16
    assert cpu_count(fake_root(root, **{quota: "450000\n"})) == 5
    (root / "sys/fs/cgroup/cpu/x/cpu.cfs_period_us").unlink()
    assert cpu_count(root) == 16


@pytest.mark.usefixtures("sixteen_cpus")
def test_without_cgroups_a_process_has_the_cpus_that_it_may_run_on(tmp_path: Path) -> None:
    assert cpu_count(tmp_path) == 16


def test_pages_that_processes_share_count_once() -> None:
    """A child that has written nothing has what its parent has; each then counts half."""
    # The child waits on a pipe that ends with us.
    script = (
        "import os, sys\n"
        "taken = bytearray(b'.') * 200_000_000\n"
        "if os.fork() == 0:\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "print('taken', flush=True)\n"
        "sys.stdin.read()\n"
        "os.wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"taken\n"
        group = os.getpgid(process.pid)
        found = measure_groups_by_place({group})[group][HOST]
        process.stdin.close()
        process.wait(10)
    assert 200_000_000 < found < 300_000_000
