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

from tests.running import Running, in_background, leftovers, segments_of, serve, wait_for
from tests.traces import Traces

ENDLESS = 1_000_000
DRAIN_S = 1.0
"""What ``brief`` gives its requests, and the configurations that are loaded here."""
UNLOADED_WITHIN_S = 20.0
"""Beside the time to drain; the goal is 2 s on a machine that does nothing else."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model finds its version and puts its marks."""
    return tmp_path_factory.mktemp("marks")


def pieces(**options: Any) -> dict[str, Any]:
    return {"model": "light:Pieces", "options": options, "warmup_batch_sizes": []}


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    """A server with two gateway workers; every test leaves all its models ready and as they are configured.

    - ``unary``, which answers with its version;
    - ``finite``: a stream that is over after 3.75 s; ``brief``: one that never is, and little time to drain;
    - ``graph``: a pipeline whose head ``y`` is the deployment ``shared``.
    """
    (folder / "version").write_text("1")
    files = {"version": str(folder / "version"), "ends": str(folder / "ends")}
    config = {
        "deployments": {
            "unary": {"model": "versions:Versioned", "options": files, "warmup_batch_sizes": [1]},
            "finite": pieces(count=15, interval_s=0.25),
            "brief": {
                **pieces(count=ENDLESS, interval_s=0.02),
                "drain_timeout_s": DRAIN_S,
                "batching": {"max_in_flight": 4},  # both streams run, whichever worker they meet
            },
            "graph": {
                "pipeline": {
                    "placement": "graph",
                    "trunk": {"model": "light:Trunk"},
                    "heads": {"z": {"model": "light:Head", "options": {"output": "z"}}, "y": {"deployment": "shared"}},
                },
                "warmup_batch_sizes": [],
            },
            "shared": {"model": "light:Head", "options": {"output": "y"}, "warmup_batch_sizes": []},
        },
        "server": {"workers": 2},
    }
    with serve(config) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def command(
    running: Running, action: str, model: str, config: dict[str, Any] | None = None, **options: Any
) -> httpx.Response:
    if config is not None:
        options["json"] = {"parameters": {"config": json.dumps(config)}}
    return running.client.post(f"{running.url}/v2/repository/models/{model}/{action}", **options)


