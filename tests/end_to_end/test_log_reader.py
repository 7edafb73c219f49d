"""A server whose standard error is a pipe that nobody reads any more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from benchmarks.servers import stop
from tests.running import SERVICES, wait_for

REQUESTS = 1500
LONG_PATH = "/v2/" + "x" * 8000
"""Its line in the access log is as long: some 600 fill the pipe and the queue behind it."""


class Deafened(NamedTuple):
    """A server, and the pipe that it logs to."""

    process: subprocess.Popen[bytes]
    log_fd: int
    client: httpx.Client

    def dropped_lines(self) -> int:
        """What ``/metrics`` says."""
        (line,) = re.findall(
            r"^headwater_log_lines_dropped_total (\d+)", self.client.get("/metrics").text, re.MULTILINE
        )
        return int(line)


@pytest.fixture
def deafened() -> Iterator[Deafened]:
    """Its standard output and error are one pipe, which is read until the address is known."""
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        fields = {"port": "0", "workers": "1", "runtime_dir": str(Path(name) / "run"), "log_format": "json"}
        settings = [part for field, value in fields.items() for part in ("--set", f"server.{field}={value}")]
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater_server", "serve", "light:Trunk", *settings],
            cwd=SERVICES, stdout=write_fd, stderr=write_fd, start_new_session=True,
        )  # fmt: skip
        os.close(write_fd)
        try:
            data = b""
            while (found := re.search(rb"listening on (http://[\d.:]+)", data)) is None:
                data += os.read(read_fd, 65536)
            with httpx.Client(base_url=found[1].decode(), timeout=60, trust_env=False) as client:
                yield Deafened(process, read_fd, client)
        finally:
            stop(process)
            os.close(read_fd)


def has_connection(client: httpx.Client) -> bool:
    try:
        return client.get("/v2/health/live").status_code == 200
    except httpx.TransportError:
        return False


def test_a_stalled_reader_of_the_log_stops_nothing(deafened: Deafened) -> None:
    client = deafened.client
    wait_for(lambda: has_connection(client), 120, "a worker")
    for _ in range(REQUESTS):
        assert client.get(LONG_PATH).status_code == 404
    assert client.get("/v2/health/live").status_code == 200
    wait_for(lambda: client.get("/v2/health/ready").status_code == 200, 300, "the model")
    dropped = wait_for(deafened.dropped_lines, what="dropped lines")
    assert dropped < REQUESTS
    data = b""
    while b"the log lacks" not in data:
        data += os.read(deafened.log_fd, 65536)
    assert re.search(rb'"dropped_lines":\d+', data)
    assert client.get("/v2/health/live").status_code == 200


def test_a_stalled_reader_does_not_keep_a_server_from_stopping(deafened: Deafened) -> None:
    client = deafened.client
    wait_for(lambda: has_connection(client), 120, "a worker")
    for _ in range(REQUESTS):
        client.get(LONG_PATH)
    deafened.process.terminate()
    assert deafened.process.wait(120) == 0
