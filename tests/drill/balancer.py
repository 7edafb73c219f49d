"""HAProxy in front of the pods. Its checks are their readiness probes."""

from __future__ import annotations

import contextlib
import csv
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.servers import free_port, stop
from tests.running import wait_for

CONFIGURATION = """
global
    stats socket {socket} mode 600 level admin
defaults
    mode tcp
    balance leastconn
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    # A connection that is refused has carried nothing yet, so another pod gets it.
    retries 3
    option redispatch 1
frontend clients
    bind 127.0.0.1:{port}
    default_backend pods
backend pods
    option httpchk GET /v2/health/ready
    http-check expect status 200
    timeout check {check_ms}
    default-server check inter {check_ms} fall {fall} rise 1 init-addr last
"""


@dataclass(frozen=True)
class Place:
    """What HAProxy knows of the pod in a place."""

    is_up: bool
    connections: int
    """Open now."""
    opened: int
    """Connections in all, the closed ones included."""


class Balancer:
    """HAProxy; see `balancer`."""

    def __init__(self, port: int, pods: Sequence[int], socket_path: Path) -> None:
        self.port = port
        self.pods = pods
        """The port of each place for a pod."""
        self._socket = socket_path

    def places(self) -> list[Place]:
        """The state of each place."""
        rows = csv.DictReader(self._ask("show stat").removeprefix("# ").splitlines())
        found = {row["svname"]: row for row in rows if row["pxname"] == "pods"}
        names = [f"pod{index}" for index in range(len(self.pods))]
        return [
            Place(row["status"].startswith("UP"), int(row["scur"]), int(row["stot"]))
            for row in map(found.__getitem__, names)
        ]

    def set_state(self, place: int, state: str) -> None:
        """``drain``: no new connections; ``ready``: by the checks again."""
        answer = self._ask(f"set server pods/pod{place} state {state}").strip()
        assert not answer, answer

    def wait_until_up(self, place: int, timeout_s: float = 120.0) -> None:
        """Wait until a pod gets connections."""
        wait_for(lambda: self.places()[place].is_up, timeout_s, f"HAProxy to use the pod in place {place}")

    def _ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@contextlib.contextmanager
def balancer(folder: Path, places: int, check_s: float, failures: int) -> Iterator[Balancer]:
    """Run HAProxy until the block ends.

    Args:
        folder: for its configuration and socket.
        places: for so many pods, each with a port of its own.
        check_s: from one check to the next, and how long one may take.
        failures: checks in a row after which a pod gets no new connections.
    """
    command = shutil.which("haproxy")
    if command is None:
        raise FileNotFoundError("haproxy: expected it on PATH, found none; on Debian: apt-get install haproxy")
    port, *pods = {free_port() for _ in range(places + 1)}
    socket_path, path = folder / "haproxy.sock", folder / "haproxy.cfg"
    text = CONFIGURATION.format(socket=socket_path, port=port, check_ms=round(check_s * 1000), fall=failures)
    text += "".join(f"    server pod{index} 127.0.0.1:{pod}\n" for index, pod in enumerate(pods))
    path.write_text(text)
    process = subprocess.Popen([command, "-db", "-q", "-f", str(path)])
    try:
        wait_for(socket_path.exists, 10, "HAProxy's socket")
        yield Balancer(port, pods, socket_path)
    finally:
        stop(process)
