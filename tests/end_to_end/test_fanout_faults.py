"""Heads that fail, hang, die or write into what they share: what their requests, their siblings and others see."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.asking import Pipeline, ask_all, events_in, outputs_of
from tests.running import Running, in_background, leftovers, segments_of, serve, wait_for
from tests.services.fanout import GATED

PLACEMENTS = ["fused", "graph"]
TIMEOUT_S = 0.7
SOON_S = 10.0
"""Within which something that has a timeout of `TIMEOUT_S` is answered, on a busy machine."""
FAIL, EXIT, HANG = 7.0, 8.0, 9.0
"""Rows that `c` and `d` fail on, end at, and hang at."""


def head(output: str, add: float, **more: Any) -> dict[str, Any]:
    """One that does as it should."""
    return {"model": "fanout:Head", "options": {"output": output, "add": add}, **more}


def faulty(output: str, add: float, gates: Path, **more: Any) -> dict[str, Any]:
    """One that does not."""
    bad = {"fail_on": 2 * FAIL, "exit_on": 2 * EXIT, "hang_on": 2 * HANG, "gates": str(gates)}
    return {"model": "fanout:Head", "options": {"output": output, "add": add, **bad}, **more}


def on_torch(steps: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same steps, with torch's tensors."""
    return {name: {**step, "options": {**step.get("options", {}), "arrays": "torch"}} for name, step in steps.items()}


def abcds(placement: str, folder: Path) -> dict[str, Any]:
    """`c` and `d` have their time; without `c` an answer is whole, without `d` or `s` there is none."""
    return {
        "pipeline": {
            "placement": placement,
            "trunk": {"model": "fanout:Trunk"},
            "heads": {
                "a": head("ya", 1),
                "b": head("yb", 2),
                "c": faulty("yc", 3, folder, on_error="omit", timeout_s=TIMEOUT_S),
                "d": faulty("yd", 4, folder, timeout_s=TIMEOUT_S),
                "s": faulty("ys", 5, folder),
            },
        },
        "batching": {"max_batch_size": 8},
        "environment": {"FANOUT_LOG": str(folder / placement)},
        "warmup_batch_sizes": [1],
    }


def writers(placement: str, folder: Path) -> dict[str, Any]:
    """`h` writes into its features and says so, `w` doesn't say so, and `z` reads them after both."""
    steps: dict[str, dict[str, Any]] = {
        "h": {"model": "fanout:HonestWriter", "options": {"output": "yh"}},
        "w": {"model": "fanout:Writer", "options": {"output": "yw"}},
        "z": head("yz", 2),
    }
    trunk: dict[str, dict[str, Any]] = {"trunk": {"model": "fanout:Trunk"}}
    if placement == "fused":  # where they share tensors
        steps, trunk = on_torch(steps), on_torch(trunk)
    return {
        "pipeline": {"placement": placement, **trunk, "heads": steps},
        "batching": {"max_batch_size": 8},
        "environment": {"FANOUT_LOG": str(folder / f"{placement}-writers")},
        "warmup_batch_sizes": [],
    }


def pair(folder: Path) -> dict[str, Any]:
    """A pipeline that waits until it has two rows."""
    heads = {"a": head("ya", 1), "b": head("yb", 2), "s": faulty("ys", 5, folder)}
    return {
        "pipeline": {"trunk": {"model": "fanout:Trunk"}, "heads": heads},
        "batching": {"max_batch_size": 2, "max_queue_delay_ms": 20_000},
        "environment": {"FANOUT_LOG": str(folder / "pair")},
        "warmup_batch_sizes": [1],
    }