def done(running: Running, action: str, model: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """What came of a command, which must have succeeded."""
    answer = command(running, action, model, config)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    assert told["name"] == model
    return told


def version(running: Running, sleep_s: float = 0.0) -> int:
    answer = running.infer("unary", [sleep_s], shape=[1, 1])
    assert answer.status_code == 200, answer.text
    return int(answer.json()["outputs"][0]["data"][0])


def next_version(folder: Path) -> int:
    """Have replicas that start from now on be of another version. Returns that."""
    number = int((folder / "version").read_text()) + 1
    (folder / "version").write_text(str(number))
    return number


def generate_stream(running: Running, model: str) -> Any:
    return running.client.stream("POST", f"{running.url}/v2/models/{model}/generate_stream", json={"x": [0, 0, 0, 0]})


def events_of(lines: Iterator[str]) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


# Unload and load


def test_after_unary_requests_unload_leaves_nothing_and_load_brings_it_back(running: Running, folder: Path) -> None:
    seen = version(running)
    traces = Traces(running, "unary")
    ends = (folder / "ends").read_text() if (folder / "ends").exists() else ""
    began = time.monotonic()
    told = done(running, "unload", "unary")
    assert traces.left() == []
    assert time.monotonic() - began < UNLOADED_WITHIN_S
    print(f"unloaded in {told['took_s']} s, {told['freed']['host_bytes'] / 2**20:.0f} MiB")
    assert (told["state"], told["drained"], told["ended"], told["leftovers"]) == ("UNAVAILABLE", 0, 0, [])
    assert told["freed"]["host_bytes"] > 100_000_000  # its weights are that large
    assert (folder / "ends").read_text() == ends + f"{seen}\n"

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
    assert version(running) == seen
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
            wait_for(lambda: running.index("finite")["state"] == "DRAINING", 60, "the model to drain")
            refused = running.client.post(f"{running.url}/v2/models/finite/generate_stream", json={"x": [0] * 4})
            assert (refused.status_code, "DRAINING" in refused.json()["error"]) == (503, True)
            events = events_of(lines)
    assert (len(events), events[-1]["final"]) == (14 + 1, True)
    assert not any("error" in event for event in events)
    assert (told[0]["drained"], told[0]["ended"]) == (1, 0), told
    assert traces.left() == []
    done(running, "load", "finite")
    with generate_stream(running, "finite") as response:
        assert len(events_of(response.iter_lines())) == 15 + 1


def test_streams_that_outlast_the_drain_end_with_an_explicit_event(running: Running) -> None:
    traces = Traces(running, "brief")
    with generate_stream(running, "brief") as first, generate_stream(running, "brief") as second:
        streams = [first.iter_lines(), second.iter_lines()]
        for lines in streams:
            next(lines)
        began = time.monotonic()
        with in_background(lambda: done(running, "unload", "brief")) as told:
            found = [events_of(lines) for lines in streams]
        took_s = time.monotonic() - began
    for events in found:
        error = next(event for event in events if "error" in event)
        assert (error["status"], "drain_timeout_s" in error["error"]) == (503, True), error
        assert events[-1]["final"]
    assert (told[0]["drained"], told[0]["ended"]) == (0, 2), told
    assert DRAIN_S <= took_s < DRAIN_S + UNLOADED_WITHIN_S
    assert traces.left() == []
    done(running, "load", "brief")
    with generate_stream(running, "brief") as response:
        assert response.status_code == 200


def test_with_a_config_it_has_two_replicas_and_a_request_that_outlasts_the_drain_is_told_so(
    running: Running, folder: Path
) -> None:
    one = Traces(running, "unary")
    number = next_version(folder)
    told = done(running, "reload", "unary", {"strategy": "recreate", "replicas": 2, "drain_timeout_s": DRAIN_S})
    assert (told["state"], told["leftovers"], one.left()) == ("READY", [], [])
    states = [line for line in running.log.read_text().splitlines() if "unary: READY -> " in line]
    assert "READY -> DRAINING" in states[-1]  # that is what recreate means
    assert version(running) == number
    traces = Traces(running, "unary")
    assert len(traces.folders) == 2
    (folder / "ends.begun").unlink(missing_ok=True)
    with in_background(lambda: running.infer("unary", [8.0], shape=[1, 1])) as answers:
        wait_for((folder / "ends.begun").exists, 60, "the request to be computed")
        told = done(running, "unload", "unary")
    assert (answers[0].status_code, "drain_timeout_s" in answers[0].json()["error"]) == (503, True), answers[0].text
    assert (told["drained"], told["ended"]) == (0, 1)
    assert traces.left() == []
    done(running, "load", "unary", {})  # as it is configured
    assert len(Traces(running, "unary").folders) == 1


# Reload


def test_reload_under_steady_requests_fails_none(running: Running, folder: Path) -> None:
    traces = Traces(running, "unary")
    before = version(running)
    number = next_version(folder)
    stop = threading.Event()

    def ask() -> list[int]:
        seen = []
        while not stop.is_set():
            seen.append(version(running, 0.01))
        return seen

    with in_background(*[ask] * 8) as answers:
        try:
            told = done(running, "reload", "unary")
            wait_for(lambda: version(running) == number, 60, "the new version")
        finally:
            stop.set()
    assert (told["state"], told["leftovers"], told["ended"]) == ("READY", [], 0)
    for seen in answers:
        assert isinstance(seen, list), seen
        assert (seen[0], seen[-1]) == (before, number)
        assert seen == sorted(seen)
    print(f"{sum(map(len, answers))} requests in a reload of {told['took_s']} s")
    assert traces.left() == []
    assert running.index("unary")["state"] == "READY"


def test_a_reload_lets_streams_finish_on_the_old_replica(running: Running) -> None:
    traces = Traces(running, "finite")
    with generate_stream(running, "finite") as response:
        lines = response.iter_lines()
        next(lines)
        told = done(running, "reload", "finite")
        events = events_of(lines)
    assert (len(events), "error" in json.dumps(events)) == (14 + 1, False)
    assert told["ended"] == 0
    assert traces.left() == []


def test_what_fails_to_start_leaves_the_old_one_in_a_reload_and_nothing_in_a_load(
    running: Running, folder: Path
) -> None:
    replica = running.replica_folder("unary")
    seen = version(running)
    good = (folder / "version").read_text()
    (folder / "version").write_text("none")
    answer = command(running, "reload", "unary")
    assert answer.status_code == 500
    assert "invalid literal for int()" in answer.json()["error"]
    assert "still serves" in answer.json()["error"]
    assert running.replica_folders("unary") == [replica]
    assert running.index("unary")["state"] == "READY"
    assert version(running) == seen

    done(running, "unload", "unary")
    began = running.log.read_text().count("importing versions:Versioned")
    answer = command(running, "load", "unary")
    assert (answer.status_code, "invalid literal for int()" in answer.json()["error"]) == (500, True)
    assert running.index("unary")["state"] == "FAILED"
    assert running.log.read_text().count("importing versions:Versioned") == began + 1
    assert not running.is_ready()
    (folder / "version").write_text(good)
    assert done(running, "load", "unary")["state"] == "READY"
    assert version(running) == int(good)


# Replicas that die, workers that die


def test_a_worker_that_comes_later_knows_what_is_unloaded_and_what_is_loaded_is_kept_as_ever(running: Running) -> None:
    done(running, "unload", "unary")
    for pid in running.workers():
        os.kill(pid, signal.SIGKILL)
    wait_for(running.is_ready, 20, "other workers")
    assert running.index("unary")["state"] == "UNAVAILABLE"
    done(running, "load", "unary")
    seen = version(running)

    old = running.replica_folder("unary")
    os.kill(running.replica_pid("unary"), signal.SIGKILL)
    wait_for(lambda: running.index("unary")["state"] == "UNAVAILABLE", 60, "the model to be unavailable")
    wait_for(lambda: running.is_ready("unary"), 180, "a new replica")
    assert running.replica_folder("unary") != old
    assert version(running) == seen


# A pipeline whose steps are deployments


def test_a_graph_pipeline_goes_with_its_own_steps_and_leaves_the_shared_one(running: Running) -> None:
    refused = command(running, "unload", "graph.trunk")
    assert (refused.status_code, "pipeline `graph`" in refused.json()["error"]) == (409, True)
    traces = [Traces(running, name) for name in ("graph.trunk", "graph.z")]
    shared = running.replica_folder("shared")
    told = done(running, "unload", "graph")
    assert [one.left() for one in traces] == [[], []]
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


# Who may, and how


def test_no_web_page_can_unload_a_model(running: Running) -> None:
    for headers in ({"host": "models.example"}, {"origin": "http://models.example"}):
        for action in ("load", "unload", "reload"):
            refused = command(running, action, "unary", headers=headers)
            assert (refused.status_code, "header" in refused.json()["error"]) == (403, True), refused.text
    assert running.index("unary")["state"] == "READY"


def test_what_is_refused_changes_nothing(running: Running) -> None:
    replicas = running.replica_folders("unary")
    assert command(running, "load", "nothing").status_code == 404
    bad: dict[str, Any] = {"timeout_s": 0}
    for config, status, told in (
        (bad, 400, "`deployments.unary.timeout_s`: input should be greater than 0, got 0"),
        ({"model": "os:system"}, 403, "server.allow_load is settings"),
    ):
        refused = command(running, "reload", "unary", config)
        assert (refused.status_code, told in refused.json()["error"]) == (status, True), refused.text
    refused = command(running, "load", "nothing", {"model": "light:Trunk"})
    assert (refused.status_code, "doesn't name it" in refused.json()["error"]) == (403, True)
    assert running.replica_folders("unary") == replicas
    assert running.index("unary")["state"] == "READY"


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
        [sys.executable, "-m", "headwater_server", *arguments, "--url", running.url],
        env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_command_line(running: Running, tmp_path: Path) -> None:
    table = cli(running, "status")
    assert table.returncode == 0, table.stderr
    head, *rows = table.stdout.partition("\n\n")[0].splitlines()
    assert head.split()[:3] == ["MODEL", "VERSION", "STATE"]
    assert [row.split()[:3] for row in rows if row.startswith("shared ")] == [["shared", "1", "READY"]]
    unloaded = cli(running, "unload", "shared")
    assert (unloaded.returncode, "now UNAVAILABLE" in unloaded.stdout) == (0, True), unloaded.stderr
    again = cli(running, "unload", "shared")
    assert (again.returncode, "nothing to unload" in again.stderr, again.stdout) == (1, True, "")
    section = tmp_path / "section.yaml"
    section.write_text("batching: {max_batch_size: 3}\n")
    assert cli(running, "load", "shared", "--config", str(section)).returncode == 0
    assert running.get("/v2/models/shared/config").json()["max_batch_size"] == 3
    assert cli(running, "reload", "shared", "--config", "{}").returncode == 0
    assert running.get("/v2/models/shared/config").json()["max_batch_size"] == 32


def test_a_model_that_is_added_and_a_server_that_stops_during_an_unload() -> None:
    with serve(
        {
            "deployments": {"shared": pieces(count=1, interval_s=0)},
            "server": {"allow_load": "any", "shutdown_timeout_s": 1},
        }
    ) as other:
        section = {**pieces(count=ENDLESS, interval_s=0.02), "drain_timeout_s": 600}
        assert done(other, "load", "added", section)["state"] == "READY"
        assert [entry["name"] for entry in other.get("/v2/repository/index").json()] == ["shared", "added"]
        segments = segments_of(other.folder)
        with generate_stream(other, "added") as response:
            lines = response.iter_lines()  # kept: its end would close the stream
            next(lines)
            with in_background(lambda: command(other, "unload", "added")):
                wait_for(lambda: other.index("added")["state"] == "DRAINING", 60, "the model to drain")
                assert other.stop() == 0
        assert leftovers(other.folder, segments) == []
