"""Runs ``headwater serve`` for a while, as a user would, and tells when it is ready or why it never is."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from app.cli.client import ServerClient
from app.errors import CommandError

__all__ = ["PlanServer", "serve_point"]

PR_SET_PDEATHSIG: Final = 1
POLL_S: Final = 0.05
STOP_TIMEOUT_S: Final = 60.0


class PlanServer:
    """One server, of which everything is ready."""

    def __init__(self, pid: int, url: str, runtime_dir: Path) -> None:
        self.pid = pid
        """The supervisor's."""
        self.url = url
        self.runtime_dir = runtime_dir

    def get(self, path: str) -> Any:
        """What it answers to a GET, parsed.

        Raises:
            CommandError: it doesn't, or with an error.
        """
        status, content = ServerClient(self.url, key="").get(path)
        if status != 200:
            raise CommandError(f"the server that is measured: GET {path}: status {status}")
        return content


@contextlib.contextmanager
def serve_point(what: str, fields: Mapping[str, Any], timeout_s: float) -> Iterator[PlanServer]:
    """Serve a configuration on a free port of the loopback interface until the block ends.

    Args:
        what: as ``headwater serve`` takes it.
        fields: laid over it, by dotted path.
        timeout_s: how long it may take until everything is ready.

    Raises:
        CommandError: it ends, or doesn't get ready in time; the message has the reason that it told.
    """
    # Short: the sockets of replicas lie below it.
    with tempfile.TemporaryDirectory(prefix="hw-plan-") as name:
        folder = Path(name)
        given = {
            **fields,
            "server.host": "127.0.0.1",
            "server.port": 0,
            "server.runtime_dir": str(folder / "run"),
            "server.tls": None,
            "server.tracing": None,
            "server.log_format": "json",
            "security": {},
        }
        flags = [part for field, value in given.items() for part in ("--set", f"{field}={json.dumps(value)}")]
        log = folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", what, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the planner, which then stops it
                preexec_fn=_end_with_parent,
                # `-m` would put the current folder first, where a module could hide one of ours.
                env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": _python_path()},
            )
        try:
            url = _wait_ready(process, log, time.monotonic() + timeout_s)
            yield PlanServer(process.pid, url, folder / "run")
        finally:
            _stop(process)


def _end_with_parent() -> None:
    """Should the planner be killed, the server ends by itself."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _python_path() -> str:
    """Where Headwater is not installed but run from its sources, it must be told where they are."""
    ours = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), ours)))


def _wait_ready(process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> str:
    """Returns its address."""
    url = ""
    while True:
        if process.poll() is not None:
            raise CommandError(f"the server ended with status {process.returncode}: {_reason(log)}")
        if (failure := _start_failure(log)) is not None:
            raise CommandError(failure)  # the server would try again, and end the same way
        if not url:
            url = _address(log)
        elif (refused := _state(url)) == "":
            return url
        elif refused is not None:
            raise CommandError(refused)
        if time.monotonic() > deadline_s:
            raise CommandError(f"it was not ready in time: {_reason(log)}; raise `load_timeout_s`")
        time.sleep(POLL_S)


def _address(log: Path) -> str:
    for entry in _entries(log):
        if str(entry.get("message", "")).startswith("listening on "):
            return str(entry["message"]).rpartition(" ")[2]
    return ""


def _start_failure(log: Path) -> str | None:
    """Why a replica did not start, if one didn't."""
    for entry in _entries(log):
        message = str(entry.get("message", ""))
        if entry.get("level") == "error" and ": did not start (" in message:
            return message.partition("): ")[2]
    return None


def _state(url: str) -> str | None:
    """Nothing if every replica is ready, None if that may come to be, otherwise why it won't."""
    client = ServerClient(url, key="")
    with contextlib.suppress(CommandError):
        is_ready = client.get("/v2/health/ready")[0] == 200
        for model in client.index():
            replicas = model.get("replicas")
            if model.get("shortage"):
                return str(model["shortage"])
            if model.get("state") == "FAILED" and not is_ready:
                return str(model.get("reason") or "the model failed to load")
            is_ready = is_ready and (replicas is None or replicas["ready"] >= replicas["wanted"])
        return "" if is_ready else None
    return None


def _reason(log: Path) -> str:
    """The last error that it told, or its last words."""
    entries = list(_entries(log))
    errors = [str(one["message"]) for one in entries if one.get("level") in ("error", "critical")]
    if errors:
        return errors[-1]
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("headwater: ") if lines else "it said nothing"


def _entries(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its guardians see it, and end the replicas
            process.wait()
