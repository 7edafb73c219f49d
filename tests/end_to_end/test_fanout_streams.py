"""Pipelines and streaming models through /generate_stream: what comes when, and what ends them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.asking import Pipeline, events_in
from tests.running import Running, leftovers, segments_of, serve, wait_for
from tests.services.fanout import GATED

PLACEMENTS = ["fused", "graph"]
ENDLESS = 1_000_000
WIDE = 400
"""Results of 80 KB: many more than buffers take."""
BREAKS = 500.0
"""A row after whose first piece `Pieces` fails."""


def heads(placement: str, folder: Path) -> dict[str, Any]:
    """Three heads, of which `b` comes first in the configuration and waits at a gate."""

    def head(output: str, add: float, **more: Any) -> dict[str, Any]:
        options = {"output": output, "add": add, "fail_on": 14, "gates": str(folder)} if more else {"output": output}
        return {"model": "fanout:Head", "options": options, **more}

    return {
        "pipeline": {
            "placement": placement,
            "trunk": {"model": "fanout:Trunk"},
            "heads": {"a": head("ya", 0), "b": head("yb", 2, on_error="omit"), "c": head("yc", 0)},
        },
        "environment": {"FANOUT_LOG": str(folder / placement)},
        "warmup_batch_sizes": [1],
    }


def pieces(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """pre -> stream -> post"""
    return {
        "pipeline": {
            "steps": {
                "pre": {"model": "fanout:Trunk", "inputs": {"x": "input.x"}},
                "stream": {"model": "fanout:Pieces", "options": {"arrays": "torch", **options}},
                "post": {"model": "fanout:Post"},
            },
            "heads": ["post"],
        },
        "environment": {"FANOUT_LOG": str(folder / name)},
    }


def async_pieces(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """A model of its own, an async generator."""
    return {"model": "fanout:AsyncPieces", "options": options, "environment": {"FANOUT_LOG": str(folder / name)}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the steps write, and where gates are opened."""
    return tmp_path_factory.mktemp("streams")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """Heads in both placements, and streams that end or not."""
    endless = {"count": ENDLESS, "interval_s": 0.02}
    deployments = {
        **{placement: heads(placement, folder) for placement in PLACEMENTS},
        "pieces": pieces(folder, "pieces"),
        "endless": pieces(folder, "endless", **endless),
        "async": async_pieces(folder, "async"),
        "async-silent": async_pieces(folder, "async-silent", count=ENDLESS, interval_s=3600),
        "wide": {
            "model": "fanout:WidePieces",
            "options": {"count": WIDE, "width": 20_000},
            "environment": {"FANOUT_LOG": str(folder / "wide")},
        },
    }
    with serve({"deployments": deployments, "server": {"workers": 2}}) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


def pipeline_of(server: Running, folder: Path, name: str) -> Pipeline:
    """A deployment, with nothing written down yet."""
    found = Pipeline(server, name, name, folder / name)
    found.forget()
    return found


@pytest.fixture(params=PLACEMENTS)
def pipeline(server: Running, folder: Path, request: pytest.FixtureRequest) -> Pipeline:
    """One with heads."""
    return pipeline_of(server, folder, request.param)


# Heads


def test_every_head_is_an_event_and_the_end_another(pipeline: Pipeline) -> None:
    *events, end = events_in(pipeline.generate(1, id="mine"))
    named = {"model_name": pipeline.name, "model_version": "1", "id": "mine"}
    times = [event.pop("time_ms") for event in events]
    assert times == sorted(times)
    assert all(0 <= time < 10_000 for time in times)
    assert sorted(events, key=lambda event: str(event["head"])) == [
        {**named, "head": "a", "status": "ok", "ya": [2.0] * 4},
        {**named, "head": "b", "status": "ok", "yb": [4.0] * 4},
        {**named, "head": "c", "status": "ok", "yc": [2.0] * 4},
    ]
    assert end == {**named, "final": True, "heads": {"a": "ok", "b": "ok", "c": "ok"}}


