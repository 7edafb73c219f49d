"""A trunk and its heads, in both placements: what runs for which request, and that the answers are right."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.asking import Pipeline, ask_all, outputs_of
from tests.running import Running, in_background, leftovers, segments_of, serve, wait_for
from tests.services.fanout import GATED, Backbone, Classifier, Layer

PLACEMENTS = ["fused", "graph"]
OUTPUTS = {"a": "ya", "b": "yb", "c": "yc"}
MIXES = [mix for count in (1, 2, 3) for mix in itertools.combinations(OUTPUTS, count)]
CLASSES = {"a": 3, "b": 10, "c": 2}


def arrays(placement: str) -> dict[str, str]:
    """Torch's where steps hand tensors on as they are. In a graph each has a replica, which starts faster without."""
    return {"arrays": "torch" if placement == "fused" else "numpy"}


def abc(placement: str, folder: Path) -> dict[str, Any]:
    """Adds 1, 2 or 3 to the doubled row."""
    head = {"model": "fanout:Head"}
    kind = arrays(placement)
    return {
        "pipeline": {
            "placement": placement,
            "trunk": {"model": "fanout:Trunk", "options": kind},
            "heads": {
                "a": {**head, "options": {"output": "ya", "add": 1, **kind}},
                "b": {**head, "options": {"output": "yb", "add": 2}},
                "c": {**head, "options": {"output": "yc", "add": 3, "gates": str(folder), **kind}},
            },
        },
        "batching": {"max_batch_size": 8},
        "environment": {"FANOUT_LOG": str(folder / placement)},
    }


def layers(placement: str) -> dict[str, Any]:
    """Real layers, on torch or numpy."""
    return {
        "pipeline": {
            "placement": placement,
            "trunk": {"model": "fanout:Backbone", "options": arrays(placement)},
            "heads": {
                name: {"model": "fanout:Classifier", "options": {**classifier(name), **arrays(placement)}}
                for name in CLASSES
            },
        },
        "batching": {"max_batch_size": 32},
        "warmup_batch_sizes": [1],
    }


