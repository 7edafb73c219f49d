"""What a server costs that nobody asks anything, and what streams and connections cost on which nothing happens.

``python -m benchmarks.idle [CONFIG] [--seconds S] [--streams N] [--connections N] [--rounds N]
[--part server|streams|connections] [--smoke]``: starts the
configuration (configs/demo.yaml), waits until it is ready, and prints for each process its share of a core, and its
memory; the goal is gateway and supervisor together under 1 % of a core. Then opens N streams of a model that waits, and
N of a language model between two tokens, and prints what each added to the memory of each kind of process. PSS counts
what processes share in parts, so that its sum is right; of a stream only what is of no file counts, since the share in
those changes with every other process that has them open. Last come N connections to `scale` that had one answer each:
what they added, and in alternating rounds the requests/s of other connections with them open and without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.gateway import BODY, MODEL, PATH
from benchmarks.idle_model import MANY_TOKENS
from benchmarks.load import run_wrk
from benchmarks.servers import free_port, gateway, running

__all__ = ["Use", "uses"]

DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
RESULTS = Path(__file__).parent / "results" / "idle.json"
ROLES = {
    "headwater_server.gateway.worker": "gateway worker",
    "headwater_server.process.guardian": "guardian",
    "headwater.replica": "replica",
    "headwater_server serve": "supervisor",
    "triton_python_backend_stub": "Triton's stub",
    "tritonserver": "Triton",
    "multiprocessing": "PyTriton's tensor store",
}
OURS = ("gateway worker", "supervisor")
SETTLE_S = 3.0
STREAM_TIMEOUT_S = 60.0
CONNECTION_SECONDS = 3


class Use(NamedTuple):
    """One process."""

    role: str
    deployment: str
    cpu_s: float
    resident_bytes: int
    proportional_bytes: int
    anonymous_bytes: int
    """Of the latter, what is of no file."""


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default=str(DEMO))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of wrk's runs, with and without the connections")
    parser.add_argument("--part", choices=("server", "streams", "connections", "all"), default="all")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    seconds, streams = (2.0, 20) if options.smoke else (options.seconds, options.streams)
    found: dict[str, Any] = {}
    if options.part in ("server", "all"):
        found["server"] = _server(options.config, seconds)
    if options.part in ("streams", "all"):
        found |= _all_streams(streams)
    if options.part in ("connections", "all"):
        found["connections"] = _connections(*((50, 1) if options.smoke else (options.connections, options.rounds)))
    if not options.smoke:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(found, indent=1))
        print(f"raw figures: {RESULTS}")


def _all_streams(streams: int) -> dict[str, Any]:
    found = {}
    for name, body in _stream_bodies().items():
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "idle.yaml"
            config.write_text(yaml.safe_dump(_stream_config(name, streams)))
            with _serving(str(config)) as port:  # one that has had no others, whose memory would do for these
                found[name] = _streams(port, name, body, streams)
    return found


def _server(config: str, seconds: float) -> list[dict[str, Any]]:
    with _serving(config):
        time.sleep(SETTLE_S)
        before = uses(os.getpid())
        began_s = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began_s
        after = uses(os.getpid())
    print(f"{'process':<26} {'of':<12} {'CPU %':>7} {'RSS MB':>8} {'PSS MB':>8}   over {took_s:.0f} s")
    rows = []
    for pid, use in sorted(after.items(), key=lambda item: (item[1].deployment, item[1].role)):
        if pid in before:
            share = 100 * (use.cpu_s - before[pid].cpu_s) / took_s
            rows.append({**use._asdict(), "cpu_percent": share})
            memory = f"{_mb(use.resident_bytes)} {_mb(use.proportional_bytes)}"
            print(f"{use.role:<26} {use.deployment:<12} {share:>7.2f} {memory}")
    ours = sum(row["cpu_percent"] for row in rows if row["role"] in OURS)
    print(f"gateway and supervisor: {ours:.2f} % of a core; all: {sum(row['cpu_percent'] for row in rows):.2f} %")
    print(f"all together: {sum(row['proportional_bytes'] for row in rows) / 1e6:.0f} MB PSS\n")
    return rows


def _streams(port: int, name: str, body: bytes, count: int) -> dict[str, float]:
    """What idle streams add to the memory of each role."""
    head = f"POST /v2/models/{name}/generate_stream HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    with contextlib.ExitStack() as stack:
        for _ in range(10):  # what only the first ones need
            stack.enter_context(_open(port, request))
        time.sleep(SETTLE_S)
        before = uses(os.getpid())
        for _ in range(count):
            stack.enter_context(_open(port, request))
        time.sleep(SETTLE_S)
        after = uses(os.getpid())
    added: dict[str, float] = {}
    for pid, use in after.items():
        if pid in before:
            grown = use.anonymous_bytes - before[pid].anonymous_bytes
            added[use.role] = added.get(use.role, 0) + grown / count / 1000
    parts = ", ".join(f"{role} {size_kb:.1f}" for role, size_kb in added.items() if size_kb >= 0.1)
    print(f"{count} idle streams of {name}: {sum(added.values()):.1f} KB each ({parts})")
    return added


def _connections(count: int, rounds: int) -> dict[str, Any]:
    """What idle connections add to the worker's memory, and what they cost other connections."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    head = f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(BODY)}\r\n\r\n"
    rates: dict[str, list[float]] = {"with": [], "without": []}
    added: list[float] = []
    with gateway(MODEL, f"server.max_connections={count + 1000}") as url:
        port = int(url.rpartition(":")[2])
        run_wrk(url + PATH, BODY, 64, 3)  # warm
        for _ in range(rounds):
            rates["without"].append(run_wrk(url + PATH, BODY, 64, CONNECTION_SECONDS).per_s)
            before = _worker_bytes()
            with contextlib.ExitStack() as stack:
                for _ in range(count):
                    stack.enter_context(_answered(port, head.encode() + BODY))
                added.append((_worker_bytes() - before) / count / 1000)
                rates["with"].append(run_wrk(url + PATH, BODY, 64, CONNECTION_SECONDS).per_s)
    # Later connections get the memory that the first ones left.
    print(f"{count} idle connections: {added[0]:.1f} KB each of the gateway worker")
    ratios = [ours / other for ours, other in zip(rates["with"], rates["without"], strict=True)]
    print(
        f"requests/s with them open / without, {rounds} pairs: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}); {statistics.median(rates['with']):,.0f} and "
        f"{statistics.median(rates['without']):,.0f}"
    )
    return {"kb_each": added, "requests_per_s": rates}


