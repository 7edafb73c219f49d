"""Which memory a plan may take, and which exit status it ends with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater_server.cli.plan.measuring import Measured, Weights
from headwater_server.cli.plan.memory_model import Need
from headwater_server.cli.plan.plan_command import exit_status, smallest_gpu
from headwater_server.cli.plan.planning import Plan
from headwater_server.cli.plan.point import Point
from headwater_server.cli.plan.prediction import Prediction, fit
from headwater_server.cli.plan.profiles import Budget, Profile
from headwater_server.cli.plan.subject import make_subject
from headwater_server.cli.plan.trial import Trial
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Deployment

POINT = Point(8)
MEASURED = Measured(POINT, 1000, 100, 200, 700, 700, 100.0, 5.0, 9.0, 16)
NEED = Need(1000, 0)


def plan_with(*rounds: Measured, error: str = "", ended: str = "", budget: int = 10_000) -> Plan:
    """A plan whose only profile was predicted to take 1,000 bytes and give 100 rows/s, and gave that in its rounds."""
    config = read_config({"deployments": {"one": {"model": "a:B"}}}, source="test", environment={}, flags={})
    subject = make_subject("a:B", config, "one", (), cores=2, seconds=4, tokens=64, input=None)
    plan = Plan(subject, Budget(budget), None, Weights(None, "unknown"), Path("one"), print, ended=ended)
    plan.predictor = fit([MEASURED], subject)
    trial = Trial(POINT, Prediction(NEED, NEED, 100.0, 5.0, 9.0), list(rounds), error)
    plan.profiles.append(Profile("throughput", POINT, "", trial))
    return plan


def test_replicas_on_several_gpus_fit_if_those_of_one_fit() -> None:
    deployment = {"model": "a:B", "device": ["cuda:0", "cuda:1"]}
    config = read_config({"deployments": {"one": deployment}}, source="test", environment={}, flags={})
    subject = make_subject("a:B", config, "one", (), cores=2, seconds=4, tokens=64, input=None)
    predictor = fit([replace(MEASURED, device_bytes=600, device="cuda:0")], subject)
    found = [predictor.at(POINT._replace(replicas=count)) for count in (1, 2, 3)]
    assert [(prediction.need.device, prediction.most.device) for prediction in found] == [
        (600, 600), (1200, 600), (1800, 1200),
    ]  # fmt: skip
    assert [Budget(10_000, 1000).excess(prediction.most) == "" for prediction in found] == [True, True, False]


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({}, 10),
        ({"device": "cuda:1"}, 20),
        ({"device": ["cuda:1", "cuda:2"]}, 15),
        ({"device": ["cpu", "cuda:1"]}, 20),
        ({"device": ["cuda:1", "cuda:3"]}, None),
        ({"device": "cuda", "environment": {"CUDA_VISIBLE_DEVICES": "1"}}, 20),
        ({"device": ["cuda:0", "cuda:1"], "environment": {"CUDA_VISIBLE_DEVICES": "1"}}, None),
    ],
)
def test_the_smallest_gpu_that_replicas_may_get_is_the_bound(
    fields: dict[str, Any], size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    deployment = Deployment.model_validate({"model": "a:B", **fields})
    assert smallest_gpu(deployment, {"GPU 0": 10, "GPU 1": 20, "GPU 2": 15}) == size


def test_what_holds_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(plan_with(MEASURED, replace(MEASURED, rate=95.0))) == 0
    assert exit_status(plan_with()) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("rounds", "told"),
    [
        ([replace(MEASURED, rate=60.0)], "8 × 1 × 1: rate: the prediction differs from the measurement by +66.7%"),
        (
            [replace(MEASURED, host_bytes=1500)],
            "8 × 1 × 1: host memory: the prediction differs",
        ),
        (
            [replace(MEASURED, rate=rate) for rate in (80.0, 100.0, 101.0)],
            "8 × 1 × 1: its rounds differ by 21%: the machine was busy with something else",
        ),
    ],
)
def test_figures_that_did_not_hold_are_3(rounds: list[Measured], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(plan_with(*rounds)) == 3
    assert told in capsys.readouterr().err


def test_a_size_that_two_profiles_have_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_with(replace(MEASURED, rate=60.0))
    plan.profiles.append(replace(plan.profiles[0]))
    assert exit_status(plan) == 3
    assert capsys.readouterr().err.count("rate: the prediction") == 1


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (plan_with(replace(MEASURED, rate=60.0), ended="stopped by hand"), "not complete: stopped by hand"),
        (plan_with(error="it went away"), "8 × 1 × 1 could not be run: it went away"),
        (plan_with(budget=10), "nothing fits"),
    ],
)
def test_what_could_not_be_found_out_is_1(plan: Plan, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_status(plan) == 1
    assert told in capsys.readouterr().err
