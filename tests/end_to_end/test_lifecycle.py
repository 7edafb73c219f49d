"""Load, unload and reload of real replicas, over HTTP and by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import language_model
from tests.running import Running, in_background, leftovers, segments_of, serve, wait_for

ENDLESS = 1_000_000
DRAIN_S = 1.0
"""What the deployments ``brief`` and ``null`` give their requests."""
UNLOADED_WITHIN_S = 5.0
"""Beside the time to drain; the goal is 2 s on a machine that does nothing else."""
CYCLES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models find their version and put their marks."""
    return tmp_path_factory.mktemp("marks")


def versioned(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    (folder / f"{name}.version").write_text("1")
    options = {"version": str(folder / f"{name}.version"), "ends": str(folder / f"{name}.ends")}
    return {"model": "versions:Versioned", "options": options, "warmup_batch_sizes": [1], **more}


def pieces(**options: Any) -> dict[str, Any]:
    return {"model": "fanout:AsyncPieces", "options": options, "warmup_batch_sizes": []}


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """A server with two gateway workers; every test leaves all its models ready.

    - ``unary``; ``recreated``: that is reloaded by unloading it first; ``two``: with two replicas;
    - ``finite``: a stream that is over after 2 s; ``brief``: one that never is, and little time to drain;
    - ``tiny``, ``null``: language models, the second at 50 tokens a second, with little time to drain;
    - ``graph``: a pipeline whose head ``y`` is the deployment ``shared``.
    """
    add = {"output": "y", "add": 1}
    config = {
        "deployments": {
            "unary": versioned(folder, "unary"),
            "recreated": versioned(folder, "recreated", strategy="recreate"),
            "two": versioned(folder, "two", replicas=2, drain_timeout_s=DRAIN_S),
            "finite": pieces(count=20, interval_s=0.1),
            "brief": {**pieces(count=ENDLESS, interval_s=0.02), "drain_timeout_s": DRAIN_S},
            "tiny": language_model(),
            "null": {**language_model("null", step_s=0.02), "drain_timeout_s": DRAIN_S},
            "graph": {
                "pipeline": {
                    "placement": "graph",
                    "trunk": {"model": "fanout:Trunk"},
                    "heads": {"z": {"model": "fanout:Head", "options": {"output": "z"}}, "y": {"deployment": "shared"}},
                },
                "warmup_batch_sizes": [],
            },
            "shared": {"model": "fanout:Head", "options": add, "warmup_batch_sizes": []},
        },
        "server": {"workers": 2},
    }
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def command(running: Running, action: str, model: str, **options: Any) -> httpx.Response:
    return running.client.post(f"{running.url}/v2/repository/models/{model}/{action}", **options)


def done(running: Running, action: str, model: str) -> dict[str, Any]:
    """What came of a command, which must have succeeded."""
    answer = command(running, action, model)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["name"] == model
    return told


def version(running: Running, model: str, sleep_s: float = 0.0) -> int:
    answer = running.infer(model, [sleep_s], shape=[1, 1])
    assert answer.status_code == 200, answer.text
    return int(answer.json()["outputs"][0]["data"][0])


def generate_stream(running: Running, model: str, **fields: Any) -> Any:
    asked = fields or {"x": [0, 0, 0, 0]}
    return running.client.stream("POST", f"{running.url}/v2/models/{model}/generate_stream", json=asked)


TOKENS = {"text_input": "def", "max_tokens": 20_000, "ignore_eos": True}


class Traces:
    """What a model's replicas have on the machine now."""

    def __init__(self, running: Running, model: str) -> None:
        self.folders = running.replica_folders(model)
        self.groups = [json.loads((one / "journal.json").read_text())["host_pid"] for one in self.folders]
        self.segments = set().union(*(segments_of(one) for one in self.folders))
        assert self.folders
        assert self.segments
        assert all(_group(one) for one in self.groups)

    def check_gone(self) -> None:
        """Nothing of it is left."""
        assert [leftovers(one, self.segments) for one in self.folders] == [[]] * len(self.folders)
        assert [one.exists() for one in self.folders] == [False] * len(self.folders)
        assert [_group(one) for one in self.groups] == [[]] * len(self.groups)


def _group(number: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(int(entry.name)) == number:
                    found.append(int(entry.name))
    return found


# Unload and load


def test_after_unary_requests_unload_leaves_nothing_and_load_brings_it_back(running: Running, folder: Path) -> None:
    assert version(running, "unary") == 1
    traces = Traces(running, "unary")
    ends = (folder / "unary.ends").read_text() if (folder / "unary.ends").exists() else ""
    began = time.monotonic()
    told = done(running, "unload", "unary")
    traces.check_gone()
    assert time.monotonic() - began < UNLOADED_WITHIN_S
    print(f"unloaded in {told['took_s']} s, {told['freed']['host_bytes'] / 2**20:.0f} MiB")
    assert (told["state"], told["drained"], told["ended"], told["leftovers"]) == ("UNAVAILABLE", 0, 0, [])
    assert told["freed"]["host_bytes"] > 100_000_000  # its weights are that large
    assert (folder / "unary.ends").read_text() == ends + "1\n"

    entry = running.index("unary")
    assert (entry["state"], "unloaded" in entry["reason"], entry["version"]) == ("UNAVAILABLE", True, "1")
    refused = running.infer("unary", [0.0], shape=[1, 1])
    assert refused.status_code == 503
    assert "is unloaded: load it with POST /v2/repository/models/unary/load" in refused.json()["error"]
    assert int(refused.headers["retry-after"]) >= 1
    assert running.get("/v2/models/unary/ready").status_code == 503
    assert running.is_ready()  # the server is, as it was told to do without
    again = command(running, "unload", "unary")
    assert (again.status_code, "nothing to unload" in again.json()["error"]) == (409, True)

    assert done(running, "load", "unary")["state"] == "READY"
    assert version(running, "unary") == 1
    since = running.index("unary")["since"]
    twice = command(running, "load", "unary")
    assert (twice.status_code, "reload" in twice.json()["error"]) == (409, True)
    assert running.index("unary")["since"] == since > entry["since"]


def test_a_stream_in_flight_is_drained_and_its_clients_see_nothing_of_it(running: Running) -> None:
    traces = Traces(running, "finite")
    with generate_stream(running, "finite") as response:
        lines = response.iter_lines()
        next(lines)
        with in_background(lambda: done(running, "unload", "finite")) as told:
            wait_for(lambda: running.index("finite")["state"] == "DRAINING", 5, "the model to drain")
            refused = running.client.post(f"{running.url}/v2/models/finite/generate_stream", json={"x": [0] * 4})
            assert (refused.status_code, "DRAINING" in refused.json()["error"]) == (503, True)
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert (len(events), events[-1]["final"]) == (19 + 1, True)
    assert not any("error" in event for event in events)
    assert (told[0]["drained"], told[0]["ended"]) == (1, 0), told
    traces.check_gone()
    done(running, "load", "finite")
    with generate_stream(running, "finite") as response:
        assert sum(line.startswith("data: ") for line in response.iter_lines()) == 20 + 1


@pytest.mark.parametrize("model", ["brief", "null"])
def test_a_stream_that_outlasts_the_drain_ends_with_an_explicit_event(running: Running, model: str) -> None:
    traces = Traces(running, model)
    fields = TOKENS if model == "null" else {}
    with generate_stream(running, model, **fields) as first, generate_stream(running, model, **fields) as second:
        streams = [first.iter_lines(), second.iter_lines()]
        for lines in streams:
            next(lines)
        began = time.monotonic()
        with in_background(lambda: done(running, "unload", model)) as told:
            events = [
                [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
                for lines in streams
            ]
        took_s = time.monotonic() - began
    for one in events:
        error = next(event for event in one if "error" in event)
        assert (error["status"], "drain_timeout_s" in error["error"]) == (503, True), error
        assert one[-1]["final"]
    assert (told[0]["drained"], told[0]["ended"]) == (0, 2), told
    assert DRAIN_S <= took_s < DRAIN_S + UNLOADED_WITHIN_S
    traces.check_gone()
    done(running, "load", model)
    with generate_stream(running, model, **fields) as response:
        assert response.status_code == 200


def test_a_unary_request_that_outlasts_the_drain_is_told_so(running: Running, folder: Path) -> None:
    traces = Traces(running, "two")
    assert len(traces.folders) == 2
    with in_background(lambda: running.infer("two", [8.0], shape=[1, 1])) as answers:
        wait_for((folder / "two.ends.begun").exists, 10, "the request to be computed")
        told = done(running, "unload", "two")
    assert (answers[0].status_code, "drain_timeout_s" in answers[0].json()["error"]) == (503, True), answers[0].text
    assert (told["drained"], told["ended"]) == (0, 1)
    traces.check_gone()
    done(running, "load", "two")
    assert len(Traces(running, "two").folders) == 2


# Reload


def test_reload_under_steady_requests_fails_none(running: Running, folder: Path) -> None:
    traces = Traces(running, "unary")
    (folder / "unary.version").write_text("2")
    stop = threading.Event()

    def ask() -> list[int]:
        seen = []
        while not stop.is_set():
            seen.append(version(running, "unary", 0.01))
        return seen

    with in_background(*[ask] * 8) as answers:
        try:
            told = done(running, "reload", "unary")
            wait_for(lambda: version(running, "unary") == 2, 10, "the new version")
        finally:
            stop.set()
    (folder / "unary.version").write_text("1")
    assert (told["state"], told["leftovers"], told["ended"]) == ("READY", [], 0)
    for seen in answers:
        assert isinstance(seen, list), seen
        assert seen[0] == 1
        assert seen[-1] == 2
        assert seen == sorted(seen)
    print(f"{sum(map(len, answers))} requests in a reload of {told['took_s']} s")
    traces.check_gone()
    assert running.index("unary")["state"] == "READY"
    done(running, "reload", "unary")
    assert version(running, "unary") == 1


def test_a_reload_lets_streams_finish_on_the_old_replica(running: Running) -> None:
    traces = Traces(running, "finite")
    with generate_stream(running, "finite") as response:
        lines = response.iter_lines()
        next(lines)
        told = done(running, "reload", "finite")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert (len(events), "error" in json.dumps(events)) == (19 + 1, False)
    assert told["ended"] == 0
    traces.check_gone()


def test_a_reload_that_fails_keeps_the_old_one_and_says_why(running: Running, folder: Path) -> None:
    replica = running.replica_folder("unary")
    (folder / "unary.version").write_text("none")
    answer = command(running, "reload", "unary")
    (folder / "unary.version").write_text("1")
    assert answer.status_code == 500
    assert "invalid literal for int()" in answer.json()["error"]
    assert "goes on serving" in answer.json()["error"]
    assert running.replica_folders("unary") == [replica]
    assert running.index("unary")["state"] == "READY"
    assert version(running, "unary") == 1


def test_reload_with_strategy_recreate(running: Running, folder: Path) -> None:
    traces = Traces(running, "recreated")
    (folder / "recreated.version").write_text("2")
    told = done(running, "reload", "recreated")
    assert (told["state"], told["leftovers"]) == ("READY", [])
    traces.check_gone()
    assert version(running, "recreated") == 2
    states = [line for line in running.log.read_text().splitlines() if "recreated: " in line and " -> " in line]
    assert sum("READY -> DRAINING" in line for line in states) == 1
    assert sum("LOADING -> READY" in line for line in states) == 2


def test_a_load_that_fails_is_failed_until_it_is_told_again(running: Running, folder: Path) -> None:
    done(running, "unload", "recreated")
    (folder / "recreated.version").write_text("none")
    began = running.log.read_text().count("importing versions:Versioned")
    answer = command(running, "load", "recreated")
    assert (answer.status_code, "invalid literal for int()" in answer.json()["error"]) == (500, True)
    assert running.index("recreated")["state"] == "FAILED"
    assert running.log.read_text().count("importing versions:Versioned") == began + 1
    assert not running.is_ready()
    (folder / "recreated.version").write_text("1")
    assert done(running, "load", "recreated")["state"] == "READY"
    assert version(running, "recreated") == 1


# Replicas that die, workers that die


def test_after_load_a_lost_replica_is_replaced_as_ever(running: Running) -> None:
    done(running, "unload", "unary")
    done(running, "load", "unary")
    old = running.replica_folder("unary")
    os.kill(running.replica_pid("unary"), signal.SIGKILL)
    wait_for(lambda: running.index("unary")["state"] == "UNAVAILABLE", 10, "the model to be unavailable")
    wait_for(lambda: running.is_ready("unary"), 60, "a new replica")
    assert running.replica_folder("unary") != old


def test_a_gateway_worker_that_comes_later_knows_what_is_unloaded(running: Running) -> None:
    done(running, "unload", "unary")
    for pid in running.workers():
        os.kill(pid, signal.SIGKILL)
    wait_for(running.is_ready, 20, "other workers")
    assert running.index("unary")["state"] == "UNAVAILABLE"
    done(running, "load", "unary")
    assert version(running, "unary") == 1


# A pipeline whose steps are deployments


def test_a_graph_pipeline_goes_with_its_own_steps_and_leaves_the_shared_one(running: Running) -> None:
    refused = command(running, "unload", "graph.trunk")
    assert (refused.status_code, "pipeline `graph`" in refused.json()["error"]) == (409, True)
    traces = [Traces(running, name) for name in ("graph.trunk", "graph.z")]
    shared = running.replica_folder("shared")
    told = done(running, "unload", "graph")
    for one in traces:
        one.check_gone()
    assert told["freed"]["host_bytes"] > 0
    states = {name: running.index(name)["state"] for name in ("graph", "graph.trunk", "graph.z", "shared")}
    assert states == {"graph": "UNAVAILABLE", "graph.trunk": "UNAVAILABLE", "graph.z": "UNAVAILABLE", "shared": "READY"}
    answer = running.infer("graph", [0.0] * 4, shape=[1, 4])
    assert (answer.status_code, "unloaded" in answer.json()["error"]) == (503, True)
    assert done(running, "load", "graph")["state"] == "READY"
    assert running.infer("graph", [0.0] * 4, shape=[1, 4]).status_code == 200
    assert running.replica_folder("shared") == shared
    done(running, "reload", "graph")
    assert running.infer("graph", [0.0] * 4, shape=[1, 4]).status_code == 200
    assert running.replica_folder("shared") == shared


# Cycles


def test_cycles_of_a_model_that_answers_whole(running: Running) -> None:
    for _ in range(CYCLES):
        assert version(running, "unary") == 1
        traces = Traces(running, "unary")
        assert done(running, "unload", "unary")["leftovers"] == []
        traces.check_gone()
        done(running, "load", "unary")


def test_cycles_of_a_language_model_with_streams_open(running: Running) -> None:
    for cycle in range(CYCLES):
        traces = Traces(running, "tiny")
        with contextlib.ExitStack() as stack:
            open_streams = []
            for _ in range(4 if cycle % 2 else 0):
                asked = {"text_input": "def", "max_tokens": 300, "ignore_eos": True}
                lines = stack.enter_context(generate_stream(running, "tiny", **asked)).iter_lines()
                next(lines)
                open_streams.append(lines)
            with in_background(lambda: done(running, "unload", "tiny")) as told:
                for lines in open_streams:
                    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
                    assert events[-1]["final"]
                    assert not any("error" in event for event in events)
        assert (told[0]["ended"], told[0]["leftovers"]) == (0, []), told
        traces.check_gone()
        done(running, "load", "tiny")
        whole = running.client.post(
            f"{running.url}/v2/models/tiny/generate", json={"text_input": "def", "max_tokens": 4}
        )
        assert whole.status_code == 200, whole.text


# Who may, and how


def test_no_web_page_can_unload_a_model(running: Running) -> None:
    for headers in ({"host": "models.example"}, {"origin": "http://models.example"}):
        for action in ("load", "unload", "reload"):
            refused = command(running, action, "unary", headers=headers)
            assert (refused.status_code, "header" in refused.json()["error"]) == (403, True), refused.text
    assert running.index("unary")["state"] == "READY"


def test_a_model_that_there_is_not_and_a_config_in_the_body(running: Running) -> None:
    assert command(running, "load", "nothing").status_code == 404
    refused = command(running, "load", "unary", json={"parameters": {"config": "{}"}})
    assert (refused.status_code, "not supported yet" in refused.json()["error"]) == (400, True)


def test_a_server_that_others_can_reach_takes_no_commands() -> None:
    config = {
        "deployments": {"faulty": {"model": "faulty:Faulty", "warmup_batch_sizes": []}},
        "server": {"host": "0.0.0.0"},
    }
    with serve(config, ready=False) as reachable:
        wait_for(lambda: _answers(reachable), 30, "the gateway")
        refused = command(reachable, "unload", "faulty")
        assert (refused.status_code, "loopback" in refused.json()["error"]) == (403, True)


def _answers(running: Running) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return running.get("/v2/health/live").status_code == 200
    return False


def cli(running: Running, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments, "--url", running.url],
        env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_command_line(running: Running) -> None:
    table = cli(running, "status")
    assert table.returncode == 0, table.stderr
    head, *rows = table.stdout.splitlines()
    assert head.split() == ["MODEL", "VERSION", "STATE", "SINCE", "REASON"]
    assert [row.split()[:3] for row in rows if row.startswith("unary ")] == [["unary", "1", "READY"]]
    unloaded = cli(running, "unload", "unary")
    assert (unloaded.returncode, "now UNAVAILABLE" in unloaded.stdout) == (0, True), unloaded.stderr
    again = cli(running, "unload", "unary")
    assert (again.returncode, "nothing to unload" in again.stderr, again.stdout) == (1, True, "")
    assert cli(running, "load", "unary").returncode == 0
    assert cli(running, "reload", "unary").returncode == 0
    assert version(running, "unary") == 1


def test_stopping_the_server_during_an_unload_leaves_nothing(folder: Path) -> None:
    config: dict[str, Any] = {
        "deployments": {"brief": {**pieces(count=ENDLESS, interval_s=0.02), "drain_timeout_s": 600}}
    }
    config["server"] = {"shutdown_timeout_s": 1}
    with serve(config) as running:
        segments = segments_of(running.folder)
        with generate_stream(running, "brief") as response:
            lines = response.iter_lines()  # kept: its end would close the stream
            next(lines)
            with in_background(lambda: command(running, "unload", "brief")):
                wait_for(lambda: running.index("brief")["state"] == "DRAINING", 5, "the model to drain")
                assert running.stop() == 0
        assert leftovers(running.folder, segments) == []
