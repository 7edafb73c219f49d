"""Load by wrk: closed loop, a number of connections, one body or several in turn."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Load", "run_wrk"]

_SCRIPT = """
wrk.method = "POST"
%s
local function read(number)
  local file = io.open("%s/body" .. number, "rb")
  local body = file:read("*a")
  file:close()
  return body
end
local count = %d
if count == 1 then
  wrk.body = read(0)
else
  local requests, turn = {}, -1
  init = function(args)
    for number = 0, count - 1 do
      requests[number] = wrk.format(nil, nil, nil, read(number))
    end
  end
  request = function()
    turn = (turn + 1) %% count
    return requests[turn]
  end
end
%s
done = function(summary, latency, requests)
  io.write(string.format(
    '\\nRESULT {"requests": %%d, "seconds": %%f, "p50_ms": %%f, "p99_ms": %%f, ' ..
    '"status_errors": %%d, "socket_errors": %%d}\\n',
    summary.requests, %s, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    summary.errors.status,
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.timeout))
end
"""


_TO_LAST_ANSWER = """
local ffi = require("ffi")
ffi.cdef("typedef struct { long s, us; } moment; int gettimeofday(moment *, void *);")
local function now()
  local moment = ffi.new("moment")
  ffi.C.gettimeofday(moment, nil)
  return tonumber(moment.s) + tonumber(moment.us) / 1e6
end
local worker
began = now()
setup = function(thread) worker = thread end
response = function() ended = now() end
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


def run_wrk(
    url: str,
    body: bytes | Sequence[bytes],
    connections: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    to_last_answer: bool = False,
) -> Load:
    """Send one body, or several in turn, again and again over some connections, each waiting for its answer.

    Args:
        url: where to post to.
        body: one, or all of them.
        connections: how many.
        seconds: how long, whole ones.
        headers: of the requests; none: that the body is JSON.
        to_last_answer: count the seconds up to the last answer, not to the end.

    Raises:
        RuntimeError: wrk isn't installed, or found no answer.
    """
    wrk = shutil.which("wrk")
    if wrk is None:
        raise RuntimeError("wrk isn't installed; on Debian: apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder:
        bodies = [body] if isinstance(body, bytes) else body
        for number, one in enumerate(bodies):
            (Path(folder) / f"body{number}").write_bytes(one)
        named = {"Content-Type": "application/json"} if headers is None else headers
        lines = "\n".join(f'wrk.headers["{name}"] = "{value}"' for name, value in named.items())
        script = Path(folder) / "script.lua"
        seconds_of = 'worker:get("ended") - worker:get("began")' if to_last_answer else "summary.duration / 1e6"
        hooks = _TO_LAST_ANSWER if to_last_answer else ""
        script.write_text(_SCRIPT % (lines, folder, len(bodies), hooks, seconds_of))
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
