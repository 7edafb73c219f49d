"""Where the time of a start goes, that of a replica's restart, and that of one more replica.

``python -m benchmarks.start [CONFIG] [--scalings N] [--smoke]``: runs ``check`` and then ``serve`` as ``make serve``
does (configs/demo.yaml), and prints which process said what when; then kills the host of a replica of its deployment
``text``, with SIGKILL, and prints when the next one was ready; then the same of a replica without torch. Then 64
connections ask ``text`` alone, again and again, until a second replica has come: printed is the time from the
autoscaler's decision until the new replica has computed its first batch. ``--smoke``: without torch only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import yaml

from benchmarks.fanout_report import Spread
from benchmarks.fanout_servers import command_of, tree
from benchmarks.servers import free_port, stop
from benchmarks.start_model import COMPUTED, Telling

DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
LIGHT = "headwater.zoo.scale:Scale"
LIMIT_S = 300.0
SCALING = {"replicas": {"min": 1, "max": 2}, "scaling": {"up_after_s": 1, "down_after_s": 2}}


class _Server:
    """A server whose log is read as it comes."""

    def __init__(self, arguments: list[str]) -> None:
        self.began_s = time.monotonic()
        self._lines: list[tuple[float, str]] = []
        self._more = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater_server", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._more:
                self._lines.append((time.monotonic(), line.rstrip()))
                self._more.notify_all()
        with self._more:
            self._lines.append((time.monotonic(), ""))
            self._more.notify_all()

    def until(self, wanted: str, start: int = 0) -> int:
        """Wait for a line that has this in it. Returns how many lines there are up to it."""
        deadline_s = time.monotonic() + LIMIT_S
        at = start
        with self._more:
            while True:
                while at < len(self._lines):
                    if wanted in self._lines[at][1]:
                        return at + 1
                    at += 1
                if self.process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit("\n".join(line for _, line in self._lines[-20:]))
                self._more.wait(1)

    def lines(self, start: int, end: int) -> list[tuple[float, str]]:
        """What it has said, and when."""
        with self._more:
            return self._lines[start:end]

    def stop(self) -> None:
        """End it."""
        stop(self.process)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default=str(DEMO))
    parser.add_argument("--scalings", type=int, default=5)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if not options.smoke:
        began_s = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "headwater_server", "check", options.config], check=True, stdout=subprocess.DEVNULL
        )
        print(f"headwater check: {time.monotonic() - began_s:.1f} s\n")
        server = _Server(["serve", options.config, "--port", str(free_port())])
        try:
            end = server.until("Headwater serves at")
            print("headwater serve, seconds since its start:")
            _print(server.lines(0, end), server.began_s)
            _print_next(server, "text")
        finally:
            server.stop()
    with tempfile.TemporaryDirectory() as folder:
        light = Path(folder) / "light.yaml"
        light.write_text(f"deployments: {{scale: {{model: '{LIGHT}'}}}}\n")
        server = _Server(["serve", str(light), "--port", str(free_port())])
        try:
            server.until("Headwater serves at")
            _print_next(server, "scale")
        finally:
            server.stop()
        if not options.smoke:
            _print_scalings(Path(options.config), Path(folder) / "text.yaml", options.scalings)


def _print_next(server: _Server, name: str) -> None:
    """Kill a replica's host, and print what is said until the next one is ready."""
    first = server.until("Headwater serves at")
    began_s = time.monotonic()
    os.kill(_host(server.process.pid, name), signal.SIGKILL)
    end = server.until(" ready after ", first)
    print(f"\na replica of {name}, seconds since its host was killed:")
    _print(server.lines(first, end), began_s)


def _print_scalings(config: Path, path: Path, count: int) -> None:
    """Have `text` scaled up and down, and print how long the new replicas took.

    Args:
        config: has `text`.
        path: where to write the configuration that is served.
        count: how often.
    """
    text = yaml.safe_load(config.read_text())["deployments"]["text"]
    text["pipeline"]["trunk"]["model"] = f"{Telling.__module__}:{Telling.__name__}"
    path.write_text(yaml.safe_dump({"deployments": {"text": {**text, **SCALING}}}))
    port, took_s = free_port(), []
    server = _Server(["serve", str(path), "--port", str(port)])
    ask = [
        sys.executable,
        "-m",
        "headwater_server",
        "bench",
        f"http://127.0.0.1:{port}",
        "--connections",
        "64",
        "--seconds",
        "60",
    ]
    try:
        at = server.until("Headwater serves at")
        for _ in range(count):
            asking = subprocess.Popen(ask, stdout=subprocess.DEVNULL)
            try:
                at = server.until("scaling up", at)
                decided_s, _ = server.lines(at - 1, at)[0]
                at = server.until(" ready after ", at)
                _, line = server.lines(at - 1, at)[0]
                replica = json.loads(line)["message"].partition(":")[0]
                at = server.until(f'"{COMPUTED}","replica":"{replica}"', at)
                took_s.append(server.lines(at - 1, at)[0][0] - decided_s)
            finally:
                asking.send_signal(signal.SIGINT)
                asking.wait()
            at = server.until("scaling down", at)
    finally:
        server.stop()
    found = Spread.of(took_s)
    print(
        "\none more replica of text, seconds from the autoscaler's decision to its first batch: "
        f"{found.median:.2f} ({found.least:.2f} to {found.most:.2f})"
    )


def _print(lines: list[tuple[float, str]], began_s: float) -> None:
    for at_s, line in lines:
        if line.startswith("{"):
            print(f"{at_s - began_s:7.2f}  {json.loads(line)['message'][:110]}")


def _host(root: int, name: str) -> int:
    """The host process of a deployment's only replica under a process."""
    for pid in tree(root):
        if command_of(pid).split(b"\0")[2:4] == [b"headwater.replica", name.encode()]:
            return pid
    raise SystemExit("found no replica")


if __name__ == "__main__":
    main()
