"""The servers that benchmarks start, and a look at their processes: what they use, where they may run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.servers import free_port, running

__all__ = [
    "ONE_THREAD",
    "Server",
    "command_of",
    "cpu_s",
    "headwater",
    "kill_replica",
    "pin_replica",
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
def served(command: Sequence[str], port: int, folder: Path, ready_path: str = "/v2/health/ready") -> Iterator[Server]:
    """Run a server until the block ends; the block starts when it says at ``ready_path`` that it is ready.

    Raises:
        RuntimeError: it ended or wasn't ready in time; the message has the end of what it wrote.
    """
    url = f"http://127.0.0.1:{port}"
    # Replicas find `benchmarks.fanout_models` there.
    with running(command, url + ready_path, cwd=ROOT, environment=ONE_THREAD, log=folder / "log") as pid:
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
        with served([sys.executable, "-m", "app", "serve", str(path)], port, folder) as server:
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
        if b"app.gateway.worker" in command_of(pid)
    )
    return pages * os.sysconf("SC_PAGE_SIZE")


def pin_replica(server: Server, deployment: str, core: int) -> None:
    """Let all threads of a deployment's replica run on one core only; threads that they start inherit it."""
    folder = str(_replica_folder(server, deployment)).encode()
    named = [pid for pid in tree(server.pid) if folder in command_of(pid)]
    # What these started belongs to them too, though it may not be named after the folder.
    for pid in {member for root in named for member in tree(root)}:
        with contextlib.suppress(OSError):  # it may end meanwhile
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})


def kill_replica(server: Server, deployment: str) -> None:
    """Kill the process of a deployment's replica that runs the callable."""
    journal = json.loads((_replica_folder(server, deployment) / "journal.json").read_text())
    os.kill(int(journal["host_pid"]), signal.SIGKILL)


def _replica_folder(server: Server, deployment: str) -> Path:
    """The folder of the deployment's newest replica."""
    found = []
    for path in (server.folder / "run").glob("headwater-*/r*/spec.json"):
        with contextlib.suppress(FileNotFoundError):
            if json.loads(path.read_text())["name"] == deployment:
                found.append(path.parent)
    if not found:
        raise RuntimeError(f"no replica of deployment {deployment!r}")
    return max(found, key=lambda path: int(path.name[1:]))


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
