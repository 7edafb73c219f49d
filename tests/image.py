"""Tries a container image: ``python -m tests.image IMAGE``. Needs docker or podman; `make image-test` runs it.

Imports the standard library only. Each container has a name of its own, and is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 45
READ_ONLY: Final = ("--read-only", "--tmpfs", "/tmp:rw,exec,nosuid,nodev,mode=1777")
HARDENED: Final = (*READ_ONLY, "--cap-drop", "ALL", "--security-opt", "no-new-privileges")


class Failure(Exception):
    """What was expected, and what came."""


class Engine:
    """docker, or podman."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Run a command of it. Returns what it printed on both streams."""
        done = subprocess.run(
            [self._name, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
        )
        if check and done.returncode != 0:
            raise Failure(f"{self._name} {' '.join(arguments)}: status {done.returncode}: {done.stdout.strip()}")
        return done.stdout.strip()

    def inspect(self, what: str, template: str) -> str:
        """A field of a container or an image."""
        return self("inspect", "--format", template, what)


class Container:
    """One that runs, and where it is reached.

    Args:
        engine: runs it.
        id: its name.
    """

    def __init__(self, engine: Engine, id: str) -> None:
        self.engine = engine
        self.id = id
        port = engine("port", id, "8000/tcp").splitlines()[0].rpartition(":")[2]
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self) -> float:
        """Returns how long it took, in seconds."""
        started = time.monotonic()
        while time.monotonic() - started < START_TIMEOUT_S:
            if self.engine.inspect(self.id, "{{.State.Running}}") != "true":
                raise Failure(f"expected it to serve, but it has ended:\n{self.log()}")
            with contextlib.suppress(OSError):
                self.get("/v2/health/ready")
                return time.monotonic() - started
            time.sleep(0.1)
        raise Failure(f"not ready after {START_TIMEOUT_S:g} s:\n{self.log()}")

    def get(self, path: str) -> bytes:
        """What a route answers."""
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return bytes(response.read())

    def post(self, path: str, body: dict[str, Any]) -> Iterator[bytes]:
        """The lines of an answer as they come."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            yield from response

    def run(self, *command: str, check: bool = True) -> str:
        """Run something in it."""
        return self.engine("exec", self.id, *command, check=check)

    def log(self) -> str:
        """What it wrote."""
        return self.engine("logs", self.id, check=False)

    def stop(self) -> tuple[int, float]:
        """SIGTERM. Returns the exit status, and how long the end took, in seconds."""
        started = time.monotonic()
        self.engine("stop", "--time", str(STOP_TIMEOUT_S), self.id)
        return int(self.engine.inspect(self.id, "{{.State.ExitCode}}")), time.monotonic() - started


@contextlib.contextmanager
def running(engine: Engine, image: str, options: Sequence[str], *command: str) -> Iterator[Container]:
    """A container of an image, until the end of the block."""
    id = f"headwater-test-{secrets.token_hex(4)}"
    try:
        engine("run", "--detach", "--name", id, "--publish", "127.0.0.1::8000", *options, image, *command)
        yield Container(engine, id)
    finally:
        engine("rm", "--force", "--volumes", id, check=False)


def expect(what: str, condition: bool, got: object) -> None:
    """Say that something holds, or fail with what came instead."""
    if not condition:
        raise Failure(f"expected {what}, got {got!r}")
    print(f"  {what}", flush=True)


def serves(container: Container) -> None:
    """One inference, one stream, and the container's own health check."""
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    answer = json.loads(b"".join(container.post("/v2/models/scale/infer", body)))
    expect("infer: 2, 4, 6", answer["outputs"][0]["data"] == [2, 4, 6], answer)
    asked = {"model": "tiny-lm", "prompt": "import os\n", "max_tokens": 16, "stream": True, "temperature": 0}
    lines = [line.strip() for line in container.post("/v1/completions", asked) if line.strip()]
    events = [line for line in lines if line.startswith(b"data: {")]
    expect("a stream: tokens, and [DONE]", len(events) >= 8 and lines[-1] == b"data: [DONE]", lines)
    healthy = container.run("python3", "-I", "-m", "headwater_server.cli.health", check=False)
    expect("the health check has nothing to say", healthy == "", healthy)


