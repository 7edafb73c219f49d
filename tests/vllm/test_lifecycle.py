"""What is left of a vLLM's replica, and of the requests that it had: after disconnects, unloads and deaths.

The number of cycles of load, stream and unload is in the environment variable HEADWATER_VLLM_CYCLES.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.app.lm.scripted import FOLDER as TINY_LM
from tests.running import Running, leftovers, serve, wait_for

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

CYCLES = int(os.environ.get("HEADWATER_VLLM_CYCLES", "3"))
AT_ONCE = 4
"""Sequences computed together; as many requests wait."""
DRAIN_S = 1.0
UNLOADED_WITHIN_S = 20.0
"""Beside the time to drain."""
MAX_STEP_S = 8.0
ENDED_WITHIN_S = 3.0
"""After a process has died: from that to the explicit end of the last stream."""
FREE_WITHIN_S = 1.0
TRIALS = 3
READY_WITHIN_S = 240.0
GROWTH_BYTES = 24 * 2**20
"""What supervisor and gateway worker may take more after all cycles than after the first."""


@pytest.fixture(scope="module")
def config(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """That of a server whose model has a context in which a stream takes longer than any test."""
    folder = tmp_path_factory.mktemp("model") / "tiny_lm"
    shutil.copytree(TINY_LM, folder)
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, "max_position_embeddings": 16_384}))
    tiny = {
        "model": f"vllm:{folder}",
        "python": vllm_python,
        "options": {"max_num_seqs": AT_ONCE, "max_step_s": MAX_STEP_S},
        "drain_timeout_s": DRAIN_S,
        "max_crashes": 100,
    }
    return {"deployments": {"tiny": tiny}}


@pytest.fixture(scope="module")
def running(config: dict[str, Any]) -> Iterator[Running]:
    """That server; every test leaves its model ready or about to be."""
    with serve(config) as running:
        yield running
        if running.popen.poll() is None:
            replica = Replica(running)
            assert running.stop() == 0
            assert replica.left() == []
            assert leftovers(running.folder) == []


class Replica:
    """The newest replica, and what it has."""

    def __init__(self, running: Running) -> None:
        self.folder = running.replica_folder("tiny")
        self.group = running.replica_pid("tiny")
        self.segments: set[str] = set()
        self.look()

    def look(self) -> None:
        """Note the segments that its processes have mapped."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                self.segments.update(re.findall(r"/dev/shm/([^ \n]+)", Path(f"/proc/{pid}/maps").read_text()))

    def processes(self) -> dict[int, str]:
        """Its host, and vLLM's: name by process id."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getpgid(process.pid) == self.group and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process.name()
        return found

    def process(self, what: str) -> int:
        """The ``host``, ``guardian``, ``server``, or the one of vLLM's processes whose name begins so."""
        if what == "host":
            return self.group
        host = psutil.Process(self.group)
        if what == "guardian":
            return int(host.ppid())
        if what == "server":
            return next(int(one.pid) for one in host.children() if "--uds" in str(one.cmdline()))
        return next(pid for pid, name in self.processes().items() if name.startswith(what))

    def left(self) -> list[str]:
        """What is left of it."""
        found = [f"process {pid}: {name}" for pid, name in self.processes().items()]
        found += [f"segment {name}" for name in self.segments if Path("/dev/shm", name).exists()]
        return found + ([str(self.folder)] if self.folder.exists() else [])

    def requests(self) -> int:
        """Those that vLLM has, running and waiting."""
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.folder / "h")), timeout=30) as client:
            text = client.get("http://replica/metrics").text
        return int(sum(map(float, re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} (\S+)", text, re.M))))


class Stream:
    """A stream under way, read in a thread to its end."""

    def __init__(self, running: Running) -> None:
        self.events: list[str] = []
        self.ended_s = 0.0
        self.status = 0
        self._url = f"{running.url}/v1/completions"
        self._response: httpx.Response | None = None
        self.id = f"stream-{id(self)}"
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        body = {"model": "tiny", "prompt": "Once", "stream": True, "max_tokens": 16_000, "ignore_eos": True}
        ask = httpx.stream("POST", self._url, json=body, headers={"X-Request-Id": self.id}, timeout=60)
        with contextlib.suppress(httpx.HTTPError, OSError), ask as response:
            self._response = response
            self.status = response.status_code
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
        self.ended_s = time.monotonic()

    def leave(self) -> None:
        """Close the connection, if there is one."""
        if self._response is not None:
            self._response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def error(self) -> str:
        """The explicit error with which it has ended; empty: none."""
        said = next((one for one in self.events if one.startswith('{"error"')), "")
        return said if self.status != 200 or self.events[-1] in (said, "[DONE]") else ""


@contextlib.contextmanager
def streams(running: Running) -> Iterator[list[Stream]]:
    """So many streams that as many wait as run."""
    found = [Stream(running) for _ in range(2 * AT_ONCE)]
    try:
        wait_for(lambda: sum(len(one.events) > 3 for one in found) >= AT_ONCE, 60, "the streams to run")
        wait_for(lambda: all(one.status for one in found), 60, "the status of those that wait")
        yield found
    finally:
        for one in found:
            with contextlib.suppress(OSError):
                one.leave()
            one.thread.join(60)


def await_ready(running: Running) -> Replica:
    wait_for(lambda: running.is_ready("tiny"), READY_WITHIN_S, "the model to be ready", 0.1)
    return Replica(running)


def command(running: Running, action: str) -> dict[str, Any]:
    url = f"{running.url}/v2/repository/models/tiny/{action}"
    answer = running.client.post(url, timeout=READY_WITHIN_S)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def completes(running: Running) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 3}
    answer = running.client.post(f"{running.url}/v1/completions", json=body)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 3)


