"""Starts real servers for tests, and looks at what they leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

__all__ = ["SERVICES", "Running", "leftovers", "serve", "wait_for"]

SERVICES = Path(__file__).parent / "services"
START_TIMEOUT_S = 180.0


def wait_for(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "the condition") -> Any:
    """Wait until a condition gives something true, and return that."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.02)


class Running:
    """A server: the command line as a user starts it, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, log: Path) -> None:
        self.process = process
        self.folder = folder
        """Its ``runtime_dir``."""
        self.log = log
        self.url = ""

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self.process.pid

    def get(self, path: str) -> httpx.Response:
        """One GET."""
        return httpx.get(self.url + path, timeout=30)

    def infer(
        self, model: str, data: Any, *, shape: list[int], datatype: str = "FP32", name: str = "x", **body: Any
    ) -> Any:
        """One JSON request with one input."""
        tensor = {"name": name, "datatype": datatype, "shape": shape, "data": data}
        return httpx.post(f"{self.url}/v2/models/{model}/infer", json={"inputs": [tensor], **body}, timeout=60)

    def is_ready(self, model: str | None = None) -> bool:
        """Whether the server, or one model, says it is ready."""
        path = "/v2/health/ready" if model is None else f"/v2/models/{model}/ready"
        with contextlib.suppress(httpx.TransportError):
            return self.get(path).status_code == 200
        return False

    def replica_folder(self, model: str) -> Path:
        """The folder of the model's newest replica."""
        found = list(self.folder.glob(f"headwater-*/{model}-*"))
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]))

    def replica_pid(self, model: str) -> int:
        """The process id of the model's host."""
        return int(json.loads((self.replica_folder(model) / "journal.json").read_text())["host_pid"])

    def stop(self, timeout_s: float = 60.0) -> int:
        """Stop it as Ctrl-C does. Returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)


@contextlib.contextmanager
def serve(
    config: dict[str, Any], *, ready: bool = True, cwd: Path = SERVICES, arguments: tuple[str, ...] = ()
) -> Iterator[Running]:
    """Run ``headwater serve`` on a free port, with the test services on the path, until the block ends."""
    # Not pytest's own folders: their names are too long for unix sockets.
    with tempfile.TemporaryDirectory(prefix="hw-") as name:
        folder = Path(name)
        path = folder / "config.yaml"
        content = {**config, "server": {"port": 0, "runtime_dir": str(folder / "run"), **config.get("server", {})}}
        path.write_text(yaml.safe_dump(content))
        log = folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", str(path), *arguments],
                cwd=cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
                # `-m` would put the services' folder first, where a module could hide one of ours.
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"},
            )
        running = Running(process, folder / "run", log)
        try:
            running.url = wait_for(lambda: _url(running), START_TIMEOUT_S, "the server's address")
            if ready:
                wait_for(lambda: running.is_ready() or _has_ended(running), START_TIMEOUT_S, "the server to be ready")
            yield running
        except BaseException:
            sys.stderr.write(log.read_text()[-6000:])
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _has_ended(running: Running) -> bool:
    if running.process.poll() is not None:
        raise AssertionError(f"the server ended with {running.process.returncode}:\n{running.log.read_text()[-3000:]}")
    return False


def _url(running: Running) -> str:
    _has_ended(running)
    for line in running.log.read_text().splitlines():
        if "listening on " in line:
            return str(json.loads(line)["message"]).rpartition(" ")[2]
    return ""


def leftovers(folder: Path) -> list[str]:
    """What is left of a server that used this ``runtime_dir``: processes, shared-memory segments, files."""
    found = [str(path) for path in folder.rglob("*")] if folder.exists() else []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(folder) in command:
                    found.append(f"process {entry.name}: {command}")
    return found


def segments() -> set[str]:
    """Shared-memory segments of PyTriton on this machine."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("pytrtion", "psm_"))}
