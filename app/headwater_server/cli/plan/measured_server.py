"""Runs ``headwater serve`` for a measurement, as a user would run it, and waits until it is ready or has failed to
start."""

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
from typing import Any, Final, NamedTuple

from headwater_server.cli.server_client import ServerClient
from headwater_server.errors import CommandError
from headwater_server.process.model_side import last_line

__all__ = ["PlanServer", "serve_point"]

PR_SET_PDEATHSIG: Final = 1
POLL_S: Final = 0.05
STOP_TIMEOUT_S: Final = 60.0
"""Time in which the server must end after SIGTERM; then it is killed."""


class PlanServer(NamedTuple):
    """A running server; all its replicas were ready once."""

    pid: int
    """The supervisor's process id."""
    url: str
    runtime_dir: Path

    def get(self, path: str) -> Any:
        """The decoded JSON of the server's answer to a GET.

        Raises:
            CommandError: there is no answer, or the answer is an error.
        """
        status, content = ServerClient(self.url, key="").get(path)
        if status != 200:
            raise CommandError(f"the server that is measured: GET {path}: status {status}")
        return content


@contextlib.contextmanager
def serve_point(source: str, fields: Mapping[str, Any], timeout_s: float) -> Iterator[PlanServer]:
    """Serve a configuration on a free port of the loopback interface until the ``with`` block ends.

    Args:
        source: the argument of ``headwater serve``: a configuration's file or a model.
        fields: fields that override the configuration, by dotted path.
        timeout_s: time within which all replicas must be ready.

    Raises:
        CommandError: the server ends or isn't ready in time; the message has the reason from the server's log.
    """
    # A short prefix, because replicas have sockets in this folder, whose paths are limited.
    with tempfile.TemporaryDirectory(prefix="hw-plan-") as name:
        runtime_dir, log = Path(name, "run"), Path(name, "log")
        overrides = {
            **fields,
            "server.host": "127.0.0.1",
            "server.port": 0,
            "server.runtime_dir": str(runtime_dir),
            "server.tls": None,
            "server.tracing": None,
            "server.log_format": "json",
            "server.drain_delay_s": 0,
            "security": {},
        }
        flags = [part for field, value in overrides.items() for part in ("--set", f"{field}={json.dumps(value)}")]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "headwater_server", "serve", source, *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the planner, which then stops the server
                preexec_fn=_end_with_parent,
                # `-m` would put the current folder first on the path: a module there could hide a module of Headwater.
                env={**os.environ, "PYTHONSAFEPATH": "1"},
            )
        try:
            url = _wait_ready(process, log, time.monotonic() + timeout_s)
            yield PlanServer(process.pid, url, runtime_dir)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()  # the guardians notice, and end the replicas
                process.wait()


def _end_with_parent() -> None:
    """Have the kernel end the server if the planner is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(process: subprocess.Popen[bytes], log: Path, deadline_s: float) -> str:
    """Wait until the server is ready. Returns its URL; raises CommandError if the server can't become ready in time."""
    url = ""
    while True:
        if process.poll() is not None:
            raise CommandError(f"the server ended with status {process.returncode}: {_reason(log)}")
        if (failure := _start_failure(log)) is not None:
            raise CommandError(failure)  # don't wait while the server restarts the replica, which would fail again
        if not url:
            url = _address(log)
        elif (obstacle := _obstacle(url)) == "":
            return url
        elif obstacle is not None:
            raise CommandError(obstacle)
        if time.monotonic() > deadline_s:
            raise CommandError(f"it was not ready in time: {_reason(log)}; raise `load_timeout_s`")
        time.sleep(POLL_S)


def _obstacle(url: str) -> str | None:
    """Why the replicas can't become ready. Empty if all replicas are ready; None if they may still become ready."""
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


def _address(log: Path) -> str:
    """The URL at which the server listens; empty if it doesn't listen yet."""
    messages = _messages(log, "info")
    return next((message.rpartition(" ")[2] for message in messages if message.startswith("listening on ")), "")


def _start_failure(log: Path) -> str | None:
    """Why a replica did not start; None if no start has failed."""
    return next(
        (message.partition("): ")[2] for message in _messages(log, "error") if ": did not start (" in message), None
    )


def _reason(log: Path) -> str:
    """The last error in the log, or its last line."""
    errors = _messages(log, "error", "critical")
    return errors[-1] if errors else last_line(log.read_text(errors="replace")).removeprefix("headwater: ")


def _messages(log: Path, *levels: str) -> list[str]:
    """The messages of these levels; lines that are not JSON are left out."""
    messages = []
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and entry.get("level") in levels:
                messages.append(str(entry.get("message", "")))
    return messages
