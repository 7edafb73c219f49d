"""Removes the shared-memory segments and folders that a replica leaves behind when it ends.

Killing a replica's process group frees its memory, but leaves ``/dev/shm/headwater-<group>-*`` of Triton's Python
backend, an empty ``/tmp/python_env_*``, and the workspace with its copy of Triton's binaries. A vLLM, and processes
that a model starts, leave segments and semaphores with random names. Such names can only be read from the memory maps
of live processes, so the guardian records them in a journal while the replica runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Journal",
    "kill_group",
    "lock_instance_folder",
    "make_instance_folder",
    "process_stat",
    "process_stats",
    "segments_mapped_by",
    "sweep_replica",
    "sweep_stale",
]

SHARED_MEMORY = Path("/dev/shm")
BACKEND_FOLDERS = Path("/tmp")
"""Folder in which Triton's Python backend creates its ``python_env_*``, regardless of TMPDIR."""
STRAYS_TIMEOUT_S = 5.0
"""Time after which `_end_strays` gives up on processes that don't end when they are killed."""
TRACKERS_TIMEOUT_S = 1.25
"""Time in which the resource trackers of Python's `multiprocessing` must remove the segments of killed processes."""
POLL_S = 0.02
_JOURNAL = "journal.json"
_LOCK = "lock"
_SEGMENT = re.compile(rb"/dev/shm/(psm_[0-9a-z_]+|sem\.mp-[0-9a-z_]+|headwater-[^ /\n]+)")
"""Matches the names that Python's multiprocessing and Triton's Python backend give to segments and semaphores."""


class Journal:
    """Records, in a replica's folder, the segments to sweep when the replica ends. A later start of the server can
    sweep from the same record. A new object begins with the record in the folder, if there is one."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _JOURNAL
        self.host_pid = 0
        """Process id of the replica's host, which leads the replica's process group; 0: not recorded."""
        self.segments: set[str] = set()
        """Names of files in /dev/shm."""
        self._is_behind = False
        """Whether the file is out of date."""
        with contextlib.suppress(OSError, ValueError):
            content = json.loads(self._path.read_text())
            self.host_pid = int(content["host_pid"])
            self.segments = {str(name) for name in content["segments"]}

    def note(self, host_pid: int, segments: Iterable[str]) -> None:
        """Record the host's process id and further segments; the file is written only if the record has changed.

        Raises:
            OSError: the file can't be written, for example on a full disk; the record stays in memory, and the next
                call writes it.
        """
        merged = self.segments | set(segments)
        if host_pid == self.host_pid and merged == self.segments and not self._is_behind:
            return
        self.host_pid, self.segments = host_pid, merged
        self._is_behind = True
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps({"host_pid": host_pid, "segments": sorted(merged)}))
        temporary.replace(self._path)
        self._is_behind = False


def segments_mapped_by(pids: Iterable[int]) -> set[str]:
    """Names of the segments in /dev/shm that these processes have mapped and that Triton's Python backend, PyTriton or
    Python's multiprocessing (used by vLLM) created."""
    names: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process may have ended
            names.update(match.decode() for match in _SEGMENT.findall(Path(f"/proc/{pid}/maps").read_bytes()))
    return names


def kill_group(group: int) -> set[str]:
    """Kill a process group. Returns the names of the segments that its processes had mapped; see
    `segments_mapped_by`."""
    members = [pid for pid, stat in process_stats() if stat.group == group]
    segments = segments_mapped_by(members)
    _kill(members)
    with contextlib.suppress(ProcessLookupError):  # processes that the members started meanwhile
        os.killpg(group, signal.SIGKILL)
    return segments


def sweep_replica(directory: Path, more_segments: Iterable[str] = ()) -> list[str]:
    """Remove a replica's folder, empty folders of Triton's Python backend, and the replica's segments: the segments in
    the journal, the segments named after its host, and ``more_segments`` (names of files in /dev/shm). The replica's
    processes must have ended.

    Returns descriptions of the segments and the folder that could not be removed; empty if all were removed.
    """
    journal = Journal(directory)
    segments = {SHARED_MEMORY / name for name in (*journal.segments, *more_segments)}
    if journal.host_pid:
        segments.update(SHARED_MEMORY.glob(f"headwater-{journal.host_pid}-*"))
    leftovers = []
    for folder in _backend_folders(directory):
        with contextlib.suppress(OSError):  # not empty, so not this replica's, or gone
            folder.rmdir()
    for segment in segments:
        try:
            segment.unlink(missing_ok=True)
        except OSError as error:
            leftovers.append(f"{segment}: {error.strerror}")
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        leftovers.append(str(directory))
    return leftovers


