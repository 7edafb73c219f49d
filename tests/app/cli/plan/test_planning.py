"""A whole plan, with a machine that behaves exactly as the models say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from headwater_server.cli.plan import planning
from headwater_server.cli.plan.measuring import Measured, Weights
from headwater_server.cli.plan.planning import Plan
from headwater_server.cli.plan.point import Point, grid
from headwater_server.cli.plan.profiles import Budget
from headwater_server.cli.plan.report import plan_json, plan_page, plan_text
from headwater_server.cli.plan.subject import Subject, choose_deployment, make_subject
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config
from headwater_server.errors import CommandError

GIB = 2**30
POINTS = grid([1, 8, 32], [1, 2], [1, 2])
CONFIG = {"deployments": {"one": {"model": "my.models:Scale", "timeout_s": 5}, "two": {"model": "my.models:Other"}}}


def config(content: dict[str, Any] | None = None) -> Config:
    return read_config(content or CONFIG, source="test", environment={}, flags={})


def subject(config: Config, name: str = "one") -> Subject:
    return make_subject("models.yaml", config, name, (), cores=4, seconds=4, tokens=64, input=None)


def machine(point: Point, gain: float = 1.0) -> Measured:
    own = (400 << 20) + (point.rows * point.instances << 20)
    rows = min(point.rows, 32)  # larger batches give no more
    rate = gain * min(point.calls, 2) * rows / (0.01 + 0.002 * rows)
    connections = 2 * point.rows * point.calls
    host = (230 << 20) + point.replicas * own
    p50_ms = 1000 * connections / rate
    return Measured(point, host, 80 << 20, 150 << 20, own, own, rate, p50_ms, 2 * p50_ms, connections)


Run = Callable[..., Plan]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Makes a plan; ``measure`` is the machine, ``verify`` runs a profile's file."""

    def make(
        measure: Callable[[Point], Measured] = machine, verify: Callable[[Point], Measured] | None = None,
        *, budget: int = 16 * GIB, verifies: bool = True, rounds: int = 1, points: list[Point] = POINTS,
    ) -> Plan:  # fmt: skip
        def run_file(subject: Subject, point: Point, what: str, fields: Mapping[str, Any]) -> Measured:
            served = read_config(yaml.safe_load(Path(what).read_text()), source=what, environment={}, flags={})
            (deployment,) = served.deployments.values()
            assert (deployment.batching.max_batch_size, deployment.instances, deployment.replicas.max) == point
            return (verify or machine)(point)

        monkeypatch.setattr(planning, "measure_point", lambda subject, point: measure(point))
        monkeypatch.setattr(planning, "measure_server_under_load", run_file)
        weights, files = Weights(90 << 20, "tensors"), tmp_path / "models-one"
        plan = Plan(subject(config()), Budget(budget), 16 * GIB, weights, files, lambda line: None)
        plan.run(points, checks=verifies, rounds=rounds if verifies else 0)
        return plan

    return make


def test_a_plan_predicts_what_it_then_measures(run: Run, tmp_path: Path) -> None:
    plan = run()
    assert not plan.ended
    assert plan.held_out is not None
    assert plan.held_out < 1e-6
    assert [trial.point for trial in plan.checks] == [Point(16, 2, 2), Point(3)]
    trials = [*plan.checks, *(one.trial for one in plan.profiles if one.trial is not None)]
    assert len(trials) == 5
    for trial in trials:
        assert {one.what for one in trial.comparisons} == {"host memory", "rate"}
        assert not any(one.is_off for one in trial.comparisons)
        assert trial.measured is not None
        assert trial.predicted is not None
        assert trial.predicted.p50_ms == pytest.approx(trial.measured.p50_ms)
        assert trial.predicted.p99_ms == pytest.approx(trial.measured.p99_ms)
    names = [f"models-one-{name}.yaml" for name in ("balanced", "memory-lean", "throughput")]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    text = (tmp_path / names[0]).read_text()
    assert "# Predicted: " in text
    assert "# Measured:  " in text
    assert "timeout_s: 5" in text
    assert "two" not in yaml.safe_load(text)["deployments"]


def test_what_was_not_allowed_is_neither_run_nor_recommended(run: Run) -> None:
    ran: list[Point] = []

    def measure(point: Point) -> Measured:
        ran.append(point)
        return machine(point)

    plan = run(measure, points=grid([1, 4], [1], [1]))
    assert [one.point for one in plan.profiles] == [Point(4)] * 3
    proposed = [*ran, *(trial.point for trial in plan.checks), *(row.point for row in plan.size_rows())]
    assert {(point.instances, point.replicas) for point in proposed} == {(1, 1)}
    assert max(point.rows for point in proposed) == 4


