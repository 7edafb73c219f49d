"""Several threads that compute at once on one model."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.errors import DeclarationError
from headwater.replica.callee import CalleeRequest
from headwater.replica.served import Served, load_served
from headwater.wire.handshake import ReplicaSpec
from headwater.wire.report import REPORT, decode_reports

SERVICES = str(Path(__file__).parents[2] / "services")


def load(model: str, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Served:
    monkeypatch.syspath_prepend(SERVICES)
    spec = ReplicaSpec("m", model, "", (SERVICES,), os.getcwd(), device="cpu", **fields)
    served = load_served(spec, lambda text: None, lambda reason: None)
    assert isinstance(served, Served)
    return served


def test_the_signature_is_known_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SERVICES)
    spec = ReplicaSpec("m", "scaled:Slow", "", (SERVICES,), os.getcwd(), options={"seconds": 0}, device="cpu")
    said: list[object] = []
    served = load_served(spec, said.append, lambda reason: None, on_known=said.append)
    assert said == ["importing scaled:Slow", served.signature, "loading on cpu"]


def test_each_instance_has_a_runner_and_all_have_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[Any] = load("scaled:Slow", monkeypatch, options={"seconds": 0}, instances=3).handlers
    runners = [one.__self__ for one in handlers]
    assert len(set(map(id, runners))) == 3
    assert len({id(runner.step.model) for runner in runners}) == 1


def test_an_answer_says_how_many_rows_all_instances_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    served = load("scaled:Meeting", monkeypatch, options={"parties": 2}, max_batch_size=2, instances=2)
    handlers: list[Any] = served.handlers

    def held(handler: Any, count: int) -> int:
        (answer,) = asyncio.run(handler([CalleeRequest({"x": np.ones((count, 1), np.float32)}, {})]))
        return decode_reports(answer[REPORT].tobytes(), count).held_rows

    for _ in range(2):  # a second time, when nothing of the first calls is left
        with ThreadPoolExecutor(2) as pool:
            assert max(pool.map(held, handlers, (1, 2))) == 3  # the first to answer sees both


@pytest.mark.parametrize(
    ("model", "what"),
    [("scaled:Waiting", "scaled:Waiting has an async __call__"), ("fanout:Pieces", "fanout:Pieces streams")],
)
def test_what_computes_its_calls_in_another_way_has_one_instance(
    model: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeclarationError, match=r"instances: expected 1, got 2: ") as caught:
        load(model, monkeypatch, instances=2)
    assert what in str(caught.value)
    load(model, monkeypatch)