class ProcessStat(NamedTuple):
    """The name, state and relations of a process, from /proc/<pid>/stat."""

    name: str
    state: str
    """One letter, see proc(5)."""
    parent: int
    group: int
    session: int


def process_stat(pid: int) -> ProcessStat | None:
    """The current state of a process; None if the process doesn't exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(") ")
    fields = rest.split(maxsplit=4)
    return ProcessStat(name, fields[0], int(fields[1]), int(fields[2]), int(fields[3]))


def process_stats() -> Iterator[tuple[int, ProcessStat]]:
    """The id and the state of each process of the machine."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := process_stat(int(entry))) is not None:
            yield int(entry), stat


def _end_strays(directory: Path) -> set[str]:
    """Kill the remaining processes of a replica after its guardian and supervisor were killed: a Triton without a host
    (its command line names the folder), processes of a vLLM (the folder is their working folder), and processes that
    have the folder in their environment.

    Returns the names of the segments that they had mapped.
    """
    segments: set[str] = set()
    group = Journal(directory).host_pid
    deadline = time.monotonic() + STRAYS_TIMEOUT_S
    while strays := [
        pid
        for pid, stat in process_stats()
        if (stat.group == group and _is_of(pid, directory)) or _has_in_environment(pid, directory)
    ]:
        segments |= segments_mapped_by(strays)
        _kill(strays)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return segments


def _is_of(pid: int, directory: Path) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return f"{directory}/".encode() in command or Path(f"/proc/{pid}/cwd").readlink() == directory.resolve()
    except OSError:
        return False


def _has_in_environment(pid: int, directory: Path) -> bool:
    """Whether a process inherited the replica's TMPDIR."""
    try:
        return f"\0TMPDIR={directory}/tmp\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # the process has ended, or belongs to another user
        return False


def _kill(pids: Collection[int]) -> None:
    """Kill processes, the resource trackers of Python's `multiprocessing` last: once the other processes have ended, a
    tracker removes the segments that they shared, including segments that no journal has, and then ends."""
    trackers = {pid for pid in pids if _is_tracker(pid)}
    for pid in pids:
        if pid not in trackers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TRACKERS_TIMEOUT_S
    while any(map(_runs, trackers)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    for pid in filter(_runs, trackers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _runs(pid: int) -> bool:
    stat = process_stat(pid)
    return stat is not None and stat.state not in "ZX"


def _backend_folders(directory: Path) -> list[Path]:
    """Folders that Triton's Python backend created for unpacked environments. They are empty: Headwater's models have
    no such environment.

    The backend removes its folder only at a graceful end. Only the time of creation, which lies within the replica's
    start, shows that a folder belongs to the replica. The empty folder of another replica that started at the same time
    is removed, too, which does no harm.
    """
    try:
        started_ns = (directory / "spec.json").stat().st_mtime_ns
    except FileNotFoundError:
        return []
    try:
        ready_ns = (directory / "ready").stat().st_mtime_ns
    except FileNotFoundError:
        ready_ns = time.time_ns()
    folders = []
    for folder in BACKEND_FOLDERS.glob("python_env_*"):
        with contextlib.suppress(OSError):
            folder_stat = folder.stat()
            if folder_stat.st_uid == os.getuid() and started_ns <= folder_stat.st_mtime_ns <= ready_ns:
                folders.append(folder)
    return folders


def make_instance_folder(parent: Path | None) -> tuple[Path, int]:
    """Create this server's folder (0700) and lock it. Returns the folder and the lock's descriptor; see
    `lock_instance_folder`.

    The folder is created in ``parent``; None: the system's folder for temporary files.
    """
    root = Path(parent or tempfile.gettempdir())
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"headwater-{os.getuid()}-", dir=root))
    return folder, lock_instance_folder(folder)


def lock_instance_folder(folder: Path) -> int:
    """Lock a server's folder, so that no `sweep_stale` removes it. Returns the descriptor of the lock, which is held
    until it is closed, or the process ends."""
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


def sweep_stale(parent: Path | None) -> list[Path]:
    """Sweep the folders of this user's servers that ended without sweeping, and end the processes that remain of their
    replicas. Returns these folders.

    For ``parent`` see `make_instance_folder`.
    """
    folders = []
    for folder in sorted(Path(parent or tempfile.gettempdir()).glob(f"headwater-{os.getuid()}-*")):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # the folder is being created, or is not Headwater's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            folders.append(folder)
            for replica in folder.iterdir():
                if (replica / _JOURNAL).exists():
                    sweep_replica(replica, _end_strays(replica))
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
    return folders
