"""Pipelines in the configuration: what each form says, and what is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.model import Embedding
from headwater.pipeline import FeatureCacheSpec, StepSpec
from headwater_server.config.reader import load_config, read_config
from headwater_server.config.schema import Config
from headwater_server.errors import ConfigError

MODEL = {"model": "m:M"}
FAN = {"trunk": {"model": "m:Trunk"}, "heads": {"a": MODEL, "b": MODEL}}
CHAIN = {"steps": {"first": MODEL, "second": {**MODEL, "inputs": {"x": "first.y"}}}, "heads": ["second"]}


def read(pipeline: object, environment: dict[str, str] | None = None, **deployments: Any) -> Config:
    content = {"deployments": {"p": {"pipeline": pipeline}, **deployments}}
    return read_config(content, source="test.yaml", environment=environment or {}, flags={})


def refused(pipeline: object, **deployments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(pipeline, **deployments)
    return str(caught.value).removeprefix("test.yaml: ")


def with_step(**fields: Any) -> dict[str, Any]:
    return {"placement": "graph", "trunk": MODEL, "heads": {"a": {**MODEL, **fields}}}


# The two forms.


def test_a_trunk_and_its_heads() -> None:
    heads = {
        "a": {**MODEL, "options": {"k": 1}, "timeout_s": 0.5},
        "b": {**MODEL, "on_error": "omit", "expand": "trunk"},
    }
    pipeline = read({"trunk": {"model": "m:Trunk"}, "heads": heads}).deployments["p"].pipeline
    assert pipeline is not None
    assert list(pipeline.all_steps()) == ["trunk", "a", "b"]
    spec = pipeline.spec()
    assert spec.steps == (
        StepSpec("trunk", "m:Trunk"),
        StepSpec("a", "m:M", options={"k": 1}, timeout_s=0.5),
        StepSpec("b", "m:M", on_error="omit", expand="trunk"),
    )
    assert (spec.heads, spec.trunk, spec.placement, spec.embedding) == (("a", "b"), "trunk", "fused", None)


def test_steps_and_the_names_of_heads() -> None:
    pipeline = read({**CHAIN, "embedding": {"input": "text", "output": "v", "tokens": "n"}}).deployments["p"].pipeline
    assert pipeline is not None
    spec = pipeline.spec()
    assert spec.steps == (StepSpec("first", "m:M"), StepSpec("second", "m:M", inputs={"x": "first.y"}))
    assert (spec.heads, spec.trunk) == (("second",), None)
    assert spec.embedding == Embedding("text", "v", "n")


def test_a_step_may_be_called_trunk_where_there_is_none() -> None:
    pipeline = read({"steps": {"trunk": MODEL}, "heads": ["trunk"]}).deployments["p"].pipeline
    assert pipeline is not None
    assert pipeline.spec().trunk is None


def test_the_environment_reaches_into_heads() -> None:
    config = read(FAN, {"HEADWATER_DEPLOYMENTS__P__PIPELINE__HEADS__A__TIMEOUT_S": "7"})
    pipeline = config.deployments["p"].pipeline
    assert pipeline is not None
    assert pipeline.all_steps()["a"].timeout_s == 7


FORM = "`deployments.p.pipeline`: "


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        ({"heads": {"a": MODEL}}, FORM + "expected either `trunk` and `heads`, or `steps` and `heads`"),
        ({**FAN, "steps": {"a": MODEL}}, FORM + "expected either `trunk` and `heads`, or `steps` and `heads`"),
        ({"trunk": MODEL}, "`deployments.p.pipeline.heads`: required, but missing"),
        ({"trunk": MODEL, "heads": ["a"]}, FORM + "heads: expected steps by name with `trunk`, got a list of names"),
        (
            {"steps": {"a": MODEL}, "heads": {"a": MODEL}},
            FORM + "heads: expected a list of names with `steps`, got steps",
        ),
        (
            {"trunk": MODEL, "heads": "a"},
            "`deployments.p.pipeline.heads`: expected steps by name with `trunk`, or a list of names with "
            "`steps`, got 'a'",
        ),
        ({"trunk": MODEL, "heads": {}}, "`deployments.p.pipeline.heads`: dictionary should have at least 1 item"),
        ({"steps": {"a": MODEL}, "heads": []}, "`deployments.p.pipeline.heads`: tuple should have at least 1 item"),
        ({"steps": {}, "heads": ["a"]}, "`deployments.p.pipeline.steps`: dictionary should have at least 1 item"),
        (
            {"steps": {"a": MODEL, "b": MODEL}, "heads": ["c"]},
            FORM + "pipeline, heads: expected some of its steps `a`, `b`, got `c`",
        ),
        ({"steps": {"a": MODEL}, "heads": ["a", "a"]}, FORM + "pipeline, heads: `a` is listed 2 times"),
        ({**FAN, "placement": "fussed"}, "`deployments.p.pipeline.placement`: input should be 'fused' or 'graph'"),
        ({**FAN, "head": {}}, "`deployments.p.pipeline.head`: unknown field"),
        ({**FAN, "embedding": {"input": "x"}}, "`deployments.p.pipeline.embedding.output`: required, but missing"),
        (
            {**FAN, "embedding": {"input": "x", "output": "y", "dimensions": "k"}},
            "`deployments.p.pipeline.embedding.dimensions`: unknown field",
        ),
        (3, "`deployments.p.pipeline`: input should be a valid dictionary"),
    ],
)
def test_a_form_that_is_none(pipeline: object, message: str) -> None:
    assert refused(pipeline).startswith(message)


@pytest.mark.parametrize("name", ["two words", "a.b", "", "x" * 51, "input", "é"])
def test_a_name_that_no_step_can_have(name: str) -> None:
    message = refused({"steps": {name: MODEL}, "heads": [name]})
    assert message.startswith(
        f"{FORM}step name {name!r}: expected letters, digits, '_' or '-', at most 50 characters, and not 'input'"
    )


def test_a_head_called_as_the_trunk() -> None:
    message = refused({"trunk": MODEL, "heads": {"trunk": MODEL}})
    assert message.startswith(FORM + "heads: 'trunk' is the name of the trunk; rename the head")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("gone.y", "step `b`, input `x`: unknown step `gone`; expected `trunk`, `a`, `b` or `input`"),
        ("y", "step `b`, input `x`: expected STEP.OUTPUT or input.NAME, got `y`"),
        ("b.y", "pipeline: expected steps without a cycle, got `b` -> `b`"),
    ],
)
def test_a_source_that_is_none(source: str, message: str) -> None:
    text = refused({**FAN, "heads": {"a": MODEL, "b": {**MODEL, "inputs": {"x": source}}}})
    assert text.startswith(FORM + message)
    assert "{" not in text  # names are enough; the section isn't repeated


# What is wrong within a step.


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"model": "m"}, "`deployments.p.pipeline.heads.b.model`: expected module:Class such as "),
        ({"model": "onnx:"}, "`deployments.p.pipeline.heads.b.model`: expected a path after onnx:"),
        ({"model": "lm:x"}, "`deployments.p.pipeline.heads.b`: model: a language model can't be a step, got 'lm:x'"),
        ({"modell": "m:M"}, "`deployments.p.pipeline.heads.b.modell`: unknown field"),
        ({**MODEL, "timeout_s": 0}, "`deployments.p.pipeline.heads.b.timeout_s`: input should be greater than 0"),
        ({**MODEL, "on_error": "skip"}, "`deployments.p.pipeline.heads.b.on_error`: input should be 'fail' or 'omit'"),
        ({**MODEL, "inputs": {"x": 3}}, "`deployments.p.pipeline.heads.b.inputs.x`: input should be a valid string"),
        ({}, "`deployments.p.pipeline.heads.b`: expected either `model` or `deployment`"),
        ({**MODEL, "deployment": "d"}, "`deployments.p.pipeline.heads.b`: expected either `model` or `deployment`"),
        (None, "`deployments.p.pipeline.heads.b`: input should be a valid dictionary"),
    ],
)
def test_what_is_wrong_in_a_head_is_named_once_and_without_pydantics_own_names(head: object, message: str) -> None:
    text = refused({"trunk": MODEL, "heads": {"a": MODEL, "b": head}})
    assert message in text
    for internal in ("dict[", "tuple", "function-", "[key]", "()"):
        assert internal not in text


def test_a_head_whose_name_is_a_number() -> None:
    message = refused({"trunk": MODEL, "heads": {1: MODEL}})
    assert message == "`deployments.p.pipeline.heads.1`: input should be a valid string, got 1"


def test_everything_that_is_wrong_in_heads_is_named_at_once() -> None:
    message = refused({"trunk": {"model": "t"}, "heads": {"a": {"model": "m"}, "b": {**MODEL, "replicas": 0}}})
    for field in ("trunk.model", "heads.a.model", "heads.b.replicas"):
        assert f"`deployments.p.pipeline.{field}`" in message


def test_what_came_from_the_environment_is_said_to_in_heads_too() -> None:
    with pytest.raises(
        ConfigError,
        match=r"`deployments\.p\.pipeline\.heads\.a\.timeout`: unknown field; "
        r"did you mean `timeout_s`\? \(environment variable HEADWATER_",
    ):
        read(FAN, {"HEADWATER_DEPLOYMENTS__P__PIPELINE__HEADS__A__TIMEOUT": "7"})


@pytest.mark.parametrize(("field", "value"), [("timeout_s", 1), ("on_error", "fail")])
def test_what_only_heads_have(field: str, value: object) -> None:
    message = refused({"trunk": {**MODEL, field: value}, "heads": {"a": MODEL}})
    assert message.startswith(f"{FORM}step `trunk`, {field}: expected for heads only")
    steps = {"first": {**MODEL, field: value}, "second": MODEL}
    assert f"step `first`, {field}: expected for heads only" in refused({"steps": steps, "heads": ["second"]})


def test_options_of_a_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"`deployments\.p`: options: expected in the pipeline's steps"):
        read_config(
            {"deployments": {"p": {"pipeline": FAN, "options": {"k": 1}}}}, source="t", environment={}, flags={}
        )


def test_a_model_and_a_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"`deployments\.p`: expected either `model` or `pipeline`"):
        read_config({"deployments": {"p": {"pipeline": FAN, **MODEL}}}, source="t", environment={}, flags={})


# Placement.

SETTINGS = {
    "batching": {"max_batch_size": 4},
    "replicas": 2,
    "device": "cpu",
    "threads": 3,
    "environment": {"A": "1"},
    "warmup_batch_sizes": [],
    "load_timeout_s": 5,
    "python": "bin/python",
    "cache": {"max_bytes": 9},
}


@pytest.mark.parametrize("field", sorted(SETTINGS.keys() - {"cache"}))
def test_a_fused_step_has_no_settings_of_its_own(field: str) -> None:
    message = refused({**with_step(**{field: SETTINGS[field]}), "placement": "fused"})
    assert message.startswith(
        f"{FORM}step `a`, {field}: a fused pipeline's steps share one replica; set it in the deployment, or choose "
        "`placement: graph`"
    )


def test_a_fused_replica_keeps_the_outputs_of_the_trunk_but_of_no_head() -> None:
    trunk = {**MODEL, "cache": {"max_bytes": "1MiB", "ttl_s": 5}}
    deployment = read({"trunk": trunk, "heads": {"a": MODEL}}).deployments["p"]
    assert deployment.pipeline is not None
    step, _ = deployment.pipeline.spec().steps
    assert (step.cache, deployment.feature_bytes) == (FeatureCacheSpec(1 << 20, 5), 1 << 20)
    message = refused({**with_step(cache={"max_bytes": 9}), "placement": "fused"})
    assert message.startswith(f"{FORM}step `a`, cache: expected a step that is no head; `cache` of the deployment")
    graph = read({"placement": "graph", "trunk": trunk, "heads": {"a": MODEL}}).deployments["p"]
    assert graph.pipeline is not None
    assert [one.cache for one in graph.pipeline.spec().steps] == [None, None]  # gateways keep them
    assert graph.feature_bytes == 0


def test_a_fused_step_is_no_deployment() -> None:
    message = refused({"trunk": MODEL, "heads": {"a": {"deployment": "d"}}}, d=MODEL)
    assert message == (
        f"{FORM}step `a`: a fused pipeline computes its steps in one replica: expected `model`, got deployment `d`; "
        "or choose `placement: graph`"
    )


@pytest.mark.parametrize("field", ["options", *SETTINGS])
def test_a_step_that_is_a_deployment_has_no_settings_of_its_own(field: str) -> None:
    step = {"deployment": "d", field: {"k": 1} if field == "options" else SETTINGS[field]}
    message = refused({"placement": "graph", "trunk": MODEL, "heads": {"a": step}}, d=MODEL)
    assert message.startswith(
        f"`deployments.p.pipeline.heads.a`: `{field}`: expected in the deployment `d`, not in the step"
    )


def test_a_deployment_that_is_unknown() -> None:
    message = refused({"placement": "graph", "trunk": MODEL, "heads": {"a": {"deployment": "q"}}}, d=MODEL)
    assert message == "deployments.p.pipeline, step `a`: unknown deployment `q`; expected one of `p`, `d`"


@pytest.mark.parametrize("name", ["p", "other"])
def test_a_deployment_that_is_a_pipeline(name: str) -> None:
    pipeline = {"placement": "graph", "trunk": MODEL, "heads": {"a": {"deployment": name}}}
    message = refused(pipeline, other={"pipeline": FAN})
    assert message == (
        f"deployments.p.pipeline, step `a`: expected a deployment of one model, got the pipeline `{name}`; name its "
        "steps here instead"
    )


def test_a_step_under_whose_name_another_deployment_is_served() -> None:
    message = refused({**FAN, "placement": "graph"}, **{"p.a": MODEL})
    assert message == (
        "deployments.p.pipeline, step `a`: it is served as `p.a`, which is the name of another deployment; rename one"
    )
    assert read(FAN, **{"p.a": MODEL})  # fused steps have no names of their own


def test_what_is_wrong_between_deployments_is_not_put_down_to_any_override() -> None:
    pipeline = {"placement": "graph", "trunk": MODEL, "heads": {"a": {"deployment": "q"}}}
    with pytest.raises(ConfigError) as caught:
        read(pipeline, {"HEADWATER_SERVER__PORT": "1"})
    assert "laid over" not in str(caught.value)


def test_a_fused_pipeline_is_one_deployment() -> None:
    config = read(FAN, other=MODEL)
    assert config.all_deployments() == config.deployments


def test_each_step_of_a_graph_is_a_deployment() -> None:
    pipeline = {**FAN, "placement": "graph", "heads": {"a": MODEL, "b": {"deployment": "shared"}}}
    found = read(pipeline, shared={"model": "m:Shared"}).all_deployments()
    assert {name: one.model for name, one in found.items()} == {
        "p.trunk": "m:Trunk",
        "p.a": "m:M",
        "shared": "m:Shared",
    }
    assert all(one.pipeline is None for one in found.values())


def test_a_step_has_what_the_pipeline_has_and_lays_its_own_over_it() -> None:
    fields = {
        "batching": {"max_batch_size": 8, "max_queue_size": 99},
        "environment": {"A": "0", "B": "2"},
        "timeout_s": 3,
        "replicas": 5,
        "threads": 7,
        "cache": {"max_bytes": 7},  # of whole answers
    }
    content = {"deployments": {"p": {"pipeline": with_step(options={"k": 1}, **SETTINGS), **fields}}}
    found = read_config(content, source="t", environment={}, flags={}).all_deployments()
    trunk, head = found["p.trunk"], found["p.a"]
    assert (trunk.batching.max_batch_size, trunk.environment, trunk.replicas.min) == (8, {"A": "0", "B": "2"}, 5)
    assert (trunk.timeout_s, trunk.threads, trunk.device, trunk.options) == (3, 7, "auto", {})
    assert (head.batching.max_batch_size, head.batching.max_queue_size) == (4, 1024)  # replaced as a whole
    assert head.environment == {"A": "1", "B": "2"}  # merged
    assert (head.replicas.max, head.device, head.threads) == (2, "cpu", 3)
    assert (head.warmup_batch_sizes, head.load_timeout_s, head.python) == ((), 5, Path("bin/python"))
    assert (head.timeout_s, head.options) == (3, {"k": 1})
    assert (trunk.cache, head.cache and head.cache.max_bytes) == (None, 9)


# Keys that stand twice.


def load(path: Path, text: str) -> Config:
    path.write_text(text)
    return load_config(path, environment={}, flags={})


def test_a_deployment_that_stands_twice(tmp_path: Path) -> None:
    text = "deployments:\n  a: {model: m:M}\n  b: {model: m:M}\n  a: {model: m:M}\n"
    with pytest.raises(ConfigError, match=r"not valid YAML: duplicate key `a` .*line 4"):
        load(tmp_path / "c.yaml", text)


def test_an_input_that_is_mapped_twice(tmp_path: Path) -> None:
    text = (
        "deployments:\n  p:\n    pipeline:\n      trunk: {model: m:M}\n      heads:\n        a:\n"
        "          model: m:M\n          inputs:\n            x: trunk.y\n            x: input.x\n"
    )
    with pytest.raises(ConfigError, match=r"not valid YAML: duplicate key `x` .*line 10"):
        load(tmp_path / "c.yaml", text)


def test_a_merged_mapping_may_be_overridden_and_merged_again(tmp_path: Path) -> None:
    text = (
        "deployments:\n"
        "  a: &a {model: m:M, batching: {max_batch_size: 4}}\n"
        "  p: {pipeline: {trunk: {model: m:M}, heads: {h: {model: m:M, options: &o {<<: {k: 1}, k: 2}}}}}\n"
        "  b: {<<: *a, options: {<<: *o, l: 3}, model: n:N}\n"
    )
    config = load(tmp_path / "c.yaml", text)
    assert config.deployments["b"].model == "n:N"
    assert config.deployments["b"].batching.max_batch_size == 4
    assert config.deployments["b"].options == {"k": 2, "l": 3}


def test_a_deployment_that_is_a_language_model() -> None:
    pipeline = {"placement": "graph", "trunk": MODEL, "heads": {"a": {"deployment": "q"}}}
    message = refused(pipeline, q={"model": "lm:models/llama"})
    assert message == "deployments.p.pipeline, step `a`: a language model can't be a step, got the deployment `q`"