def test_one_noisy_size_bends_nothing(run: Run) -> None:
    noisy, tries = Point(8, 1, 2), list[Point]()

    def measure(point: Point) -> Measured:
        tries.append(point)
        found = machine(point)
        disturbed = replace(found, rate=found.rate / 10, p50_ms=6.0, p99_ms=286.0)
        return disturbed if point == noisy and tries.count(point) == 1 else found

    plan = run(measure)
    assert tries.count(noisy) == 3
    assert plan.predictor is not None
    assert plan.predictor.at(noisy).rate == pytest.approx(machine(noisy).rate)
    assert "an outlier, so medians of 3 measurements" in plan_text(plan)
    assert plan_json(plan)["points"][POINTS.index(noisy)]["rates"] == [
        machine(noisy).rate / 10, *2 * (machine(noisy).rate,),
    ]  # fmt: skip


def test_throughput_is_the_size_that_measured_most(run: Run, tmp_path: Path) -> None:
    def verify(point: Point) -> Measured:
        return machine(point, gain=0.5 if point == Point(32, 2) else 1.0)

    plan = run(verify=verify)
    one = plan.profiles[1]
    assert one.trial is not None
    assert one.trial.measured is not None
    assert one.point == Point(8, 1, 2)
    assert one.note.startswith("as memory-lean: 32 × 2 × 1 was expected to be faster, but gave ")
    assert one.trial.measured.rate == max(
        other.trial.measured.rate for other in plan.profiles if other.trial and other.trial.measured
    )
    text = (tmp_path / "models-one-throughput.yaml").read_text()
    assert "max_batch_size: 8" in text
    assert f"{machine(Point(8, 1, 2)).rate:.4g} rows/s" in text
    assert Point(32, 2) in [trial.point for trial in plan.checks]  # what it gave can still be read


def test_what_is_told_is_the_same_everywhere(run: Run) -> None:
    plan = run()
    told = json.loads(json.dumps(plan_json(plan)))
    assert told["complete"] is True
    assert len(told["points"]) == 12
    assert [one["name"] for one in told["profiles"]] == ["memory-lean", "throughput", "balanced"]
    assert all(one["error"] == pytest.approx(0, abs=1e-6) for one in told["profiles"][0]["comparisons"])
    assert len(told["sizes"]) == 12
    assert all(one["fits"] for one in told["sizes"])
    text = plan_text(plan)
    assert "memory-lean" in text
    assert "too far off" not in text


def test_a_prediction_that_is_wrong_is_marked(run: Run) -> None:
    plan = run(verify=lambda point: machine(point, gain=0.5))
    text = plan_text(plan)
    assert text.count("too far off") == 3
    assert "+100.0%" in text


def test_profiles_are_run_in_turns_and_the_median_is_stated_with_its_spread(run: Run, tmp_path: Path) -> None:
    order: list[Point] = []

    def verify(point: Point) -> Measured:
        order.append(point)
        return machine(point, gain=(1.0, 0.9, 1.08)[order.count(point) - 1])

    plan = run(verify=verify, rounds=3)
    assert order == [Point(8, 1, 2), Point(32, 2), Point(4, 2, 2)] * 3
    trial = plan.profiles[2].trial
    assert trial is not None
    measured = trial.measured
    assert measured is not None
    assert measured.rate == machine(Point(4, 2, 2)).rate  # the one in the middle, not the mean
    assert measured.spread == pytest.approx(0.18)
    text = (tmp_path / "models-one-balanced.yaml").read_text()
    assert "# Medians of 3 rounds: 400 to 480 (18%) rows/s.\n# The rounds differ that much: " in text
    table = plan_text(plan)
    assert table.count("rounds differ: not a quiet machine") == 3
    assert "400 to 480 (18%)" in table
    told = plan_json(plan)["profiles"][2]
    assert told["measured"]["rates"] == pytest.approx([444.4, 400, 480], abs=0.1)
    assert told["measured"]["spread"] == pytest.approx(0.18)


def test_rounds_that_agree_are_not_marked(run: Run, tmp_path: Path) -> None:
    plan = run(rounds=2)
    assert "rounds differ" not in plan_text(plan)
    text = (tmp_path / "models-one-balanced.yaml").read_text()
    assert "Medians of 2 rounds" in text
    assert "The rounds differ" not in text


