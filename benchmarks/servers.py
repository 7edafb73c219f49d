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
from collections.abc import Iterator, Sequence

from inference.environment import library_path

__all__ = ["free_port", "gateway", "running"]

START_TIMEOUT_S = 240.0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], ready_url: str, body: bytes | None = None) -> Iterator[None]:
    """Run a server until the block ends; the block starts when the URL answers 200 (to a POST, if a body is given)."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "LD_LIBRARY_PATH": library_path(os.environ)},
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(ready_url, body):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def gateway(model: str, *settings: str) -> Iterator[str]:
    """Headwater with one model, as ``headwater serve MODULE:CLASS`` runs it. Gives its URL."""
    port = free_port()
    pairs = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "app", "serve", model, "--port", str(port), *pairs]
    url = f"http://127.0.0.1:{port}"
    with running(command, f"{url}/v2/health/ready"):
        yield url


def _answers(url: str, body: bytes | None) -> bool:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=5) as answer:
        return bool(answer.status == 200)
    return False
