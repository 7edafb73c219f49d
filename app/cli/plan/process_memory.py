"""What the processes of one server have of the machine's memory, and the most that they had since a mark.

The kernel's proportional share (PSS) of a page depends on who else has it mapped, so a library that an unrelated
process uses as well would make a server look smaller. Counted here instead: anonymous pages where they are, pages of
files once for all processes that map them. On a machine that runs nothing else the sum is the server's PSS.

Source: proc_pid_smaps(5), proc_pid_status(5), proc_pid_clear_refs(5).
"""

from __future__ import annotations

import contextlib
import re
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
    "parse_smaps",
]

_MAPPING: Final = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ [0-9a-f]+ (\S+) (\d+) *(.*)")
SHARED_MEMORY: Final = ("/dev/shm/", "/memfd:", "/dev/zero", "/SYSV")
RESET_PEAK: Final = "5"
"""Written to ``clear_refs``: VmHWM starts anew."""


@dataclass(frozen=True)
class ProcessMemory:
    """Of one process, in bytes."""

    anonymous: int
    """The most since the mark."""
    files: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """Resident pages of each file, by device, inode and path; shared memory among them."""


@dataclass(frozen=True)
class ServerMemory:
    """Of one server, in bytes. The sum of all three is what it takes."""

    server: int
    """The supervisor and the gateway workers."""
    replicas: tuple[int, ...]
    """Each one's own: its processes', its guardian among them, without what it shares with others."""
    files: int
    """Pages of files, libraries above all, that any of them map: once."""

    @property
    def host(self) -> int:
        """All of the machine's memory that it takes."""
        return self.server + sum(self.replicas) + self.files


def parse_smaps(text: str) -> tuple[int, dict[tuple[str, str, str], int]]:
    """Anonymous bytes now, and resident bytes by file, of the text of ``/proc/PID/smaps``."""
    anonymous = 0
    files: dict[tuple[str, str, str], int] = {}
    where: tuple[str, str, str] | None = None
    resident = 0
    for line in text.splitlines():
        if line.startswith("Rss:"):
            resident = 1024 * int(line.split()[1])
        elif line.startswith("Anonymous:"):
            own = 1024 * int(line.split()[1])
            anonymous += own
            if where is not None and resident > own:
                files[where] = files.get(where, 0) + resident - own
        elif (found := _MAPPING.match(line)) is not None:
            device, inode, path = found.groups()
            where = (device, inode, path) if inode != "0" else None
    return anonymous, files


def descendants(pid: int) -> list[int]:
    """A process and all that it and its children started, as far as they live."""
    return [one for branch in _branches(pid).values() for one in branch]


def _branches(pid: int) -> dict[int, list[int]]:
    """By child of a process: it and all that it started; the process itself stands for itself."""
    found = {pid: [pid]}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                branch = [child, *child.children(recursive=True)]
                found[child.pid] = [one.pid for one in branch if _lives(one)]
    return found


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def mark_peaks(pids: Collection[int]) -> None:
    """Let peaks count from now on."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended, or the kernel has no such thing: then the peak is its life's
            Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)


def measure_server(supervisor: int, runtime_dir: Path) -> ServerMemory:
    """Measure a server.

    Args:
        supervisor: its process id.
        runtime_dir: files in it belong to one replica each, and are shared with nobody.
    """
    server: list[ProcessMemory] = []
    replicas = []
    for child, pids in _branches(supervisor).items():
        found = [memory for pid in pids if (memory := _process(pid)) is not None]
        if _is_guardian(child):
            replicas.append(found)
        else:
            server += found
    return add_up(server, replicas, str(runtime_dir))


def add_up(server: Sequence[ProcessMemory], replicas: Sequence[Sequence[ProcessMemory]], own_dir: str) -> ServerMemory:
    """Sum over processes.

    Args:
        server: the supervisor and the gateway workers.
        replicas: the processes of each.
        own_dir: files under it, and shared memory, are a replica's own.
    """
    own = []
    for group in replicas:
        mapped = _once(group)
        own.append(
            sum(one.anonymous for one in group)
            + sum(count for (_, _, path), count in mapped.items() if _is_own(path, own_dir))
        )
    everything = _once([*server, *(one for group in replicas for one in group)])
    shared = sum(count for (_, _, path), count in everything.items() if not _is_own(path, own_dir))
    return ServerMemory(sum(one.anonymous for one in server), tuple(own), shared)


def _once(processes: Sequence[ProcessMemory]) -> dict[tuple[str, str, str], int]:
    """Each file's resident bytes: at least those of the process that has most of it."""
    found: dict[tuple[str, str, str], int] = {}
    for one in processes:
        for file, count in one.files.items():
            found[file] = max(found.get(file, 0), count)
    return found


def _is_own(path: str, own_dir: str) -> bool:
    return path.startswith((own_dir.rstrip("/") + "/", *SHARED_MEMORY))


def _is_guardian(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"app.process.guardian" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False


def _process(pid: int) -> ProcessMemory | None:
    """None: it has ended."""
    try:
        anonymous, files = parse_smaps(Path(f"/proc/{pid}/smaps").read_text(errors="replace"))
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    return ProcessMemory(max(anonymous, _peak_anonymous(status)), files)


def _peak_anonymous(status: str) -> int:
    """The most resident memory less what is not anonymous now."""
    sizes = {line.partition(":")[0]: line.split() for line in status.splitlines() if line.startswith(("VmHWM", "Rss"))}
    try:
        peak, files, shared = (1024 * int(sizes[name][1]) for name in ("VmHWM", "RssFile", "RssShmem"))
    except (KeyError, IndexError, ValueError):
        return 0
    return peak - files - shared
