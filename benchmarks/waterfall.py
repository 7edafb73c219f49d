"""Where a request's time goes: one request at a time through Headwater, and the same through tritonserver alone.

``python -m benchmarks.waterfall [--requests N] [--rounds N] [--smoke]``. The model is ``scale``, a row of four numbers,
JSON, one connection. `benchmarks/marks` notes the monotonic clock, which all processes share, where a request enters
and leaves a process and a model; a mark takes about a microsecond. tritonserver runs the same model in its own Python
backend, with the wheel that Headwater uses (`benchmarks.peers.native_server`). Rounds alternate between both.

Prints for each server the median time of each step, over all requests of all rounds, and what the median request took
with and without the marks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from benchmarks.marks.sitecustomize import MARK, PLACES
from benchmarks.servers import free_port, running
from benchmarks.smoke import parse_with_smoke

MARKS: Final = Path(__file__).parent / "marks"
VALUES: Final = [1.0, 2.0, 3.0, 4.0]
BODY: Final = json.dumps(
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, len(VALUES)], "data": VALUES}]}
).encode()
WARM_UP: Final = 200
"""Requests before the first round, for each server."""
TIMEOUT_S: Final = 30.0


class Server(NamedTuple):
    """A server that answers."""

    connection: socket.socket
    request: bytes
    folder: Path | None
    """With the files of its marks; None: it makes none."""


class Request(NamedTuple):
    """When a request was sent, and when its answer was complete, in nanoseconds."""

    sent_ns: int
    answered_ns: int


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200, help="a server, in each round")
    parser.add_argument("--rounds", type=int, default=10)
    options = parse_with_smoke(parser, requests=5, rounds=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the servers are ended
    with contextlib.ExitStack() as stack:
        servers: dict[str, tuple[Server, Server]] = {
            name: (stack.enter_context(start(marked=True)), stack.enter_context(start(marked=False)))
            for name, start in (("Headwater", _headwater), ("tritonserver", _native))
        }
        requests: dict[Server, list[Request]] = {server: [] for pair in servers.values() for server in pair}
        for server in requests:
            for _ in range(WARM_UP if not options.smoke else 1):
                _ask(server)
        for _ in range(options.rounds):
            for server, asked in requests.items():
                asked += [_ask(server) for _ in range(options.requests)]
        for name, (marked, plain) in servers.items():
            assert marked.folder is not None
            steps = waterfall(requests[marked], _read(marked.folder))
            _print(name, requests[marked], requests[plain], steps)
            if not steps:
                sys.exit(f"{name}: no request passed its places")


def waterfall(requests: Sequence[Request], marks: Mapping[str, Sequence[int]]) -> list[tuple[str, float]]:
    """The places that requests pass, each with the median time since the client sent the request, in microseconds.

    Args:
        requests: one after the other.
        marks: times in nanoseconds, ascending, by place.
    """
    found = []
    for place, times in marks.items():
        since = []
        at = 0
        for request in requests:
            while at < len(times) and times[at] < request.sent_ns:
                at += 1
            if at < len(times) and times[at] <= request.answered_ns:
                since.append((times[at] - request.sent_ns) / 1e3)
        if len(since) > len(requests) / 2:
            found.append((place, statistics.median(since)))
    return sorted(found, key=lambda step: step[1])


def _read(folder: Path) -> dict[str, list[int]]:
    """All processes' marks: their times by place, ascending."""
    times: dict[str, list[int]] = {place: [] for place in PLACES}
    for file in folder.iterdir():
        for number, at_ns in MARK.iter_unpack(file.read_bytes()):
            if not number:
                break
            times[PLACES[number - 1]].append(at_ns)
    return {place: sorted(found) for place, found in times.items()}


def _print(name: str, marked: Sequence[Request], plain: Sequence[Request], steps: Sequence[tuple[str, float]]) -> None:
    total, without = (
        statistics.median((request.answered_ns - request.sent_ns) / 1e3 for request in asked)
        for asked in (marked, plain)
    )
    print(f"\n{name}: p50 {total:.0f} us, without marks {without:.0f} us, {len(marked)} requests\n")
    print("      at   step")
    before = 0.0
    for place, at in (*steps, ("the client has the answer", total)):
        print(f"{at:5.0f} us {at - before:+5.0f}  {place}")
        before = at


@contextlib.contextmanager
def _headwater(*, marked: bool) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "headwater_server", "serve", "headwater.zoo.scale:Scale", "--port", str(port)]
    with _folder(marked=marked) as (folder, environment):
        url = f"http://127.0.0.1:{port}/v2/health/ready"
        with running(command, url, environment=environment), _connected(port) as connection:
            yield Server(connection, _request("scale"), folder)


@contextlib.contextmanager
def _native(*, marked: bool) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.peers.native_server", "scale-4", str(port), str(free_port())]
    with _folder(marked=marked) as (folder, environment):
        url = f"http://127.0.0.1:{port}/v2/health/ready"
        with running(command, url, environment=environment), _connected(port) as connection:
            yield Server(connection, _request("scale-4"), folder)


@contextlib.contextmanager
def _folder(*, marked: bool) -> Iterator[tuple[Path | None, dict[str, str]]]:
    """A folder for the marks, and the environment of the server that makes them."""
    with TemporaryDirectory(prefix="hw-") as name:
        if marked:
            yield Path(name), {"PYTHONPATH": str(MARKS), "HEADWATER_MARKS": name}
        else:
            yield None, {}


@contextlib.contextmanager
def _connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connection


def _request(model: str) -> bytes:
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY


def _ask(server: Server) -> Request:
    """Send a request and wait for its answer, which must be right."""
    sent_ns = time.monotonic_ns()
    server.connection.sendall(server.request)
    answer = b""
    while not _is_complete(answer):
        piece = server.connection.recv(65536)
        if not piece:
            raise RuntimeError(f"expected an answer, got the end of the connection after {answer!r}")
        answer += piece
    answered_ns = time.monotonic_ns()
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"expected an answer of 200, got {answer!r}")
    got = json.loads(body)["outputs"][0]["data"]
    if got != [2 * value for value in VALUES]:
        raise RuntimeError(f"expected twice {VALUES}, got {got}")
    return Request(sent_ns, answered_ns)


def _is_complete(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(body) >= int(value)
    raise RuntimeError(f"expected a content-length, got {head!r}")


if __name__ == "__main__":
    main()