def test_only_wanted_heads_are_events(pipeline: Pipeline) -> None:
    event, end = events_in(pipeline.generate(1, parameters={"heads": ["c"]}))
    assert (event["head"], end["heads"]) == ("c", {"c": "ok"})
    assert set(pipeline.calls()) == {"trunk", "yc"}


def test_a_head_that_fails_is_an_event_too(pipeline: Pipeline) -> None:
    *events, end = events_in(pipeline.generate(7))
    failed = next(event for event in events if event["head"] == "b")
    assert (failed["status"], failed["error"]) == ("failed", "step `b`: RuntimeError: yb can't bear 14")
    assert end["heads"] == {"a": "ok", "b": "failed", "c": "ok"}


def test_a_head_leaves_as_soon_as_it_is_done(pipeline: Pipeline, folder: Path) -> None:
    # One replica runs its heads one after another: `c` comes after `b`. In the graph it doesn't wait.
    feature = GATED + PLACEMENTS.index(pipeline.name) * 2
    try:
        with pipeline.stream(feature / 2) as response:
            events = events_in(response)
            before = {next(events)["head"] for _ in range(1 if pipeline.is_fused else 2)}
            assert before == ({"a"} if pipeline.is_fused else {"a", "c"})
            (folder / f"{feature:g}").touch()
            *after, end = events
    finally:
        (folder / f"{feature:g}").touch()
    assert {event["head"] for event in after} == {"a", "b", "c"} - before
    assert set(end["heads"].values()) == {"ok"}


# Streams


def test_every_yield_is_an_event(server: Running, folder: Path) -> None:
    pipeline = pipeline_of(server, folder, "pieces")
    *events, end = events_in(pipeline.generate(1))
    assert [(event["head"], event["status"], event["doubled"]) for event in events] == [
        ("post", "ok", [2.0 * (2 + index)] * 4) for index in range(3)
    ]
    assert (end["final"], end["heads"]) == (True, {"post": "ok"})
    assert pipeline.calls() == {"trunk": 1, "piece": 3, "post": 3, "closed": 1}


def test_streams_at_once_are_kept_apart(server: Running, folder: Path) -> None:
    pipeline = pipeline_of(server, folder, "pieces")
    with pipeline.stream(1) as first, pipeline.stream(10) as second:
        for row, response in ((1, first), (10, second)):
            *events, end = events_in(response)
            assert [event["doubled"][0] for event in events] == [2.0 * (2 * row + index) for index in range(3)]
            assert end["heads"] == {"post": "ok"}


def test_a_stream_that_breaks_says_so_and_ends(server: Running, folder: Path) -> None:
    pipeline = pipeline_of(server, folder, "pieces")
    first, broken, end = events_in(pipeline.generate(BREAKS))
    assert first["doubled"] == [4 * BREAKS] * 4
    assert (broken["head"], broken["status"]) == ("post", "failed")
    assert broken["error"] == "step `stream`: RuntimeError: piece 0 breaks"
    assert end["heads"] == {"post": "failed"}
    assert len(list(events_in(pipeline.generate(1)))) == 4


def test_a_step_before_the_stream_fails_it(server: Running, folder: Path) -> None:
    failed, end = events_in(pipeline_of(server, folder, "pieces").generate(666))
    assert (failed["status"], failed["error"]) == ("failed", "step `pre`: ValueError: the trunk does not like 666")
    assert end["heads"] == {"post": "failed"}


@pytest.mark.parametrize("name", ["endless", "async-silent"])
def test_a_client_that_leaves_ends_the_generator(server: Running, folder: Path, name: str) -> None:
    pipeline = pipeline_of(server, folder, name)
    with pipeline.stream(1) as response:
        events = events_in(response)
        next(events)
        assert pipeline.calls()["closed"] == 0
    wait_for(lambda: pipeline.calls()["closed"] == 1, 60, "the generator to be closed")
    count = pipeline.calls()["piece"]
    with pipeline.stream(1) as response:
        next(events_in(response))
    wait_for(lambda: pipeline.calls()["closed"] == 2, 60, "the next one to be closed")
    assert 1 <= count < ENDLESS