def _worker_bytes() -> int:
    return next(use.anonymous_bytes for use in uses(os.getpid()).values() if use.role == "gateway worker")


@contextlib.contextmanager
def _answered(port: int, request: bytes) -> Iterator[None]:
    """A connection that has had an answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=STREAM_TIMEOUT_S) as connection:
        connection.sendall(request)
        got = connection.recv(65536)
        if b" 200 " not in got[:40]:
            raise SystemExit(f"a request was refused: {got!r}")
        yield


@contextlib.contextmanager
def _open(port: int, request: bytes) -> Iterator[None]:
    """A stream, once it has begun."""
    with socket.create_connection(("127.0.0.1", port), timeout=STREAM_TIMEOUT_S) as connection:
        connection.sendall(request)
        got = b""
        while b"\r\n\r\n" not in got or b"data:" not in got:
            more = connection.recv(65536)
            if not more:
                raise SystemExit(f"a stream ended: {got!r}")
            got += more
            if b" 200 " not in got[:40]:
                raise SystemExit(f"a stream was refused: {got!r}")
        yield


def _stream_config(name: str, streams: int) -> dict[str, Any]:
    more = streams + 50
    deployments = {
        "waiter": {
            "model": "benchmarks.idle_model:Waiter",
            "batching": {"max_in_flight": more, "max_queue_size": more},
            "timeout_s": 600,
        },
        "stalled": {
            "model": "lm:headwater.zoo:weights/tiny_lm",
            "options": {"engine": "benchmarks.idle_model:stalled_engine"},
            "timeout_s": 600,
        },
    }
    return {"server": {"max_connections": 20_000}, "deployments": {name: deployments[name]}}


def _stream_bodies() -> dict[str, bytes]:
    return {
        "waiter": json.dumps({"x": [1.0]}).encode(),
        "stalled": json.dumps({"text_input": "def idle():", "max_tokens": MANY_TOKENS, "ignore_eos": True}).encode(),
    }


@contextlib.contextmanager
def _serving(config: str) -> Iterator[int]:
    port = free_port()
    command = [sys.executable, "-m", "headwater_server", "serve", config, "--port", str(port)]
    with running(command, f"http://127.0.0.1:{port}/v2/health/ready"):
        yield port


def uses(root: int) -> dict[int, Use]:
    """All descendants of a process, by id."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry))
    found = {}
    waiting = children.get(root, [])
    while waiting:
        pid = waiting.pop()
        waiting += children.get(pid, [])
        with contextlib.suppress(OSError):
            found[pid] = _use(pid)
    return found


def _use(pid: int) -> Use:
    folder = Path("/proc", str(pid))
    command = _command(pid)
    role = next((role for mark, role in ROLES.items() if mark in command), command[:26])
    of = re.search(
        r"(?:headwater_server\.process\.guardian|headwater\.replica) (\S+)", command + _command(os.getpgid(pid))
    )
    # Nanoseconds, where /proc/PID/stat has hundredths of a second.
    cpu_ns = sum(int(task.read_text().split()[0]) for task in folder.glob("task/*/schedstat"))
    memory = {
        line.partition(":")[0]: int(line.split()[1]) * 1024
        for line in folder.joinpath("smaps_rollup").read_text().splitlines()
        if line.endswith("kB")
    }
    return Use(role, of[1] if of else "", cpu_ns / 1e9, memory["Rss"], memory["Pss"], memory["Pss_Anon"])


def _command(pid: int) -> str:
    return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:>8.1f}"


if __name__ == "__main__":
    main()
