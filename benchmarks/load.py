"""Load by wrk: closed loop, a number of connections, one body."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Load", "run_wrk"]

_SCRIPT = """
wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local file = io.open("%s", "rb")
wrk.body = file:read("*a")
file:close()
done = function(summary, latency, requests)
  io.write(string.format(
    '\\nRESULT {"requests": %%d, "seconds": %%f, "p50_ms": %%f, "p99_ms": %%f, ' ..
    '"status_errors": %%d, "socket_errors": %%d}\\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout))
end
"""


@dataclass(frozen=True)
class Load:
    """What one run of wrk found."""

    requests: int
    seconds: float
    p50_ms: float
    p99_ms: float
    status_errors: int
    """Answers of status 400 and above."""
    socket_errors: int

    @property
    def per_s(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def run_wrk(url: str, body: bytes, connections: int, seconds: float) -> Load:
    """Send one body again and again over some connections, each waiting for its answer.

    Raises:
        RuntimeError: wrk isn't installed, or found no answer.
    """
    wrk = shutil.which("wrk")
    if wrk is None:
        raise RuntimeError("wrk isn't installed; on Debian: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        payload = Path(folder) / "body"
        payload.write_bytes(body)
        script = Path(folder) / "script.lua"
        script.write_text(_SCRIPT % payload)
        output = subprocess.run(
            [wrk, "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s", "-s", script, url],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    for line in output.splitlines():
        if line.startswith("RESULT "):
            return Load(**json.loads(line[len("RESULT ") :]))
    raise RuntimeError(f"wrk said nothing of use:\n{output}")
