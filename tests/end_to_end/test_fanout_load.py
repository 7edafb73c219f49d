"""Pipelines that don't fit together: the server says which step and tensor, and serves what does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.asking import Pipeline, outputs_of
from tests.running import Running, leftovers, serve, wait_for

PLACEMENTS = ["fused", "graph"]
MISMATCH = "step `wide`, input `features`: shape mismatch: expected FP32 [5], got FP32 [4] from `trunk.features`"
STREAMS = "step `pieces` streams, which `placement: graph` can't carry from one deployment to another"


def deployment(placement: str, head: str, model: str, **options: Any) -> dict[str, Any]:
    """A trunk and one head."""
    return {
        "pipeline": {
            "placement": placement,
            "trunk": {"model": "fanout:Trunk"},
            "heads": {head: {"model": f"fanout:{model}", "options": options}},
        },
        "warmup_batch_sizes": [],
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Three that can't be, and two that can."""
    deployments = {
        "fused-wide": deployment("fused", "wide", "Wide"),
        "graph-wide": deployment("graph", "wide", "Wide"),
        "graph-streams": deployment("graph", "pieces", "Pieces"),
        "fused-good": deployment("fused", "a", "Head", output="ya", add=1),
        "graph-good": deployment("graph", "a", "Head", output="ya", add=1),
    }
    with serve({"deployments": deployments}, ready=False) as running:
        wait_for(lambda: all(running.is_ready(f"{placement}-good") for placement in PLACEMENTS), 180, "the good ones")
        yield running
        assert running.stop() == 0
        assert leftovers(running.folder) == []


@pytest.mark.parametrize(
    ("name", "reason"), [("fused-wide", MISMATCH), ("graph-wide", MISMATCH), ("graph-streams", STREAMS)]
)
def test_the_index_and_the_log_say_what_does_not_fit(server: Running, name: str, reason: str) -> None:
    wait_for(lambda: reason in server.index(name)["reason"], 180, f"the reason, not {server.index(name)}")
    assert server.index(name)["state"] in ("FAILED", "LOADING")
    lines = server.log.read_text
    wait_for(lambda: any(reason in line and name in line for line in lines().splitlines()), 30, "its line in the log")


@pytest.mark.parametrize("name", ["fused-wide", "graph-wide", "graph-streams"])
def test_what_does_not_fit_is_not_served(server: Running, name: str) -> None:
    answer = Pipeline(server, name, name.partition("-")[0], Path("/nonexistent")).ask(1)
    assert answer.status_code == 503, answer.text
    assert name in answer.json()["error"]
    assert not server.is_ready(name)
    assert not server.is_ready()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_others_are_served(server: Running, placement: str) -> None:
    pipeline = Pipeline(server, f"{placement}-good", placement, Path("/nonexistent"))
    assert outputs_of(pipeline.ask(1)) == {"ya": [3.0] * 4}


def test_a_fused_pipeline_that_does_not_fit_is_given_up(server: Running) -> None:
    wait_for(lambda: server.index("fused-wide")["state"] == "FAILED", 180, "the tries to be over")
    assert MISMATCH in server.index("fused-wide")["reason"]
    assert server.replica_folders("fused-wide") == []
