"""The servers that benchmarks start, and a look at their processes: what they use, where they may run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.servers import free_port, running

__all__ = [
    "ONE_THREAD",
    "ROOT",
    "Server",
    "command_of",
    "cpu_s",
    "headwater",
    "kill_replica",
    "pin",
    "pin_replica",
    "replica_groups",
    "resident_bytes",
    "served",
    "tree",
]

ROOT = Path(__file__).parents[1]
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    url: str
    pid: int
    folder: Path
    """Its own; of Headwater, the ``runtime_dir`` lies in it."""


@contextlib.contextmanager
def served(
    command: Sequence[str],
    port: int,
    folder: Path,
    ready_path: str = "/v2/health/ready",
    environment: Mapping[str, str] = {},
) -> Iterator[Server]:
    """Run a server until the block ends; the block starts when it says at ``ready_path`` that it is ready.

    Args:
        command: starts the server.
        port: of its HTTP.
        folder: gets its log.
        ready_path: answers 200 when the server is ready.
        environment: further variables.

    Raises:
        RuntimeError: it ended or wasn't ready in time; the message has the end of what it wrote.
    """
    url = f"http://127.0.0.1:{port}"
    # Replicas find `benchmarks.fanout_models` there.
    with running(
        command, url + ready_path, cwd=ROOT, environment={**ONE_THREAD, **environment}, log=folder / "log"
    ) as pid:
        yield Server(url, pid, folder)


@contextlib.contextmanager
def headwater(deployments: dict[str, Any], **sections: Any) -> Iterator[Server]:
    """Run ``headwater serve`` with these deployments until the block ends; all are ready when it starts.

    Args:
        deployments: by name.
        sections: others of the configuration.
    """
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder, port = Path(name), free_port()
        path = folder / "config.yaml"
        listens = {"port": port, "runtime_dir": str(folder / "run")}
        path.write_text(yaml.safe_dump({"server": listens, "deployments": deployments, **sections}))
        with served([sys.executable, "-m", "headwater_server", "serve", str(path)], port, folder) as server:
            yield server


def cpu_s(server: Server) -> float:
    """Processor time, in seconds, that a server's processes have used so far."""
    ticks = 0
    for pid in tree(server.pid):
        with contextlib.suppress(OSError):  # it may end meanwhile
            fields = _stat(pid)
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident_bytes(server: Server) -> int:
    """Memory that a server's gateway workers have."""
    pages = sum(
        int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        for pid in tree(server.pid)
        if b"headwater_server.gateway.worker" in command_of(pid)
    )
    return pages * os.sysconf("SC_PAGE_SIZE")


def pin_replica(server: Server, deployment: str, core: int) -> None:
    """Let all threads of a deployment's replica run on one core only; threads that they start inherit it."""
    folder = str(_replica_folder(server, deployment)).encode()
    named = [pid for pid in tree(server.pid) if folder in command_of(pid)]
    # What these started belongs to them too, though it may not be named after the folder.
    pin({member for root in named for member in tree(root)}, {core})


def pin(pids: Iterable[int], cores: set[int]) -> None:
    """Let all threads of these processes run on these cores only; threads that they start inherit it."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it may end meanwhile
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cores)


def kill_replica(server: Server, deployment: str) -> None:
    """Kill the process of a deployment's replica that runs the callable."""
    os.kill(_host_pid(_replica_folder(server, deployment)), signal.SIGKILL)


def replica_groups(server: Server, deployment: str | None = None) -> list[int]:
    """The process groups of a deployment's replicas, or of all, oldest first."""
    found = []
    for path in sorted(_replica_folders(server, deployment), key=_age):
        with contextlib.suppress(FileNotFoundError):  # it may end meanwhile, or has not begun yet
            found.append(_host_pid(path))
    return found


def _host_pid(folder: Path) -> int:
    """Of the process that runs the callable, which leads its replica's group."""
    return int(json.loads((folder / "journal.json").read_text())["host_pid"])


def _replica_folder(server: Server, deployment: str) -> Path:
    """The folder of the deployment's newest replica."""
    found = _replica_folders(server, deployment)
    if not found:
        raise RuntimeError(f"no replica of deployment {deployment!r}")
    return max(found, key=_age)


def _replica_folders(server: Server, deployment: str | None) -> list[Path]:
    found = []
    for path in (server.folder / "run").glob("headwater-*/r*/spec.json"):
        with contextlib.suppress(FileNotFoundError):
            if deployment in (None, json.loads(path.read_text())["name"]):
                found.append(path.parent)
    return found


def _age(folder: Path) -> int:
    """The later a replica was started, the higher."""
    return int(folder.name[1:])


def tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def command_of(pid: int) -> bytes:
    """A process's command line, as the kernel gives it; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third on: what stands before may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
