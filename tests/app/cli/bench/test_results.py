"""The report of a bench, from outcomes."""

from __future__ import annotations

from array import array

import pytest

from headwater_server.cli.bench.job import Load, RequestSet
from headwater_server.cli.bench.outcomes import Outcomes
from headwater_server.cli.bench.plan import LoadPlan, LoadPoint
from headwater_server.cli.bench.request_bodies import Body, Wishes
from headwater_server.cli.bench.results import Results

LOAD = Load(rate_per_s=1.0)
PLAN = LoadPlan(
    "http://127.0.0.1:8000", "lm", "chat", [LOAD], "poisson", max_connections=1, seconds=1, warmup_s=0, repeats=3,
    timeout_s=1, processes=1, input=None, heads=[None], constraints=["schema", "none"], wishes=Wishes(), slo={}, key="",
    json=None, html=None,
)  # fmt: skip
POINTS = [
    LoadPoint(LOAD, None, RequestSet(PLAN.url, "lm", (Body(b"{}"),), "chat", "", 1.0), constraint)
    for constraint in PLAN.constraints
]


def run(tokens_per_s: float) -> Outcomes:
    return Outcomes(latencies_s=array("d", [0.1]), tokens_per_s=tokens_per_s)


def test_a_constraint_is_compared_within_a_repeat_also_after_one_without_requests() -> None:
    constrained = {1: run(10), 2: run(20)}
    free = {0: run(1000), 1: run(20), 2: run(40)}
    report = Results(PLAN, "lm", ("", ""), POINTS, "", [constrained, free]).report()
    assert report["points"][0]["tokens_per_s_ratio"] == pytest.approx({"median": 0.5, "min": 0.5, "max": 0.5})
    assert report["points"][1]["tokens_per_s_ratio"] is None