@pytest.mark.parametrize("name", ["endless", "async-silent"])
def test_a_stream_is_cancelled_by_its_id_whichever_worker_is_asked(server: Running, folder: Path, name: str) -> None:
    pipeline = pipeline_of(server, folder, name)
    url = f"{server.url}/v2/models/{name}/generate_stream"
    for _ in range(4):  # who takes a connection is the system's choice
        pipeline.forget()
        headers = {"X-Request-Id": "mine"}
        with httpx.stream("POST", url, json={"x": [1.0] * 4}, headers=headers, timeout=20) as response:
            events = events_in(response)
            next(events)
            told = httpx.post(f"{server.url}/v2/requests/mine/cancel")
            assert (told.status_code, told.json()) == (200, {"request_id": "mine", "cancelled": 1})
            *_, error, end = events
        assert error["error"] == "the request was cancelled"
        assert end["final"]
        wait_for(lambda: pipeline.calls()["closed"] == 1, 60, "the generator to be closed")
        assert httpx.post(f"{server.url}/v2/requests/mine/cancel").status_code == 404


@pytest.mark.parametrize("name", ["endless", "async-silent"])
def test_a_worker_that_is_killed_takes_its_streams_with_it(server: Running, folder: Path, name: str) -> None:
    pipeline = pipeline_of(server, folder, name)
    with pipeline.stream(1) as response:
        events = events_in(response)
        next(events)
        for worker in server.workers():
            os.kill(worker, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(events)
    wait_for(lambda: pipeline.calls()["closed"] == 1, 60, "the generator to be closed")
    wait_for(lambda: bool(server.workers()) and server.is_ready(name), 60, "another worker")
    with pipeline.stream(1) as response:
        next(events_in(response))


def test_a_client_that_stops_reading_holds_its_own_stream_up_and_loses_nothing(server: Running, folder: Path) -> None:
    pipeline, other = pipeline_of(server, folder, "wide"), pipeline_of(server, folder, "pieces")
    counts = [-1]

    def stands_still() -> bool:
        assert len(list(events_in(other.generate(1)))) == 4
        counts.append(pipeline.calls()["piece"])
        return counts[-1] == counts[-2] > 0

    with pipeline.stream(1) as response:
        wait_for(stands_still, 60, "the model to be held up")
        assert counts[-1] < WIDE
        *events, end = events_in(response)
        assert [set(event["piece"]) for event in events] == [{index} for index in range(WIDE)]
        assert end["final"]
    assert pipeline.calls()["piece"] == WIDE


def test_an_async_generator_streams(server: Running, folder: Path) -> None:
    pipeline = pipeline_of(server, folder, "async")
    *events, end = events_in(pipeline.generate(5))
    named = {"model_name": "async", "model_version": "1"}
    assert events == [{**named, "piece": [5.0 + index] * 4} for index in range(3)]
    assert end == {**named, "final": True}
    assert pipeline.calls() == {"piece": 3, "closed": 1}


def test_what_streams_has_no_whole_answer(server: Running, folder: Path) -> None:
    pipeline = pipeline_of(server, folder, "pieces")
    whole = server.client.post(pipeline.url("generate"), json={"x": [1.0] * 4})
    for answer in (pipeline.ask(1), whole):
        assert answer.status_code == 400, answer.text
        assert "POST to /v2/models/pieces/generate_stream" in answer.json()["error"]
    assert pipeline.runs() == []


def test_several_results_of_a_model_are_no_whole_answer_and_end_its_generator(server: Running, folder: Path) -> None:
    pipeline = pipeline_of(server, folder, "async")
    assert pipeline.ask(1).status_code == 400
    assert pipeline.runs() == []
    answer = server.client.post(pipeline.url("generate"), json={"x": [1.0] * 4})
    assert (answer.status_code, "got several" in answer.json()["error"]) == (400, True)
    wait_for(lambda: pipeline.calls()["closed"] == 1, 20, "the generator to be closed")
