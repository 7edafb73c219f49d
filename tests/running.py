"""Starts real servers for tests, and looks at what they leave behind."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.servers import stop

__all__ = [
    "SERVICES",
    "SHARED",
    "Gate",
    "Raw",
    "Running",
    "Shared",
    "in_background",
    "in_mount_namespace",
    "leaves_nothing",
    "leftovers",
    "processes_of",
    "resident_bytes",
    "segments_of",
    "serve",
    "wait_for",
]

SERVICES = Path(__file__).parent / "services"
START_TIMEOUT_S = 300.0
START_EVERY_S = 0.1
"""Between two looks at a server that starts: asking it costs what it would start with."""


def wait_for(
    condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "the condition", every_s: float = 0.02
) -> Any:
    """Wait until a condition gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(every_s)


class Gate:
    """A number that the services of `tests/services/faulty.py` wait at, rather than for a time that a test guesses.

    Args:
        folder: in which the two tell each other.
    """

    _values = itertools.count(10_000)

    def __init__(self, folder: Path) -> None:
        self.value = float(next(Gate._values))
        self._name = str(folder / f"{self.value:.0f}")

    def has_begun(self) -> bool:
        """Whether a call waits here, or has."""
        return Path(f"{self._name}.begun").exists()

    def open(self) -> None:
        """Let calls go on."""
        Path(f"{self._name}.open").touch()


class Running:
    """A server: the command line as a user starts it, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, log: Path) -> None:
        self.popen = process
        self.folder = folder
        """Its ``runtime_dir``."""
        self.log = log
        self.url = ""
        self.gates = log.with_name("gates")
        """The folder of `gate`."""
        # A connection each: a test must not meet one that an earlier test left in a bad state.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.Client(timeout=60, limits=limits, verify=False, trust_env=False)
        """For tests that ask from many threads too."""

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self.popen.pid

    @property
    def grpc_address(self) -> str:
        """Where it listens for gRPC, as it logs it."""
        found = re.search(r"listening for gRPC on (\S+?:\d+)", self.log.read_text())
        assert found is not None
        return found[1]

    def get(self, path: str) -> httpx.Response:
        """One GET."""
        return self.client.get(self.url + path)

    def infer(
        self, model: str, data: Any, *, shape: list[int], datatype: str = "FP32", name: str = "x", **body: Any
    ) -> httpx.Response:
        """One JSON request with one input."""
        tensor = {"name": name, "datatype": datatype, "shape": shape, "data": data}
        return self.client.post(f"{self.url}/v2/models/{model}/infer", json={"inputs": [tensor], **body})

    def gate(self) -> Gate:
        """Another one."""
        return Gate(self.gates)

    def raw(self) -> Raw:
        """A connection for bytes that no HTTP client would send."""
        return Raw(self.url)

    def index(self, model: str) -> dict[str, Any]:
        """The model's entry in the repository index."""
        entries: list[dict[str, Any]] = self.get("/v2/repository/index").json()
        return next(entry for entry in entries if entry["name"] == model)

    def in_flight(self, model: str) -> int:
        """How many requests to a model are under way, as ``/metrics`` says."""
        line = rf'^headwater_requests_in_flight\{{[^}}]*deployment="{model}"[^}}]*\}} (\S+)'
        return int(sum(float(value) for value in re.findall(line, self.get("/metrics").text, re.MULTILINE)))

    def is_ready(self, model: str | None = None) -> bool:
        """Whether the server, or one model, says it is ready."""
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        with contextlib.suppress(httpx.TransportError):
            return self.get(path).status_code == 200
        return False

    def replica_folders(self, model: str) -> list[Path]:
        """The folders of the model's replicas, oldest first."""
        found = []
        for path in self.folder.glob("headwater-*/r*/spec.json"):
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # it may end or begin meanwhile
                if json.loads(path.read_text())["name"] == model:
                    found.append(path.parent)
        return sorted(found, key=lambda path: int(path.name[1:]))

    def replica_folder(self, model: str) -> Path:
        """The folder of the model's newest replica."""
        return self.replica_folders(model)[-1]

    def replica_pid(self, model: str) -> int:
        """The process id of the model's host."""
        return int(json.loads((self.replica_folder(model) / "journal.json").read_text())["host_pid"])

    def process(self, model: str, what: str) -> int:
        """The process id of the model's ``host``, ``binder``, ``guardian``, ``tritonserver`` or ``stub``."""
        folder = self.replica_folder(model)
        for pid, command in processes_of(folder).items():
            if _role(command) == what:
                return pid
        raise AssertionError(f"no {what} in {folder}")

    def processes(self, model: str, what: str) -> list[int]:
        """The process ids of that part of each of the model's replicas; see `process`."""
        of_replicas = [processes_of(folder) for folder in self.replica_folders(model)]
        return [pid for found in of_replicas for pid, command in found.items() if _role(command) == what]

    def workers(self) -> list[int]:
        """The process ids of the gateway workers."""
        return [
            pid for pid, command in processes_of(self.folder).items() if "headwater_server.gateway.worker" in command
        ]

    def stop(self, timeout_s: float = 60.0) -> int:
        """Stop it as Ctrl-C does. Returns the exit status."""
        self.popen.send_signal(signal.SIGINT)
        return self.popen.wait(timeout_s)


