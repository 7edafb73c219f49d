"""The machine's memory that the processes of a server take: the peak since a mark (`mark_peaks`).

The kernel's proportional share (PSS) of a page depends on the other processes that map it, so a server would look
smaller while an unrelated process uses the same library. Here, anonymous pages count for their process, and pages of
files count once for all processes that map them. On a machine that runs nothing else, the sum is the server's PSS,
except that pages which a process has shared with its parent since it was forked count for both.

Source: proc_pid_smaps(5), proc_pid_status(5), proc_pid_clear_refs(5).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

__all__ = [
    "ProcessMemory",
    "ServerMemory",
    "add_up",
    "descendants",
    "mark_peaks",
    "measure_server",
    "process_memory",
]

SHARED_MEMORY: Final = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")
"""Beginnings of the paths of mappings that are shared memory."""
RESET_PEAK: Final = "5"
"""Value that resets VmHWM, the peak of the resident memory, when written to ``clear_refs``."""


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of a process, in bytes."""

    anonymous: int
    """Peak of the anonymous pages since the mark, or since the process's start if there is no mark."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Resident pages of each file by path, shared memory included."""


@dataclass(frozen=True)
class ServerMemory:
    """Memory of a server, in bytes."""

    server: int
    """Anonymous memory of the supervisor and of its children that guard no replica: gateway workers, and processes that
    fork replicas."""
    replicas: tuple[int, ...]
    """Memory of each replica's processes and its guardian, without the pages that ``files`` counts."""
    files: int
    """Pages of files outside the runtime folder, mostly libraries, that any process maps; each file counts once."""

    @property
    def host(self) -> int:
        """Memory of the whole server."""
        return self.server + sum(self.replicas) + self.files


def descendants(pid: int) -> list[int]:
    """The ids of a process and of its running descendants."""
    return [descendant for branch in _branches(pid).values() for descendant in branch]


def _branches(pid: int) -> dict[int, list[int]]:
    """Groups of process ids: a process alone under its own id, and each child with its descendants under the child's
    id, without processes that have ended."""
    branches = {pid: [pid]}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                branch = [child, *child.children(recursive=True)]
                branches[child.pid] = [process.pid for process in branch if _lives(process)]
    return branches


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def mark_peaks(pids: Collection[int]) -> None:
    """Reset the memory peaks of these processes: a later peak counts from now."""
    for pid in pids:
        with contextlib.suppress(OSError):  # ended, or unsupported: the peak then counts from its start
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)


def measure_server(supervisor: int, runtime_dir: Path) -> ServerMemory:
    """Measure a server, given its supervisor's process id. Each file in ``runtime_dir`` belongs to a single replica."""
    server: list[ProcessMemory] = []
    replicas = []
    for child, pids in _branches(supervisor).items():
        processes = [memory for pid in pids if (memory := process_memory(pid)) is not None]
        if _is_guardian(child):
            replicas.append(processes)
        else:
            server += processes
    return add_up(server, replicas, str(runtime_dir))


def add_up(server: Sequence[ProcessMemory], replicas: Sequence[Sequence[ProcessMemory]], own_dir: str) -> ServerMemory:
    """Sum over processes.

    Args:
        server: the processes of `ServerMemory.server`.
        replicas: the processes of each replica.
        own_dir: folder whose files, like shared memory, count for a replica instead of as shared files.
    """
    own_paths = (own_dir.rstrip("/") + "/", *SHARED_MEMORY)
    replica_bytes = [
        sum(process.anonymous for process in group)
        + sum(count for path, count in _largest(group).items() if path.startswith(own_paths))
        for group in replicas
    ]
    everything = _largest([*server, *(process for group in replicas for process in group)])
    shared = sum(count for path, count in everything.items() if not path.startswith(own_paths))
    return ServerMemory(sum(process.anonymous for process in server), tuple(replica_bytes), shared)


def _largest(processes: Sequence[ProcessMemory]) -> dict[str, int]:
    """Resident bytes of each file: the largest number in any process, which is a lower bound of the pages in memory."""
    file_bytes: dict[str, int] = {}
    for process in processes:
        for path, count in process.files.items():
            file_bytes[path] = max(file_bytes.get(path, 0), count)
    return file_bytes


def _is_guardian(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return "headwater_server.process.guardian" in psutil.Process(pid).cmdline()
    return False


def process_memory(pid: int) -> ProcessMemory | None:
    """Measure a process; None if it has ended, or can't be read. Pages of a private mapping that were written are
    anonymous."""
    try:
        mappings = psutil.Process(pid).memory_maps(grouped=False)
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (psutil.Error, OSError):
        return None
    files: dict[str, int] = {}
    for mapping in mappings:
        if not mapping.path.startswith("[") and mapping.rss > mapping.anonymous:  # [heap], [anon]
            files[mapping.path] = files.get(mapping.path, 0) + mapping.rss - mapping.anonymous
    anonymous: int = sum(mapping.anonymous for mapping in mappings)
    return ProcessMemory(max(anonymous, _peak_anonymous(status)), files)


def _peak_anonymous(status: str) -> int:
    """The peak of the resident memory, less the pages that are not anonymous now; 0 if the kernel doesn't report the
    peak."""
    sizes = {line.partition(":")[0]: line.split() for line in status.splitlines() if line.startswith(("VmHWM", "Rss"))}
    try:
        peak, files, shared = (1024 * int(sizes[name][1]) for name in ("VmHWM", "RssFile", "RssShmem"))
    except (KeyError, IndexError, ValueError):
        return 0
    return peak - files - shared
