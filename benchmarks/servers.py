"""Servers that benchmarks start, each in processes of its own, and free ports for them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headwater_server.binder.environment import library_path

__all__ = ["START_TIMEOUT_S", "free_port", "gateway", "running", "stop"]

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Sequence[str],
    ready_url: str,
    body: bytes | None = None,
    *,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Iterator[int]:
    """Run a server until the block ends; the block starts when the URL answers 200. Gives the server's process id.

    Args:
        command: that starts it.
        ready_url: asked until then.
        body: with which that is a POST.
        cwd: where it runs; None: where we do.
        environment: beside our own.
        log: has what it writes; None: nowhere.

    Raises:
        RuntimeError: it ended, wasn't ready in time, or is a Headwater of which a model has failed; the message has
            its last answer and the end of its log, if there are any.
    """
    with (log or Path(os.devnull)).open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {}), "LD_LIBRARY_PATH": library_path(os.environ)},
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while (answer := _ask(ready_url, body)) is not None:
            if process.poll() is not None or time.monotonic() > deadline or "is FAILED:" in answer:
                said = "" if log is None else f"\n{log.read_text(errors='replace')[-3000:]}"
                raise RuntimeError(f"did not start: {' '.join(command)}\n{answer}{said}")
            time.sleep(0.1)
        yield process.pid
    finally:
        stop(process)


def stop(process: subprocess.Popen[Any]) -> None:
    """End a server as Ctrl-C does, or kill it if that takes it too long, and kill what it leaves of its group."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # nothing is left, or the server has no group of its own
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def gateway(model: str, *settings: str) -> Iterator[str]:
    """Headwater with one model, as ``headwater serve MODULE:CLASS`` runs it. Gives its URL."""
    port = free_port()
    pairs = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "headwater_server", "serve", model, "--port", str(port), *pairs]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/v2/health/ready"):
        yield url


def _ask(url: str, body: bytes | None) -> str | None:
    """The text of an answer that isn't 200, empty if there is none; None: it is 200."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return None if answer.status == 200 else ""
    except urllib.error.HTTPError as error:
        with error:
            return error.read(2000).decode(errors="replace")
    except OSError:
        return ""