class Raw:
    """One TCP connection to a server."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        host, _, port = url.removeprefix("http://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send all of it, however long that takes."""
        self.socket.sendall(data)

    def answer(self, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
        """Read one answer: status, headers in small letters, body."""
        response = http.client.HTTPResponse(self.socket, method=method)
        try:
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return response.status, headers, response.read()
        finally:
            response.close()


@contextlib.contextmanager
def in_background(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run the calls in a thread each while the block runs; at its end the list has what they gave, in order."""
    results: list[Any] = [None] * len(calls)

    def run(index: int, call: Callable[[], Any]) -> None:
        try:
            results[index] = call()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index, call)) for index, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    try:
        yield results
    finally:
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def serve(
    config: dict[str, Any],
    *,
    what: str = "",
    ready: bool = True,
    cwd: Path = SERVICES,
    arguments: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
) -> Iterator[Running]:
    """Run ``headwater serve`` on a free port, with the test services on the path, until the block ends.

    Args:
        config: the configuration; what it doesn't say of port and ``runtime_dir`` is a free one and a temporary one.
        what: what to serve in place of the configuration, but with its ``server``.
        ready: whether to wait for every model.
        cwd: where it runs.
        arguments: after the configuration's path.
        prefix: a command that runs ours.
    """
    # Not pytest's own folders: their names are too long for unix sockets.
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        path = folder / "config.yaml"
        content = {**config, "server": {"port": 0, "runtime_dir": str(folder / "run"), **config.get("server", {})}}
        path.write_text(yaml.safe_dump(content))
        if what:
            fields = [f"server.{name}={json.dumps(value)}" for name, value in content["server"].items()]
            arguments = (*arguments, *(part for field in fields for part in ("--set", field)))
        log, gates = folder / "log", folder / "gates"
        gates.mkdir()
        with log.open("w") as output:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "headwater_server", "serve", what or str(path), *arguments],
                cwd=cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                # `-m` would put the services' folder first, where a module could hide one of ours.
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "TEST_GATES": str(gates)},
            )
        running = Running(process, Path(content["server"]["runtime_dir"]), log)
        try:
            running.url = wait_for(lambda: _url(running), START_TIMEOUT_S, "the server's address", START_EVERY_S)
            if ready:
                wait_for(
                    lambda: running.is_ready() or _has_ended(running),
                    START_TIMEOUT_S,
                    "the server to be ready",
                    START_EVERY_S,
                )
            yield running
        except BaseException:
            sys.stderr.write(log.read_text()[-6000:])
            raise
        finally:
            running.client.close()
            stop(process)


def in_mount_namespace(mount: str) -> tuple[str, ...]:
    """A command that runs another in a mount namespace of its own, after mounting something there."""
    namespace = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    try:
        subprocess.run([*namespace, mount], check=True, capture_output=True, timeout=30)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system allows no mount namespaces")
    return (*namespace, f'{mount} && exec "$@"', "sh")


class Shared:
    """Servers for several modules, which must leave them as they found them."""

    def __init__(self) -> None:
        self._servers: dict[str, Running] = {}
        self._ends = contextlib.ExitStack()

    def server(self, name: str, config: dict[str, Any]) -> Running:
        """The server of that name, which is started when it is first asked for."""
        if name not in self._servers:
            self._servers[name] = self._ends.enter_context(leaves_nothing(config))
        return self._servers[name]

    def stop(self) -> None:
        """Stop those that run, and see that nothing of them is left."""
        self._servers.clear()
        self._ends.close()


SHARED = Shared()


@contextlib.contextmanager
def leaves_nothing(config: dict[str, Any]) -> Iterator[Running]:
    """Run a server until the block ends; stopped, it must leave nothing."""
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert segments
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def _has_ended(running: Running) -> bool:
    if running.popen.poll() is not None:
        raise AssertionError(f"the server ended with {running.popen.returncode}:\n{running.log.read_text()[-3000:]}")
    return False


def _url(running: Running) -> str:
    _has_ended(running)
    for line in running.log.read_text().splitlines():
        if "listening on " in line:
            return str(json.loads(line)["message"]).rpartition(" ")[2]
    return ""


def processes_of(folder: Path) -> dict[int, str]:
    """Process id and command line of every process that was started for a server or replica with this folder: its
    command line names the folder, or it is in the session of such a process."""
    commands = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                commands[int(entry.name)] = command
    named = re.compile(re.escape(str(folder)) + r"(?![\w-])")  # `slow-1` is no `slow-12`
    found = {pid: command for pid, command in commands.items() if named.search(command)}
    for pid, command in commands.items():
        with contextlib.suppress(OSError):
            if command and os.getsid(pid) in found:
                found[pid] = command
    return found


def _role(command: str) -> str:
    roles = {
        "headwater_server.process.guardian": "guardian",
        "headwater_server.binder": "binder",
        "headwater.replica": "host",
        "backend_stub": "stub",
        "bin/tritonserver": "tritonserver",
    }
    return next((role for word, role in roles.items() if word in command), "")


def segments_of(folder: Path) -> set[str]:
    """Names in /dev/shm that the processes of a server or replica have mapped."""
    names: set[str] = set()
    for pid in processes_of(folder):
        with contextlib.suppress(OSError):
            names.update(re.findall(r"/dev/shm/([^ \n]+)", Path(f"/proc/{pid}/maps").read_text()))
    return names


def leftovers(folder: Path, segments: set[str] | None = None) -> list[str]:
    """What is left of a server or replica: processes, files in its folder, and those of the segments that it had."""
    # Not `rglob`, which fails where files go while it looks.
    found = [str(Path(parent, name)) for parent, folders, files in os.walk(folder) for name in (*folders, *files)]
    found += [f"process {pid}: {command}" for pid, command in processes_of(folder).items()]
    found += [f"segment {name}" for name in segments or () if Path("/dev/shm", name).exists()]
    return found


def resident_bytes(pid: int) -> int:
    """A process's resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
