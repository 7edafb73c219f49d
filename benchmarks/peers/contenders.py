"""How each contender is started, and where it is asked."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fanout_servers import ROOT, Server, headwater, served, tree
from benchmarks.peers.environments import PEER_ENVIRONMENTS
from benchmarks.peers.scenarios import UNARY, deployment
from benchmarks.peers.work import FOLDER_SCENARIOS, SCALINGS, path_of
from benchmarks.servers import free_port

__all__ = ["GRPC", "OURS", "PEERS", "Peer", "Running", "ask", "first_answer", "start", "stopped"]

OURS = "headwater"
GRPC = "triton-grpc"
ANSWER_TIMEOUT_S = 60.0
_NOT_YET = (404, 503)
"""What some answer while their model loads."""


@dataclass(frozen=True)
class Peer:
    """A contender that is not Headwater."""

    name: str
    environment: str
    module: str
    ready_path: str
    scenarios: Sequence[str]
    answers_lists: bool = False
    """Whether it wraps an answer in a list."""
    is_kserve: bool = False
    """Whether binary tensors travel as the KServe protocol's extension says; otherwise they are the whole body."""
    may_be_stopped: bool = True
    """Whether its processes survive being stopped while others are measured."""
    arguments: Sequence[str] = ()
    """Of its module, after the scenario and the port."""


_MODELS = {"PYTHONPATH": str(ROOT / "inference")}
"""For the models that contenders share: a peer's environment has their requirements, but not `headwater`."""
_JSON = ("scale", "text", "mixed", "fanout")
_BINARY = tuple(name for name, scaling in SCALINGS.items() if scaling.is_binary)
"""Numbers as bytes, which only the KServe protocol has a form for."""
_BARE_BYTES = tuple(name for name in UNARY if name not in _BINARY)
PEERS = (
    Peer(
        "triton-native",
        "pytriton",
        "native_server",
        "/v2/models/{scenario}/ready",
        tuple(SCALINGS),
        is_kserve=True,
        may_be_stopped=False,
    ),
    Peer(
        "triton-http",
        "pytriton",
        "pytriton_server",
        "/v2/models/{scenario}/ready",
        UNARY,
        is_kserve=True,
        may_be_stopped=False,
    ),
    Peer("mosec", "mosec", "mosec_server", "/", (*_BARE_BYTES, *FOLDER_SCENARIOS, "streams")),
    Peer("litserve", "litserve", "litserve_server", "/health", (*_JSON, *FOLDER_SCENARIOS, "streams")),
    Peer("fastapi", "fastapi", "fastapi_server", "/health", (*_BARE_BYTES, "streams")),
    Peer("uvicorn-ceiling", "fastapi", "asgi_server", "/", tuple(SCALINGS.keys() - {*_BINARY})),
    Peer("ray-serve", "ray", "ray_server", "/-/healthz", ("scale", "text")),
    Peer("ray-serve-proxy", "ray", "ray_server", "/-/healthz", ("scale", "text"), arguments=("proxy",)),
    Peer("bentoml", "bentoml", "bentoml_server", "/readyz", ("scale", "text"), answers_lists=True),
)


@dataclass(frozen=True)
class Running:
    """A contender that answers."""

    name: str
    server: Server
    url: str
    """Of the scenario."""
    peer: Peer | None = None
    """None: Headwater."""
    grpc_port: int = 0

    @property
    def is_kserve(self) -> bool:
        return self.peer is None or self.peer.is_kserve

    @property
    def answers_lists(self) -> bool:
        return self.peer is not None and self.peer.answers_lists


@contextlib.contextmanager
def start(peer: Peer | None, scenario: str) -> Iterator[Running]:
    """Run a contender with a scenario's model until the block ends; it is ready when the block starts.

    Raises:
        RuntimeError: it did not start.
    """
    if peer is None:
        path = "/v1/completions" if scenario == "streams" else path_of(scenario)
        with headwater({scenario: deployment(scenario)}) as server:
            yield Running(OURS, server, server.url + path)
        return
    port, grpc_port = free_port(), free_port() if peer.is_kserve else 0
    command = [
        str(PEER_ENVIRONMENTS.python_of(peer.environment)),
        "-m",
        f"benchmarks.peers.{peer.module}",
        scenario,
        str(port),
        *peer.arguments,
    ]
    if grpc_port:
        command.append(str(grpc_port))
    with (
        tempfile.TemporaryDirectory(prefix="hw-") as folder,
        served(command, port, Path(folder), peer.ready_path.format(scenario=scenario), _MODELS) as server,
    ):
        yield Running(peer.name, server, server.url + path_of(scenario), peer, grpc_port)


def first_answer(running: Running, body: bytes, headers: dict[str, str]) -> bytes:
    """Ask until there is an answer: some say that they are ready before they are.

    Raises:
        RuntimeError: there is none in time.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while True:
        try:
            return ask(running, body, headers)
        except (urllib.error.URLError, OSError) as error:
            told, is_final = "", False
            if isinstance(error, urllib.error.HTTPError):
                told, is_final = repr(error.read()[:300]), error.code not in _NOT_YET
            if is_final or time.monotonic() > deadline:
                why = f"no answer: {error} {told}"
                raise RuntimeError(f"{running.name}: {why}") from None
            time.sleep(0.2)


def ask(running: Running, body: bytes, headers: dict[str, str]) -> bytes:
    """One answer."""
    request = urllib.request.Request(running.url, body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


@contextlib.contextmanager
def stopped(others: Sequence[Running]) -> Iterator[None]:
    """While the block runs, the processes of the others that may be stopped are, so that they use no processor."""
    pids = [pid for one in others if one.peer and one.peer.may_be_stopped for pid in tree(one.server.pid)]
    _signal(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