def classifier(head: str) -> dict[str, Any]:
    """The options of one head of `layers`."""
    return {"output": f"y{head}", "classes": CLASSES[head], "seed": ord(head)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the steps write, and where gates are opened."""
    return tmp_path_factory.mktemp("fanout")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """Two pipelines in each placement."""
    deployments = {placement: abc(placement, folder) for placement in PLACEMENTS}
    deployments |= {f"{placement}-layers": layers(placement) for placement in PLACEMENTS}
    with serve({"deployments": deployments}) as running:
        yield running
        segments = segments_of(running.folder)
        assert running.stop() == 0
        assert leftovers(running.folder, segments) == []


@pytest.fixture(scope="module")
def pipelines(server: Running, folder: Path) -> dict[str, Pipeline]:
    """Those that count, by placement."""
    return {placement: Pipeline(server, placement, placement, folder / placement) for placement in PLACEMENTS}


@pytest.fixture(params=PLACEMENTS)
def pipeline(pipelines: dict[str, Pipeline], request: pytest.FixtureRequest) -> Pipeline:
    """One that counts, with nothing written down yet."""
    found = pipelines[request.param]
    found.forget()
    return found


def right(rows: list[float], heads: tuple[str, ...]) -> dict[str, list[float]]:
    """What `abc` answers."""
    return {
        OUTPUTS[head]: [value * 2 + add for value in rows for _ in range(4)]
        for add, head in enumerate(OUTPUTS, start=1)
        if head in heads
    }


# What runs


def test_warm_up_calls_every_step_at_each_batch_size(pipeline: Pipeline) -> None:
    sizes: dict[str, set[int]] = {}
    for name, rows in pipeline.warmup:
        sizes.setdefault(name, set()).add(rows)
    assert sizes == {name: {1, 2, 4, 8} for name in ("trunk", "ya", "yb", "yc")}


def test_warm_up_is_not_in_the_statistics(server: Running, pipelines: dict[str, Pipeline]) -> None:
    for pipeline in pipelines.values():
        pipeline.forget()
        before = pipeline.executions()
        pipeline.ask(1)
        assert pipeline.executions() - before == Counter(trunk=1, a=1, b=1, c=1)


@pytest.mark.parametrize("mix", MIXES, ids="".join)
def test_a_request_runs_the_trunk_once_and_the_heads_that_it_wants(pipeline: Pipeline, mix: tuple[str, ...]) -> None:
    before = pipeline.executions()
    answer = pipeline.ask(1, 2, 3, heads=list(mix))
    assert outputs_of(answer) == right([1, 2, 3], mix)
    assert sorted(pipeline.runs()) == sorted([("trunk", 3), *((OUTPUTS[head], 3) for head in mix)])
    assert pipeline.executions() - before == Counter(["trunk", *mix])


@pytest.mark.parametrize(
    ("said", "heads"),
    [
        pytest.param({}, "abc", id="nothing"),
        pytest.param({"heads": "c, a"}, "ac", id="parameter"),
        pytest.param({"outputs": [{"name": "yb"}]}, "b", id="outputs"),
        pytest.param({"outputs": [{"name": "yb"}], "heads": ["a", "b"]}, "b", id="both"),
    ],
)
def test_heads_are_picked_by_parameter_or_outputs(pipeline: Pipeline, said: dict[str, Any], heads: str) -> None:
    assert outputs_of(pipeline.ask(1, **said)) == right([1], tuple(heads))
    assert pipeline.calls() == Counter(["trunk", *(OUTPUTS[head] for head in heads)])


def test_random_mixes_run_every_step_for_the_rows_that_need_it(pipeline: Pipeline) -> None:
    chance = random.Random(7)
    asked = [
        (chance.choice(MIXES), [float(chance.randrange(100)) for _ in range(chance.randint(1, 3))]) for _ in range(300)
    ]
    before = pipeline.executions()
    bodies = [pipeline.body(*rows, heads=list(mix)) for mix, rows in asked]
    for (mix, rows), answer in zip(asked, ask_all(pipeline, bodies, connections=24), strict=True):
        assert outputs_of(answer) == right(rows, mix)

    wanted = Counter(trunk=sum(len(rows) for _, rows in asked))
    for mix, rows in asked:
        wanted.update({OUTPUTS[head]: len(rows) for head in mix})
    assert pipeline.rows() == wanted
    calls = pipeline.calls()
    told = Counter({OUTPUTS.get(step, step): count for step, count in (pipeline.executions() - before).items()})
    assert told == calls
    assert calls["trunk"] < len(asked)
    if pipeline.is_fused:
        _check_batches(pipeline.runs())


def _check_batches(runs: list[tuple[str, int]]) -> None:
    """Every batch: the trunk once, then each head at most once, and no head on more rows than the trunk."""
    batches: list[dict[str, int]] = []
    for name, rows in runs:
        if name == "trunk":
            batches.append({})
        assert name not in batches[-1]
        assert rows <= batches[-1].get("trunk", rows) <= 8
        batches[-1][name] = rows
    assert any(len(set(batch.values())) > 1 for batch in batches), "no batch was mixed"


def test_a_mixed_batch_runs_each_wanted_head_once_on_its_rows(pipelines: dict[str, Pipeline], folder: Path) -> None:
    pipeline = pipelines["fused"]
    pipeline.forget()
    with in_background(lambda: pipeline.ask(GATED / 2, heads="c")) as first:
        wait_for(lambda: pipeline.calls()["yc"], what="the first batch to be at the gate")
        with ThreadPoolExecutor(8) as pool:
            mixes = [("a", "b")] * 3 + [("a",)] * 5
            answers = [pool.submit(pipeline.ask, index, heads=list(mix)) for index, mix in enumerate(mixes)]
            (folder / f"{GATED:g}").touch()
            for index, (mix, answer) in enumerate(zip(mixes, answers, strict=True)):
                assert outputs_of(answer.result()) == right([index], mix)
    assert first[0].status_code == 200
    assert pipeline.calls()["yc"] == 1
    assert (pipeline.rows()["ya"], pipeline.rows()["yb"]) == (8, 3)
    _check_batches([*pipeline.runs(), ("trunk", 2), ("ya", 1)])


# Right answers


@pytest.fixture(scope="module")
def asked() -> list[tuple[tuple[str, ...], np.ndarray[Any, Any]]]:
    """Requests to `layers`: heads and rows."""
    chance = np.random.default_rng(3)
    mixes = [("a", "b"), ("a", "c"), ("a", "b", "c")]
    return [
        (mixes[index % 3], chance.standard_normal((int(chance.integers(1, 4)), 16), dtype=np.float32))
        for index in range(400)
    ]


@pytest.fixture(scope="module")
def answered(
    server: Running, asked: list[tuple[tuple[str, ...], np.ndarray[Any, Any]]]
) -> dict[str, list[dict[str, np.ndarray[Any, Any]]]]:
    """By placement, the answers to these requests at 64 connections."""
    found = {}
    for placement in PLACEMENTS:
        pipeline = Pipeline(server, f"{placement}-layers", placement, Path("/nonexistent"))
        bodies = [
            {
                "inputs": [{"name": "x", "datatype": "FP32", "shape": list(rows.shape), "data": rows.ravel().tolist()}],
                "parameters": {"heads": list(mix)},
            }
            for mix, rows in asked
        ]
        answers = ask_all(pipeline, bodies, connections=64)
        found[placement] = [
            {name: np.array(data, np.float32) for name, data in outputs_of(answer).items()} for answer in answers
        ]
    return found


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_answers_equal_the_layers_called_directly(
    asked: list[tuple[tuple[str, ...], np.ndarray[Any, Any]]],
    answered: dict[str, list[dict[str, np.ndarray[Any, Any]]]],
    placement: str,
) -> None:
    trunk = Backbone()
    heads = {name: Classifier(**classifier(name)) for name in CLASSES}
    for (mix, rows), outputs in zip(asked, answered[placement], strict=True):
        assert set(outputs) == {f"y{head}" for head in mix}
        hidden = torch.tanh(layer(trunk, torch.from_numpy(rows)))
        for head in mix:
            expected = torch.softmax(layer(heads[head], hidden), -1).numpy().ravel()
            np.testing.assert_allclose(outputs[f"y{head}"], expected, rtol=0, atol=1e-5)


def layer(model: Layer, x: torch.Tensor) -> torch.Tensor:
    """Torch's own layer with the model's weights."""
    return torch.nn.functional.linear(x, torch.from_numpy(model.weight), torch.from_numpy(model.bias))


def test_both_placements_answer_alike(answered: dict[str, list[dict[str, np.ndarray[Any, Any]]]]) -> None:
    for fused, graph in zip(answered["fused"], answered["graph"], strict=True):
        assert fused.keys() == graph.keys()
        for name, data in fused.items():
            np.testing.assert_allclose(data, graph[name], rtol=0, atol=1e-5)


# Bad input


@pytest.mark.parametrize(
    ("said", "named"),
    [
        pytest.param({"heads": ["d"]}, ["parameters.heads", "'a', 'b', 'c'", "d"], id="unknown-head"),
        pytest.param({"heads": ["trunk"]}, ["parameters.heads", "'a', 'b', 'c'", "trunk"], id="trunk"),
        pytest.param({"heads": ["a", "b", "a"]}, ["parameters.heads[2]", "a second time"], id="same-head-twice"),
        pytest.param({"heads": "a,a"}, ["parameters.heads", "a second time"], id="same-head-twice-in-text"),
        pytest.param({"heads": []}, ["parameters.heads", "'a', 'b', 'c'", "no head"], id="empty-list"),
        pytest.param({"heads": ""}, ["parameters.heads", "'a', 'b', 'c'", "no head"], id="empty-text"),
        pytest.param({"heads": 3}, ["parameters.heads", "3"], id="number"),
        pytest.param(
            {"heads": ["b"], "outputs": [{"name": "ya"}]}, ["outputs[0].name", "'b'", "'a'"], id="head-left-out"
        ),
        pytest.param({"outputs": [{"name": "features"}]}, ["outputs[0].name", "features", "ya"], id="inner-output"),
    ],
)
def test_wrong_heads_get_400_before_anything_runs(pipeline: Pipeline, said: dict[str, Any], named: list[str]) -> None:
    answer = pipeline.ask(1, **said)
    assert answer.status_code == 400, answer.text
    assert [word for word in named if word not in answer.json()["error"]] == [], answer.text
    assert pipeline.runs() == []


@pytest.mark.parametrize("beside", [False, True])
def test_an_inner_tensor_is_no_input(pipeline: Pipeline, beside: bool) -> None:
    body = pipeline.body(1)
    features = {**body["inputs"][0], "name": "features"}
    answer = pipeline.running.client.post(
        pipeline.url(), json={"inputs": [*body["inputs"], features] if beside else [features]}
    )
    assert answer.status_code == 400, answer.text
    assert "features" in answer.json()["error"]
    assert "x" in answer.json()["error"]
    assert pipeline.runs() == []


@pytest.mark.parametrize(
    ("first", "got"),
    [
        pytest.param(-1.0, "FP32 [0, 4]", id="no-rows"),
        pytest.param(-2.0, "FP64 [1, 4]", id="datatype"),
        pytest.param(-3.0, "FP32 [2, 4]", id="grown"),
        pytest.param(-4.0, "FP32 [1, 2]", id="width"),
        pytest.param(-5.0, "nothing", id="nothing"),
    ],
)
def test_a_corrupt_tensor_between_steps_is_named(pipeline: Pipeline, first: float, got: str) -> None:
    answer = pipeline.ask(first, heads="a")
    expected = f"step `a`, input `features`: expected FP32 [1, 4], got {got} from `trunk`"
    if got == "nothing" and not pipeline.is_fused:  # the trunk's own replica says it
        expected = "step `trunk`: Trunk returned no output 'features', expected features"
    assert (answer.status_code, answer.json()["error"]) == (500, expected)
    assert pipeline.calls()["ya"] == 0
    assert outputs_of(pipeline.ask(1)) == right([1], ("a", "b", "c"))


def test_rows_beside_a_corrupt_one_are_unharmed(pipeline: Pipeline) -> None:
    bodies = [pipeline.body(-4.0 if index % 8 == 0 else index) for index in range(64)]
    for index, answer in enumerate(ask_all(pipeline, bodies, connections=32)):
        if index % 8 == 0:
            # The trunk looks at its first row only.
            assert answer.status_code == 500 or outputs_of(answer) == right([-4.0], ("a", "b", "c"))
        else:
            assert outputs_of(answer) == right([index], ("a", "b", "c"))