def test_the_load_is_told_as_the_command_that_makes_it(run: Run, tmp_path: Path) -> None:
    plan = run()
    text = (tmp_path / "models-one-balanced.yaml").read_text()
    assert (
        "#   headwater bench http://127.0.0.1:8000 --model one --connections 32 --seconds 4 --warmup 1 --timeout 5\n"
    ) in text
    assert plan_json(plan)["profiles"][2]["bench"][:3] == ["URL", "--model", "one"]


def test_a_profile_that_fails_in_a_later_round_states_no_figure(run: Run, tmp_path: Path) -> None:
    order: list[Point] = []

    def verify(point: Point) -> Measured:
        order.append(point)
        if point.replicas == 1 and order.count(point) == 2:
            raise CommandError("it went away")
        return machine(point)

    plan = run(verify=verify, rounds=3)
    assert order.count(Point(32, 2)) == 2
    trial = plan.profiles[1].trial
    assert trial is not None
    assert trial.measured is None
    assert "no figure, since round 2 failed: it went away" in (tmp_path / "models-one-throughput.yaml").read_text()


def test_ctrl_c_in_a_later_round_keeps_the_rounds_before(run: Run) -> None:
    order: list[Point] = []

    def verify(point: Point) -> Measured:
        order.append(point)
        if len(order) == 5:
            raise KeyboardInterrupt
        return machine(point)

    plan = run(verify=verify, rounds=3)
    assert plan.ended == "stopped by hand"
    assert [len(one.trial.rounds) for one in plan.profiles if one.trial is not None] == [2, 1, 1]
    assert all(one.trial.measured is not None for one in plan.profiles if one.trial is not None)


def test_ctrl_c_in_the_sweep_still_fits_and_recommends_but_runs_nothing_more(run: Run) -> None:
    def measure(point: Point) -> Measured:
        if point == POINTS[5]:
            raise KeyboardInterrupt
        return machine(point)

    plan = run(measure)
    assert plan.ended == "stopped by hand"
    assert len(plan.measured) == 5
    assert not plan.checks
    assert all(one.trial is not None and one.trial.measured is None for one in plan.profiles)
    told = plan_json(plan)
    assert told["complete"] is False
    assert told["points"][5]["error"] == "stopped by hand"


def test_a_profile_that_does_not_run_says_why_and_the_others_do(run: Run, tmp_path: Path) -> None:
    def verify(point: Point) -> Measured:
        if point.replicas == 1:
            raise CommandError("no module 'my'")
        return machine(point)

    plan = run(verify=verify)
    errors = [one.trial.error for one in plan.profiles if one.trial is not None]
    assert errors == ["", "no module 'my'", ""]
    assert "not run, no module 'my'" in (tmp_path / "models-one-throughput.yaml").read_text()


def test_if_nothing_fits_no_file_is_written_and_the_smallest_need_is_told(run: Run, tmp_path: Path) -> None:
    plan = run(budget=GIB // 2, verifies=False)
    assert plan.smallest_excess() == "needs 631 MiB of the machine's memory, 512 MiB may be taken"
    assert "Nothing fits" in plan_text(plan)
    assert all(row.excess for row in plan.size_rows())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_page_with_curves(run: Run) -> None:
    pytest.importorskip("matplotlib", exc_type=ImportError)
    page = plan_page(run())
    assert page.count("<svg") == 3
    assert "memory-lean" in page


def test_which_deployment_is_meant() -> None:
    with pytest.raises(CommandError, match="--deployment: expected one of one, two, got none"):
        choose_deployment(config(), None)
    with pytest.raises(CommandError, match="got 'three'"):
        choose_deployment(config(), "three")
    assert choose_deployment(config(), "two") == "two"
    steps = {"trunk": {"model": "a:T"}, "heads": {"x": {"model": "a:H"}}, "placement": "graph"}
    with pytest.raises(CommandError, match="placement graph"):
        choose_deployment(config({"deployments": {"fan": {"pipeline": steps}}}), None)
    with pytest.raises(CommandError, match="expected a deployment without versions, got 'c'"):
        choose_deployment(config({"deployments": {"c": {"model": "a:M", "versions": {"1": {}}}}}), None)


def test_tokens_that_the_context_has_no_room_for(tmp_path: Path) -> None:
    model = {
        "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "max_position_embeddings": 100,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(CommandError, match="--tokens: expected at most 52"):
        subject(config({"deployments": {"lm": {"model": f"lm:{tmp_path}"}}}), "lm")