def check_that_ending_frees(running: Running, end: Callable[[Stream], None]) -> None:
    """Check that what ends each client's stream frees the engine of those that run and those that wait."""
    replica = await_ready(running)
    took_s = []
    for _ in range(TRIALS):
        with streams(running) as found:
            wait_for(lambda: replica.requests() == 2 * AT_ONCE, 60, "all requests to be there")
            began_s = time.monotonic()
            for one in found:
                end(one)
            wait_for(lambda: replica.requests() == 0, 10, "the engine to be idle")
            took_s.append(time.monotonic() - began_s)
    print(f"free after {took_s} s")
    assert min(took_s) < FREE_WITHIN_S  # what else the machine does can only add to a time


def test_a_disconnect_frees_running_and_waiting_requests(running: Running) -> None:
    check_that_ending_frees(running, Stream.leave)
    completes(running)


def test_a_cancel_by_id_frees_running_and_waiting_requests(running: Running) -> None:
    cancelled = []

    def cancel(one: Stream) -> None:
        answer = running.client.post(f"{running.url}/v2/requests/{one.id}/cancel")
        assert (answer.status_code, answer.json()["cancelled"]) == (200, 1)
        cancelled.append(one)

    check_that_ending_frees(running, cancel)
    for one in cancelled:
        one.thread.join(10)
        assert "cancelled" in one.error(), one.events[-2:]


def test_cycles_of_load_stream_and_unload_leave_nothing(running: Running) -> None:
    await_ready(running)
    sizes = []
    for cycle in range(CYCLES):
        replica = await_ready(running)
        with streams(running) as found:
            began_s = time.monotonic()
            told = command(running, "unload")
            took_s = time.monotonic() - began_s
            for one in found:
                one.thread.join(10)
                assert "drain_timeout_s" in one.error(), one.events[-2:]
        assert (replica.left(), told["leftovers"], told.get("warnings")) == ([], [], None)
        assert (told["drained"], told["ended"]) == (0, 2 * AT_ONCE)
        assert told["freed"]["host_bytes"] > 2**29
        assert DRAIN_S <= took_s < DRAIN_S + UNLOADED_WITHIN_S
        sizes.append(sum(psutil.Process(pid).memory_info().rss for pid in (running.pid, *running.workers())))
        freed = told["freed"]["host_bytes"] >> 20
        print(f"cycle {cycle}: {took_s:.1f} s, freed {freed} MiB, supervisor and worker {sizes[-1] >> 20} MiB")
        assert command(running, "load")["state"] == "READY"
        completes(running)
    assert sizes[-1] - sizes[0] < GROWTH_BYTES


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("server", signal.SIGKILL),
        ("VLLM::EngineCor", signal.SIGKILL),
        ("VLLM::Worker", signal.SIGKILL),
        ("VLLM::Worker", signal.SIGSTOP),
        ("server", signal.SIGSTOP),
        ("host", signal.SIGKILL),
        ("guardian", signal.SIGKILL),
    ],
)
def test_a_process_that_dies_under_load(running: Running, what: str, number: signal.Signals) -> None:
    replica = await_ready(running)
    with streams(running) as found:
        began_s = time.monotonic()
        os.kill(replica.process(what), number)
        for one in found:
            one.thread.join(60)
        took_s = max(one.ended_s for one in found) - began_s
        for one in found:
            assert one.error(), one.events[-2:]
    wait_for(lambda: replica.left() == [], 30, "the replica to be swept")
    print(f"{what}, {number.name}: streams ended after {took_s:.2f} s")
    assert took_s < (ENDED_WITHIN_S if number == signal.SIGKILL else MAX_STEP_S + ENDED_WITHIN_S)
    assert await_ready(running).folder != replica.folder
    completes(running)


def test_nothing_survives_a_supervisor_that_is_killed(running: Running) -> None:
    replica = await_ready(running)
    with streams(running):
        running.popen.kill()
        wait_for(lambda: replica.left() == [], 30, "the replica to be swept")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_server_that_ends_while_vllm_starts_leaves_nothing(config: dict[str, Any], number: signal.Signals) -> None:
    with serve(config, ready=False) as running:
        replica = wait_for(lambda: with_segments(running), READY_WITHIN_S, "its processes to share memory")
        running.popen.send_signal(number)
        wait_for(lambda: replica.left() == [], 30, "the replica to be swept")


def with_segments(running: Running) -> Replica | None:
    """The replica, once it has segments."""
    with contextlib.suppress(LookupError, OSError):
        replica = Replica(running)
        if replica.segments:
            return replica
    return None