def with_defaults(engine: Engine, image: str) -> None:
    """``docker run -p 8000:8000 headwater``: the demo, with 64 MB of /dev/shm."""
    with running(engine, image, ()) as container:
        took_s = container.wait_until_ready()
        expect(f"ready in {took_s:.1f} s", True, took_s)
        serves(container)
        user = container.run("id", "-u")
        expect("it runs as a user other than root", user not in ("", "0"), user)
        first = container.run("cat", "/proc/1/cmdline").replace("\0", " ")
        expect("process 1 is Headwater itself", "headwater serve" in first, first)
        check = engine.inspect(container.id, "{{json .Config.Healthcheck}}")
        expect("the image has a health check", "headwater_server.cli.health" in check, check)
        # Several replicas' processes, and a callable's orphan, come to process 1 as they end.
        container.run("sh", "-c", "(sleep 0.1 &) ; true")
        status, took_s = container.stop()
        expect(f"SIGTERM: exit status 0, after {took_s:.1f} s", status == 0, (status, container.log()[-2000:]))


def hardened(engine: Engine, image: str) -> None:
    """A read-only root file system, no capability, no new privileges."""
    with running(engine, image, HARDENED) as container:
        container.wait_until_ready()
        serves(container)
        refused = container.run("sh", "-c", "touch /models/x /etc/x /opt/headwater/x; true")
        expect("nothing but /tmp can be written", refused.count("Read-only file system") == 3, refused)
        status, _ = container.stop()
        expect("SIGTERM: exit status 0", status == 0, (status, container.log()[-2000:]))


def survives_a_killed_replica(engine: Engine, image: str) -> None:
    """As process 1 it reaps what a killed replica leaves, and starts another."""
    with running(engine, image, (), "serve", "headwater.zoo.scale:Scale") as container:
        container.wait_until_ready()
        _kill_tritonserver(container)
        wait_for("the replica's loss is seen", lambda: "replica is lost" if "lost: " in container.log() else None)
        container.wait_until_ready()
        dead = _zombies(container)
        expect("no process is left unreaped", dead == [], dead)
        status, _ = container.stop()
        expect("SIGTERM: exit status 0", status == 0, (status, container.log()[-2000:]))


def refuses_small_shared_memory(engine: Engine, image: str) -> None:
    """Where the replicas' regions don't fit, it says so and how to fix it, and ends."""
    with running(engine, image, ("--shm-size", "2m")) as container:
        end = engine("wait", container.id)
        log = container.log()
        expect("too small a /dev/shm: exit status 1", end.splitlines()[-1] == "1", (end, log))
        expect("it says what to do: --shm-size", "--shm-size=" in log, log)


def _kill_tritonserver(container: Container) -> None:
    program = (
        "import os, signal\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if open(f'/proc/{pid}/comm').read().startswith('tritonserver'): os.kill(int(pid), signal.SIGKILL)\n"
    )
    container.run("python3", "-I", "-c", program)


def _zombies(container: Container) -> list[str]:
    program = (
        "import os\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    stat = open(f'/proc/{pid}/stat').read()\n"
        "    if stat.rpartition(')')[2].split()[0] == 'Z': print(stat.split()[1])\n"
    )
    return container.run("python3", "-I", "-c", program).split()


def wait_for(what: str, look: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is seen."""
    end = time.monotonic() + timeout_s
    while not look():
        if time.monotonic() > end:
            raise Failure(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.1)


CHECKS: Final = (with_defaults, hardened, survives_a_killed_replica, refuses_small_shared_memory)


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.image", description="Try a container image.")
    parser.add_argument("image")
    parser.add_argument("--engine", default=next(filter(shutil.which, ("podman", "docker")), None))
    options = parser.parse_args()
    if options.engine not in ("docker", "podman"):
        sys.exit("tests.image: expected docker or podman, which run containers; buildah only builds them")
    engine = Engine(options.engine)
    size_mb = int(engine("image", "inspect", "--format", "{{.Size}}", options.image)) / 1e6
    print(f"{options.image}: {size_mb:,.0f} MB")
    failed = 0
    for check in CHECKS:
        print(f"{(check.__doc__ or '').splitlines()[0]}", flush=True)
        try:
            check(engine, options.image)
        except (Failure, OSError, ValueError, subprocess.TimeoutExpired) as error:
            print(f"  FAILED: {error}", flush=True)
            failed += 1
    print(f"{len(CHECKS) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