class Gate:
    """A row at which heads wait."""

    def __init__(self, row: float, path: Path) -> None:
        self.row = row
        self._path = path

    def open(self) -> None:
        """Let them go on."""
        self._path.touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the steps write, and where gates are opened."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """Two pipelines in each placement, and `pair`."""
    deployments = {placement: abcds(placement, folder) for placement in PLACEMENTS}
    deployments |= {f"{placement}-writers": writers(placement, folder) for placement in PLACEMENTS}
    deployments["pair"] = pair(folder)
    with serve({"deployments": deployments}) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


@pytest.fixture
def graph(server: Running, folder: Path) -> Pipeline:
    """The pipeline in five."""
    return _fresh(server, "graph", folder)


@pytest.fixture(params=PLACEMENTS)
def pipeline(server: Running, folder: Path, request: pytest.FixtureRequest) -> Pipeline:
    """Either."""
    return _fresh(server, request.param, folder)


@pytest.fixture(params=PLACEMENTS)
def writing(server: Running, folder: Path, request: pytest.FixtureRequest) -> Pipeline:
    """Either of those with a head that writes."""
    return Pipeline(server, f"{request.param}-writers", request.param, folder / f"{request.param}-writers")


def _fresh(server: Running, name: str, folder: Path) -> Pipeline:
    found = Pipeline(server, name, name, folder / name)
    found.forget()
    return found


@pytest.fixture
def gate(folder: Path) -> Iterator[Gate]:
    """A row at which `c`, `d` and `s` wait until it is opened, at the latest when the test ends."""
    feature = next(_gated)
    gate = Gate(feature / 2, folder / f"{feature:g}")
    yield gate
    gate.open()


_gated = itertools.count(int(GATED), 2)


def timed(ask: Any, *rows: float, **more: Any) -> tuple[httpx.Response, float]:
    """An answer, and after how many seconds it came."""
    started = time.monotonic()
    answer = ask(*rows, **more)
    return answer, time.monotonic() - started


def omission(answer: httpx.Response) -> tuple[str, str, str]:
    """Which heads an answer lacks, and status and reason of `c`."""
    assert answer.status_code == 200, answer.text
    said = answer.json()["parameters"]
    return said["omitted_heads"], said["head.c.status"], said["head.c.reason"]


def right(row: float, heads: str) -> dict[str, list[float]]:
    """What the heads answer."""
    return {f"y{one}": [row * 2 + "abcds".index(one) + 1] * 4 for one in heads}


def written(row: float, heads: str) -> dict[str, list[float]]:
    """What the heads of `writers` answer."""
    adds = {"w": 1000, "h": 1000, "z": 2}
    return {f"y{one}": [row * 2 + adds[one]] * 4 for one in heads}


# Failures


def test_a_head_that_may_be_omitted_fails_alone(pipeline: Pipeline) -> None:
    answer = pipeline.ask(FAIL, heads="a,b,c")
    assert omission(answer) == ("c", "failed", "step `c`: RuntimeError: yc can't bear 14")
    assert outputs_of(answer) == right(FAIL, "ab")


def test_a_head_that_may_not_be_omitted_fails_the_request(pipeline: Pipeline) -> None:
    answer = pipeline.ask(FAIL, heads="a,b,d")
    assert (answer.status_code, answer.json()) == (500, {"error": "step `d`: RuntimeError: yd can't bear 14"})
    assert outputs_of(pipeline.ask(FAIL, heads="a,b")) == right(FAIL, "ab")


def test_an_answer_without_any_head_is_an_error(pipeline: Pipeline) -> None:
    answer = pipeline.ask(FAIL, heads="c")
    assert (answer.status_code, answer.json()) == (500, {"error": "step `c`: RuntimeError: yc can't bear 14"})


@pytest.mark.parametrize(
    ("row", "status", "message"),
    [
        pytest.param(666.0, 500, "step `trunk`: ValueError: the trunk does not like 666", id="raises"),
        pytest.param(400.0, 400, "400 is no input", id="BadInput"),
    ],
)
def test_a_trunk_that_fails_fails_all(pipeline: Pipeline, row: float, status: int, message: str) -> None:
    answer = pipeline.ask(row, heads="a,b,c")
    assert (answer.status_code, answer.json()) == (status, {"error": message})
    assert set(pipeline.calls()) == {"trunk"}


def test_neighbours_of_failing_rows_are_unharmed(pipeline: Pipeline) -> None:
    bad = {1: 666.0, 3: FAIL, 5: 400.0}
    bodies = [pipeline.body(bad.get(index % 8, 20.0 + index), heads="a,b,c") for index in range(96)]
    for index, answer in enumerate(ask_all(pipeline, bodies, connections=32)):
        match index % 8:
            case 1:
                assert answer.status_code == 500, answer.text
            case 3:
                assert omission(answer)[:2] == ("c", "failed")
                assert outputs_of(answer) == right(FAIL, "ab")
            case 5:
                assert answer.status_code == 400, answer.text
            case _:
                assert outputs_of(answer) == right(20.0 + index, "abc")


# Heads that take too long


def test_a_slow_head_is_omitted_in_its_time(pipeline: Pipeline, gate: Gate) -> None:
    answer, took_s = timed(pipeline.ask, gate.row, heads="a,b,c")
    head, status, reason = omission(answer)
    assert (head, status) == ("c", "timeout")
    assert f"head `c`: its timeout_s of {TIMEOUT_S:g} s passed" in reason
    assert outputs_of(answer) == right(gate.row, "ab")
    assert TIMEOUT_S * 0.9 < took_s < SOON_S


def test_a_slow_head_that_may_not_be_omitted_gives_504(pipeline: Pipeline, gate: Gate) -> None:
    answer, took_s = timed(pipeline.ask, gate.row, heads="a,b,d")
    assert answer.status_code == 504, answer.text
    assert f"head `d`: its timeout_s of {TIMEOUT_S:g} s passed" in answer.json()["error"]
    assert TIMEOUT_S * 0.9 < took_s < SOON_S


def test_the_requests_deadline_bounds_every_head(pipeline: Pipeline, gate: Gate) -> None:
    answer, took_s = timed(pipeline.ask, gate.row, heads="a,s", parameters={"timeout": 500_000})
    assert answer.status_code == 504, answer.text
    assert "head `s`: the deadline of 0.5 s passed" in answer.json()["error"]
    assert 0.45 < took_s < SOON_S


def test_the_requests_deadline_omits_a_head(pipeline: Pipeline, gate: Gate) -> None:
    answer, took_s = timed(pipeline.ask, gate.row, heads="a,b,c", parameters={"timeout": 300_000})
    assert omission(answer)[:2] == ("c", "timeout")
    assert outputs_of(answer) == right(gate.row, "ab")
    assert took_s < SOON_S


def test_a_head_that_is_done_leaves_before_one_that_is_not(pipeline: Pipeline, gate: Gate) -> None:
    with pipeline.stream(gate.row, parameters={"heads": ["a", "b", "s"]}) as response:
        events = events_in(response)
        first = {event["head"]: event["status"] for event in (next(events), next(events))}
        assert first == {"a": "ok", "b": "ok"}
        gate.open()
        last, end = events
    assert (last["head"], last["status"], last["ys"]) == ("s", "ok", right(gate.row, "s")["ys"])
    assert end["heads"] == {"a": "ok", "b": "ok", "s": "ok"}


def test_a_request_is_answered_before_a_slow_head_of_its_batch(server: Running, folder: Path, gate: Gate) -> None:
    pipeline = Pipeline(server, "pair", "fused", folder / "pair")
    pipeline.forget()
    with in_background(lambda: pipeline.ask(gate.row, heads="b,s")) as slow:
        assert outputs_of(pipeline.ask(1, heads="a,b")) == right(1, "ab")
        assert slow == [None]
        calls = [("trunk", 2), ("ya", 1), ("yb", 2), ("ys", 1)]
        wait_for(lambda: sorted(pipeline.runs()) == calls, 20, "the slow head to begin")
        gate.open()
    assert outputs_of(slow[0]) == right(gate.row, "bs")


# Heads that hang or die, in replicas of their own


def test_a_hanging_head_holds_up_no_sibling_and_comes_back_when_killed(graph: Pipeline) -> None:
    running = graph.running
    with in_background(*[lambda: timed(graph.ask, HANG, heads="a,b,c")] * 12) as hanging:
        wait_for(lambda: graph.calls()["yc"], what="the head to hang")
        others = ask_all(graph, [graph.body(float(row + 20), heads="a,b") for row in range(300)], connections=16)
    for row, answer in enumerate(others):
        assert outputs_of(answer) == right(row + 20, "ab")
    for answer, took_s in hanging:
        assert omission(answer)[:2] == ("c", "timeout")
        assert outputs_of(answer) == right(HANG, "ab")
        assert took_s < SOON_S

    with in_background(lambda: graph.ask(1, heads="a,c")) as waiting:
        os.kill(running.replica_pid("graph.c"), signal.SIGKILL)
    assert omission(waiting[0])[1] in ("unavailable", "timeout")
    assert outputs_of(waiting[0]) == right(1, "a")
    _check_away_and_back(graph)


def test_a_head_that_ends_its_process_is_reported_and_comes_back(graph: Pipeline) -> None:
    answer = graph.ask(EXIT, heads="a,b,c")
    head, status, reason = omission(answer)
    assert (head, status) == ("c", "unavailable")
    assert "step `c`" in reason
    assert outputs_of(answer) == right(EXIT, "ab")
    _check_away_and_back(graph)


def _check_away_and_back(graph: Pipeline) -> None:
    """See that all goes on while `c` is away, and that it comes back."""
    running = graph.running
    wait_for(lambda: "step `c` is UNAVAILABLE" in running.index("graph")["reason"], 60, "the reason in the index")
    answer, took_s = timed(graph.ask, 1, heads="a,b,c")
    head, status, reason = omission(answer)
    assert (head, status) == ("c", "unavailable")
    assert "`graph.c` is UNAVAILABLE" in reason
    assert outputs_of(answer) == right(1, "ab")
    assert took_s < SOON_S
    assert graph.ask(1, heads="c").status_code == 503
    assert (running.index("graph")["state"], running.index("graph.c")["state"]) == ("READY", "UNAVAILABLE")
    assert running.is_ready()
    assert running.is_ready("graph")

    wait_for(lambda: running.is_ready("graph.c"), 180, "another replica")
    assert outputs_of(graph.ask(1, heads="a,b,c")) == right(1, "abc")
    entry = running.index("graph")
    assert (entry["state"], entry["reason"]) == ("READY", "all steps ready")


def test_a_killed_head_that_may_not_be_omitted_fails_those_that_want_it(graph: Pipeline) -> None:
    running = graph.running
    os.kill(running.replica_pid("graph.d"), signal.SIGKILL)
    wait_for(lambda: "step `d` is UNAVAILABLE" in running.index("graph")["reason"], 60, "the loss to be noticed")
    answer = graph.ask(1, heads="a,d")
    assert answer.status_code == 503, answer.text
    assert "step `d`" in answer.json()["error"]
    assert int(answer.headers["retry-after"]) >= 1
    assert outputs_of(graph.ask(1, heads="a,b,c")) == right(1, "abc")
    wait_for(lambda: running.is_ready("graph.d"), 180, "another replica")
    assert outputs_of(graph.ask(1, heads="a,d")) == right(1, "ad")


def test_a_killed_trunk_leaves_nothing_to_answer_until_it_is_back(graph: Pipeline) -> None:
    running = graph.running
    os.kill(running.replica_pid("graph.trunk"), signal.SIGKILL)
    wait_for(lambda: not running.is_ready("graph"), 60, "the loss to be noticed")
    answer = graph.ask(1, heads="a")
    assert answer.status_code == 503, answer.text
    assert "step `trunk`" in answer.json()["error"]
    assert running.index("graph")["state"] == "UNAVAILABLE"
    wait_for(lambda: running.is_ready("graph"), 180, "another replica")
    assert outputs_of(graph.ask(1, heads="a,b,c")) == right(1, "abc")


# Heads that write into what they share


def test_a_head_that_writes_unasked_harms_nobody(writing: Pipeline) -> None:
    """In one replica it is named; with features of its own there is nothing to harm."""
    for row in range(1, 30):
        assert outputs_of(writing.ask(row, heads="h,z")) == written(row, "hz")
        answer = writing.ask(row, heads="w")
        if writing.is_fused:
            assert answer.status_code == 500, answer.text
            assert "step `w` writes into its input `features`, which other steps may read too" in answer.json()["error"]
            assert "set `mutates_features = True` in Writer" in answer.json()["error"]
        else:
            assert outputs_of(answer) == written(row, "w")


def test_siblings_of_a_head_that_writes_unasked_are_right(writing: Pipeline) -> None:
    for row in range(1, 30):
        answer = writing.generate(row)
        events = {event["head"]: event for event in events_in(answer) if "head" in event}
        assert set(events) == set("whz")
        if writing.is_fused:
            assert "step `w` writes into its input `features`" in events.pop("w")["error"]
        assert {f"y{one}": event[f"y{one}"] for one, event in events.items()} == written(row, "".join(events))


def test_batches_with_a_head_that_writes_unasked(writing: Pipeline) -> None:
    mixes = ["h,z", "w,z", "h,w,z"]
    bodies = [writing.body(row, heads=mixes[row % 3]) for row in range(200)]
    for row, answer in enumerate(ask_all(writing, bodies, connections=32)):
        if row % 3 and writing.is_fused:
            assert answer.status_code == 500, answer.text
            assert "step `w` writes into its input `features`" in answer.json()["error"]
        else:
            assert outputs_of(answer) == written(row, mixes[row % 3].replace(",", ""))
