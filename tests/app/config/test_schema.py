"""Reading the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from headwater_server.config.content import config_content
from headwater_server.config.pipeline import Step
from headwater_server.config.schema import (
    FORMER_FIELDS,
    Config,
    Deployment,
    InvalidConfig,
    Unparsed,
    load_config,
    load_what,
    read_config,
)
from headwater_server.config.sections import ReplicaBounds, Section
from headwater_server.errors import ConfigError

MINIMAL: dict[str, Any] = {"deployments": {"scale": {"model": "headwater.zoo.scale:Scale"}}}


def read(content: object, environment: dict[str, str] | None = None, **flags: Any) -> Any:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return read_config(content, source="test.yaml", environment=environment or {}, flags=dotted)


VLLM: dict[str, Any] = {"model": "vllm:m", "python": "python"}


def adapted(adapters: dict[str, str], **others: object) -> dict[str, Any]:
    """A configuration with these adapters."""
    return {"deployments": {"a": {**VLLM, "options": {"adapters": adapters}}, **others}}


def weighing(weights: object) -> dict[str, Any]:
    """A configuration with these weights of priorities."""
    return {"deployments": {"a": {"model": "m:M", "batching": {"priority_weights": weights}}}}


def test_a_model_is_all_that_is_needed() -> None:
    config = read(MINIMAL)
    assert config.server.port == 8000
    assert config.server.host == "127.0.0.1"
    assert config.deployments["scale"].batching.max_queue_size == 1024


def test_the_environment_wins_over_the_file_and_flags_over_both() -> None:
    content = {**MINIMAL, "server": {"port": 1, "workers": 1, "host": "::1"}}
    config = read(content, {"HEADWATER_SERVER__PORT": "2", "HEADWATER_SERVER__WORKERS": "2"}, server__port=3)
    assert (config.server.port, config.server.workers, config.server.host) == (3, 2, "::1")


def test_the_environment_reaches_into_deployments_whatever_its_case() -> None:
    config = read(MINIMAL, {"HEADWATER_DEPLOYMENTS__SCALE__BATCHING__MAX_BATCH_SIZE": "7"})
    assert config.deployments["scale"].batching.max_batch_size == 7


def test_weights_of_priorities_can_be_set_from_outside() -> None:
    config = read(
        weighing({1: 8, 10: 1}),
        {"HEADWATER_DEPLOYMENTS__A__BATCHING__PRIORITY_WEIGHTS__5": "4"},
        deployments__a__batching__priority_weights__10=2,
    )
    assert config.deployments["a"].batching.priority_weights == {1: 8, 5: 4, 10: 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["a"], "expected a mapping with `deployments`, got list"),
        ({}, "`deployments`: required, but missing"),
        ({"deployments": {}}, "`deployments`: dictionary should have at least 1 item"),
        ({**MINIMAL, "sever": {}}, "`sever`: unknown field"),
        ({**MINIMAL, "server": {"port": "abc"}}, "`server.port`: "),
        ({**MINIMAL, "server": {"port": 70000}}, "input should be less than or equal to 65535, got 70000"),
        ({"deployments": {"a b": {"model": "m:M"}}}, "deployment name 'a b': expected letters"),
        ({"deployments": {"a": {}}}, "`deployments.a`: expected either `model` or `pipeline`"),
        ({"deployments": {"a": {"model": "m"}}}, "`deployments.a.model`: expected module:Class such as"),
        ({"deployments": {"a": {"model": "lm:"}}}, "`deployments.a.model`: expected lm:PATH such as lm:models/llama"),
        ({"deployments": {"a": {"model": "lm:a/b:c"}}}, "`deployments.a.model`: expected lm:PATH such as"),
        ({"deployments": {"a": {"model": "m:M", "batch": {}}}}, "`deployments.a.batch`: unknown field"),
        ({"deployments": {"a": {"model": "m:M", "device": "gpu"}}}, "`deployments.a.device`: expected auto, cpu"),
        ({"deployments": {"a": {"model": "m:M", "timeout_s": 0}}}, "`deployments.a.timeout_s`: "),
        (adapted({"b c": "x"}), "adapter name 'b c': expected letters"),
        (adapted({"b": ""}), "`deployments.a`: options.adapters.b: "),
        (adapted({"a": "x"}), "deployments.a.options.adapters: `a` is the name of another deployment; rename one"),
        (
            adapted({"b": "x"}, b=VLLM),
            "deployments.a.options.adapters: `b` is the name of another deployment; rename one",
        ),
        (
            adapted({"b": "x"}, c={**VLLM, "options": {"adapters": {"b": "x"}}}),
            "deployments.c.options.adapters: `b` is the name of another adapter, of `a`; rename one",
        ),
        (weighing({}), "`deployments.a.batching.priority_weights`: dictionary should have at least 1 item"),
        (weighing({0: 1}), "`deployments.a.batching.priority_weights.0`: "),
        (weighing({11: 1}), "input should be less than or equal to 10, got 11"),
        (weighing({5: 0}), "`deployments.a.batching.priority_weights.5`: "),
        (weighing({"high": 1}), "`deployments.a.batching.priority_weights.high`: "),
        (
            {"deployments": {"a": {"model": "m:M", "batching": {"max_padding": 1}}}},
            "`deployments.a.batching.max_padding`: input should be less than or equal to 0.9, got 1",
        ),
        (
            {"deployments": {"a": {"model": "m:M", "batching": {"max_padding": 0}}}},
            "`deployments.a.batching.max_padding`: input should be greater than or equal to 0.01, got 0",
        ),
    ],
)
def test_a_wrong_field_is_named(content: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert message in str(caught.value)
    assert str(caught.value).startswith("test.yaml: ")


def test_all_wrong_fields_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read({"deployments": {"a": {"model": "m", "replicas": 0}}, "server": {"port": -1}})
    for field in ("deployments.a.model", "deployments.a.replicas", "server.port"):
        assert f"`{field}`" in str(caught.value)


def test_what_came_from_outside_the_file_is_said_to() -> None:
    with pytest.raises(
        ConfigError,
        match=r"`server\.prot`: unknown field; did you mean `port`\? \(environment variable HEADWATER_SERVER__PROT",
    ):
        read(MINIMAL, {"HEADWATER_SERVER__PROT": "1"})
    with pytest.raises(
        ConfigError, match=r"`deployments\.text`: expected either `model` or `pipeline`.* \(environment variable"
    ):
        read(MINIMAL, {"HEADWATER_DEPLOYMENTS__TEXT__TIMEOUT_S": "5"})
    with pytest.raises(ConfigError) as caught:
        read({**MINIMAL, "server": {"port": "abc"}}, {"HEADWATER_DEPLOYMENTS__SCALE__TIMEOUT_S": "5"})
    assert "laid over" not in str(caught.value)


def deployment(**fields: Any) -> Any:
    return read({"deployments": {"a": {"model": "m:M", **fields}}}).deployments["a"]


def test_replicas_are_a_number_or_bounds() -> None:
    for given, least, most in ((3, 3, 3), ({"min": 2, "max": 5}, 2, 5), ({"max": 4}, 1, 4)):
        found = deployment(replicas=given).replicas
        assert (found.min, found.max, found.is_fixed) == (least, most, least == most)
    assert deployment().replicas.max == 1


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (0, "`deployments.a.replicas`: expected 1 to 1000, or {min: 1, max: 3}, got 0"),
        (1001, "expected 1 to 1000"),
        (True, "expected a number, or bounds such as {min: 1, max: 3}, got True"),
        ("3", "expected a number, or bounds such as {min: 1, max: 3}, got '3'"),
        ({"min": 3, "max": 2}, "expected min <= max, got min 3 and max 2"),
        ({"min": 1}, "`deployments.a.replicas.max`: required"),
        ({"min": 1, "max": 1001}, "`deployments.a.replicas.max`: "),
        ({"min": 1, "max": 2, "step": 1}, "`deployments.a.replicas.step`: unknown field"),
    ],
)
def test_replicas_that_cannot_be_are_refused(replicas: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment(replicas=replicas)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "size"),
    [(1000, 1000), ("4GiB", 4 * 2**30), ("512MiB", 2**29), ("1.5 GB", 1_500_000_000), ("2000", 2000), ("10kB", 10_000)],
)
def test_memory_is_bytes_or_a_number_with_a_unit(given: object, size: int) -> None:
    assert deployment(memory=given).memory == size


def test_as_many_calls_are_in_flight_as_instances_need_unless_said_otherwise() -> None:
    assert deployment().max_in_flight == 2
    assert deployment(instances=4).max_in_flight == 5
    assert deployment(instances=4, batching={"max_in_flight": 4}).max_in_flight == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": "much"}, "`deployments.a.memory`: expected bytes, or a number with a unit such as 512MiB"),
        ({"memory": 0}, "`deployments.a.memory`: "),
        ({"device": []}, "`deployments.a.device`: "),
        ({"device": {"cpu": 1}}, "`deployments.a.device`: expected auto, cpu, cuda or cuda:N, or a list such as "),
        ({"device": ["cuda", "cuda:0"]}, "`deployments.a.device`: expected each device once"),
        ({"device": ["auto", "cuda:0"]}, "`deployments.a.device`: expected cpu, cuda or cuda:N each, got 'auto'"),
        ({"instances": 0}, "`deployments.a.instances`: "),
        ({"instances": 3, "batching": {"max_in_flight": 2}}, "batching.max_in_flight: expected at least instances = 3"),
        ({"model": "lm:x", "instances": 2}, "instances: expected 1 for a language model"),
        ({"scaling": {"queue_wait_ms": 0}}, "`deployments.a.scaling.queue_wait_ms`: "),
    ],
)
def test_what_replicas_cannot_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        deployment(**fields)
    assert message in str(caught.value)


def test_a_fused_pipeline_has_one_instance_and_a_step_of_a_graph_its_own() -> None:
    steps = {"trunk": {"model": "m:T"}, "heads": {"h": {"model": "m:H", "instances": 3, "device": ["cuda:1", "cpu"]}}}
    fused = {"deployments": {"p": {"pipeline": {"trunk": {"model": "m:T"}, "heads": {"h": {"model": "m:H"}}}}}}
    fused["deployments"]["p"]["instances"] = 2  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="instances: expected 1 for a fused pipeline"):
        read(fused)
    graph = {"pipeline": {"placement": "graph", **steps}, "device": "cuda:0"}
    found = read({"deployments": {"p": graph}}).all_deployments()
    assert (found["p.h"].instances, found["p.h"].max_in_flight, found["p.h"].placements) == (3, 4, ("cuda:1", "cpu"))
    assert (found["p.trunk"].instances, found["p.trunk"].placements) == (1, ("cuda:0",))
    few = {"pipeline": {"placement": "graph", **steps}, "batching": {"max_in_flight": 2}}
    with pytest.raises(ConfigError, match="step `h`: max_in_flight: expected at least instances = 3, got 2"):
        read({"deployments": {"p": few}})


@pytest.mark.parametrize("text", ["deployments: [", "\tdeployments: x", "a: b: c"])
def test_bad_yaml_is_said_to_be_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path, environment={}, flags={})


def test_a_missing_file_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config(tmp_path / "none.yaml", environment={}, flags={})


@pytest.mark.parametrize("name", sorted(path.name for path in (Path(__file__).parents[3] / "configs").glob("*.yaml")))
def test_the_shipped_configurations_are_valid(name: str) -> None:
    assert load_config(Path(__file__).parents[3] / "configs" / name, environment={}, flags={}).deployments


@pytest.mark.parametrize(
    ("what", "fix"),
    [
        ("server.py", "write pytriton:server.py for a PyTriton script, server:CLASS for a class in that file"),
        ("models/net.onnx", "write onnx:models/net.onnx"),
        ("net.pt2", "write torch:net.pt2"),
        ("net.pt", "write torch:net.pt"),
        ("folder", "write hf:folder for a Hugging Face folder, lm:folder if it has a language model"),
    ],
)
def test_who_names_a_models_file_is_told_how(
    what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_what(what, flags={})
    assert str(caught.value) == f"{what}: expected a YAML file, or a model such as my.models:Scale; {fix}"


@pytest.mark.parametrize("model", ["lm:models/llama", "lm:headwater.zoo:weights/tiny_lm"])
def test_a_language_model_is_a_folder(model: str) -> None:
    config = read({"deployments": {"a": {"model": model, "options": {"max_sequences": 4}}}})
    assert config.deployments["a"].model == model


def test_a_call_is_bounded_by_the_deployment_or_the_step_of_a_graph() -> None:
    def pipeline(placement: str, **head: Any) -> dict[str, Any]:
        steps = {"trunk": {"model": "m:T"}, "heads": {"a": {"model": "m:A"}, "b": {"model": "m:B", **head}}}
        return {"deployments": {"p": {"pipeline": {"placement": placement, **steps}, "max_compute_s": 5}}}

    graph = read(pipeline("graph", max_compute_s=1))
    assert [one.max_compute_s for one in graph.all_deployments().values()] == [5, 5, 1]
    assert read(pipeline("fused")).deployments["p"].max_compute_s == 5
    with pytest.raises(ConfigError, match="step `b`, max_compute_s: a fused pipeline's steps share one replica"):
        read(pipeline("fused", max_compute_s=1))


def test_a_language_model_has_a_bound_of_its_own() -> None:
    content = {"deployments": {"m": {"model": "lm:models/llama", "max_compute_s": 5}}}
    with pytest.raises(ConfigError, match=r"max_compute_s: expected none for a language model, .*`options.max_step_s`"):
        read(content)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[", "2026-02-30", "{a: 1, a: 2}", "? [x]\n: 1", "&a [*a", "[" * 5000])
def test_a_value_that_is_no_yaml_names_where_it_came_from(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^flag server\.port: not valid YAML: "):
        read(MINIMAL, server__port=Unparsed(text))
    with pytest.raises(ConfigError, match=r"^environment variable HEADWATER_SERVER__PORT: not valid YAML: "):
        read(MINIMAL, {"HEADWATER_SERVER__PORT": text})
    path = tmp_path / "bad.yaml"
    path.write_text(f"server:\n  {text}")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not valid YAML: "):
        load_config(path, environment={}, flags={})


def test_an_anchor_that_holds_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text("deployments: &d {a: *d}\n")
    with pytest.raises(ConfigError, match=r"loop\.yaml: not valid YAML: an anchor that contains itself"):
        load_config(path, environment={}, flags={})


@pytest.mark.parametrize(
    "text", ["deployments: {m: {options: &o [*o]}}\n", "&all {deployments: {m: {options: {a: *all}}}}\n"]
)
def test_options_that_hold_themselves_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "loop.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"loop\.yaml: not valid YAML: an anchor that contains itself"):
        load_config(path, environment={}, flags={})


def laughs(levels: int, form: str) -> str:
    """A document whose last level stands for 10 to the power of ``levels`` values."""
    lines = ["deployments: {m: {model: m:M, options: {", "a0: &a0 {x: ha},"]
    for level in range(1, levels + 1):
        aliases = ", ".join([f"*a{level - 1}"] * 10)
        mapping = ", ".join(f"k{index}: *a{level - 1}" for index in range(10))
        lines.append(f"a{level}: &a{level} {form.format(aliases=aliases, mapping=mapping)},")
    return "\n".join([*lines, "}}}"])


@pytest.mark.parametrize("levels", [8, 100])
@pytest.mark.parametrize("form", ["[{aliases}]", "{{{mapping}}}"])
def test_aliases_of_aliases_that_stand_for_too_much_are_refused_at_once(tmp_path: Path, levels: int, form: str) -> None:
    path = tmp_path / "laughs.yaml"
    path.write_text(laughs(levels, form))
    with pytest.raises(ConfigError, match=r"laughs\.yaml: `deployments\.m\.options\.a\d+`: expected at most 262144 "):
        load_config(path, environment={}, flags={})


def test_a_file_whose_parts_together_stand_for_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "parts.yaml"
    path.write_text("a: &a " + "x" * 30_000 + "\n" + "".join(f"{name}: *a\n" for name in "bcdefghij"))
    with pytest.raises(ConfigError, match=r"parts\.yaml: expected at most 262144 characters"):
        load_config(path, environment={}, flags={})


def test_aliases_that_stand_for_little_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text(laughs(3, "[{aliases}]"))
    options = load_config(path, environment={}, flags={}).deployments["m"].options
    assert options["a2"][9][9] == {"x": "ha"}


def test_mappings_that_merge_each_other_again_and_again_stay_small(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text(laughs(30, "{{<<: [{aliases}]}}"))
    options = load_config(path, environment={}, flags={}).deployments["m"].options
    assert options["a30"] == {"x": "ha"}


@pytest.mark.slow
def test_a_long_file_without_aliases_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "long.yaml"
    path.write_text("deployments: {m: {model: m:M, options: {labels: [" + ", ".join(["''"] * 150_000) + "]}}}")
    assert len(load_config(path, environment={}, flags={}).deployments["m"].options["labels"]) == 150_000


NAMES = ["my.model", "my__model", "my-model", "My_Model", "v1.2__b-"]


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_writes_what_is_no_letter_and_no_digit_of_a_name_as_one_underscore(name: str) -> None:
    variable = {"v1.2__b-": "V1_2_B"}.get(name, "MY_MODEL")
    config = read({"deployments": {name: {"model": "m:M"}}}, {f"HEADWATER_DEPLOYMENTS__{variable}__TIMEOUT_S": "5"})
    assert list(config.deployments) == [name]
    assert config.deployments[name].timeout_s == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_quotes_a_name(name: str) -> None:
    content = {"deployments": {one: {"model": "m:M"} for one in NAMES}}
    config = read_config(content, source="t", environment={}, flags={f'deployments."{name}".timeout_s': 5})
    assert {one for one, found in config.deployments.items() if found.timeout_s == 5} == {name}


def test_a_name_as_it_is_comes_before_one_that_only_looks_like_it() -> None:
    content = {"deployments": {"a.b": {"model": "m:M"}, "a_b": {"model": "m:M"}}}
    config = read(content, {"HEADWATER_DEPLOYMENTS__A_B__TIMEOUT_S": "5"})
    assert (config.deployments["a.b"].timeout_s, config.deployments["a_b"].timeout_s) == (30, 5)


def test_a_name_that_stands_for_several_is_refused() -> None:
    content = {"deployments": {"a.b": {"model": "m:M"}, "a-b": {"model": "m:M"}}}
    with pytest.raises(ConfigError, match=r"DEPLOYMENTS__A_B__TIMEOUT_S: `A_B` may mean `a\.b` or `a-b`; .*--set"):
        read(content, {"HEADWATER_DEPLOYMENTS__A_B__TIMEOUT_S": "5"})


@pytest.mark.parametrize("field", ["", ".", "server.", 'deployments."a', 'deployments."a"b.timeout_s', "a..b"])
def test_a_flag_that_is_no_path_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="expected names separated by dots"):
        read_config(MINIMAL, source="t", environment={}, flags={field: 1})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({**MINIMAL, "sever": {}}, "`sever`: unknown field; did you mean `server`?"),
        ({"deployments": {"a": {"model": "m:M", "batchin": {}}}}, "did you mean `batching`?"),
        ({"deployments": {"a": {"model": "m:M", "replicas": {"max": 2, "mini": 1}}}}, "did you mean `min`?"),
        (
            {
                "deployments": {
                    "a": {"pipeline": {"trunk": {"model": "m:T"}, "heads": {"h": {"model": "m:H", "on_eror": 1}}}}
                }
            },
            "`deployments.a.pipeline.heads.h.on_eror`: unknown field; did you mean `on_error`?",
        ),
        (
            {
                "deployments": {
                    "scale": {"model": "m:M"},
                    "p": {"pipeline": {"placement": "graph", "steps": {"h": {"deployment": "scal"}}, "heads": ["h"]}},
                }
            },
            "unknown deployment `scal`; expected one of `scale`, `p`; did you mean `scale`?",
        ),
    ],
)
def test_an_unknown_name_comes_with_the_one_that_may_be_meant(content: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert message in str(caught.value)


@pytest.mark.parametrize("section", ["server", "deployments.a", "deployments.a.scaling"])
@pytest.mark.parametrize("field", FORMER_FIELDS)
def test_a_field_of_an_earlier_version_says_what_became_of_it(section: str, field: str) -> None:
    flags = {f"{section}.{field}": 1}
    with pytest.raises(ConfigError) as caught:
        read_config({"deployments": {"a": {"model": "m:M"}}}, source="t", environment={}, flags=flags)
    assert f"`{section}.{field}`: it is " in str(caught.value)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "limit"),
    [(0.5, 0.5), (1, 1.0), (2000, 2000), ("16GiB", 16 * 2**30), (0, None), (1.5, None), (True, None)],
)
def test_the_memory_limit_is_a_part_or_a_size(given: object, limit: float | int | None) -> None:
    if limit is None:
        with pytest.raises(ConfigError, match=r"`server\.memory_limit`: expected a part such as 0\.8, or bytes"):
            read({**MINIMAL, "server": {"memory_limit": given}})
    else:
        found = read({**MINIMAL, "server": {"memory_limit": given}}).server.memory_limit
        assert (found, type(found)) == (limit, type(limit))
    assert read(MINIMAL).server.memory_limit == 0.8


@pytest.mark.parametrize("given", [True, False, "full", "Full", 1, ["full"]])
def test_the_access_log_is_on_or_off_or_full(given: object) -> None:
    if isinstance(given, bool) or given == "full":
        assert read({**MINIMAL, "server": {"access_log": given}}).server.access_log == given
    else:
        with pytest.raises(ConfigError, match=r"`server\.access_log`: expected true, false or full, got "):
            read({**MINIMAL, "server": {"access_log": given}})


def test_what_is_served_besides_the_api() -> None:
    assert read(MINIMAL).server.pages == ("ui", "metrics")
    assert read({**MINIMAL, "server": {"pages": []}}).server.pages == ()
    with pytest.raises(ConfigError, match=r"`server\.pages\.0`: input should be 'ui' or 'metrics', got 'docs'"):
        read({**MINIMAL, "server": {"pages": ["docs"]}})


def test_a_cache_is_bounded_and_no_language_models() -> None:
    def cached(cache: object, model: str = "m:M") -> Any:
        return read({"deployments": {"a": {"model": model, "cache": cache}}}).deployments["a"].cache

    assert read(MINIMAL).deployments["scale"].cache is None
    found = cached({"max_bytes": "64MiB"})
    assert (found.max_bytes, found.ttl_s, found.per_key) == (64 * 2**20, None, False)
    with pytest.raises(ConfigError, match=r"`deployments\.a\.cache\.max_bytes`: required, but missing"):
        cached({"ttl_s": 3})
    with pytest.raises(ConfigError, match=r"`deployments\.a\.cache\.ttl`: unknown field"):
        cached({"max_bytes": 1, "ttl": 3})
    with pytest.raises(ConfigError, match=r"cache: expected none for a language model"):
        cached({"max_bytes": 1}, "lm:models/llama")


def fields_in(section: type[Section], seen: set[type[Section]]) -> Iterator[str]:
    """What can be set in a section and below it. A field that is a section counts as what is in it; fields of a step,
    and of the whole configuration, that a deployment has too count there, and the form ``{min, max}`` of ``replicas``
    is no further field."""
    seen.add(section)
    for name, field in section.model_fields.items():
        kinds = [one for one in sections_in(field.annotation) if one is not ReplicaBounds]
        is_deployments = section in (Step, Config) and name in Deployment.model_fields
        if (not kinds or kinds == [Step]) and not is_deployments:
            yield f"{section.__name__}.{name}"
        for kind in kinds:
            if kind not in seen:
                yield from fields_in(kind, seen)


def sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [kind for one in get_args(annotation) for kind in sections_in(one)]


def test_there_are_fewer_than_sixty_fields() -> None:
    """So many a reader of the reference can take in: what no operator will ever set is a constant."""
    fields = list(fields_in(Config, set()))
    assert len(fields) < 60, fields


def test_all_that_is_wrong_with_a_deployment_as_a_whole_is_named_at_once() -> None:
    fields = {"model": "lm:x", "pipeline": {"trunk": {"model": "m:T"}, "heads": {"h": {"model": "m:H"}}}}
    with pytest.raises(InvalidConfig) as caught:
        deployment(**fields, options={"a": 1}, instances=9, max_compute_s=3, batching={"max_in_flight": 1})
    assert len(caught.value.problems) == 6
    assert all(problem.startswith("`deployments.a`: ") for problem in caught.value.problems)


def test_what_is_right_of_a_configuration_is_left_when_the_rest_is_refused() -> None:
    content = {
        "server": {"port": 7, "workers": 0},
        "sever": {},
        "deployments": {"good": {"model": "m:M"}, "bad": {"model": "m"}},
    }
    with pytest.raises(InvalidConfig) as caught:
        read(content)
    rest = caught.value.rest
    assert rest is not None
    assert (list(rest.deployments), rest.server.port, rest.server.workers) == (["good"], 7, 1)


# Versions

VERSIONS: dict[str, Any] = {"model": "m:C", "options": {"a": 1}, "versions": {"1": {}, "2": {}}}


def test_a_version_is_the_deployment_with_its_own_fields_laid_over_it() -> None:
    fields = {**VERSIONS, "timeout_s": 7, "versions": {1: {}, 2: {"options": {"b": 2}, "replicas": 2}}}
    config = read({"deployments": {"c": fields}})
    own = config.all_deployments()
    assert list(own) == ["c.1", "c.2"]
    assert (own["c.1"].options, own["c.2"].options) == ({"a": 1}, {"a": 1, "b": 2})
    assert (own["c.2"].replicas.min, own["c.2"].timeout_s, own["c.2"].versions) == (2, 7, {})
    again = read_config(config_content(config), source="here", environment={}, flags={})
    assert again == config


@pytest.mark.parametrize(
    ("traffic", "shares", "default"),
    [
        (None, {"1": 1.0, "2": 0.0}, "1"),
        ({1: 0.95, 2: 0.05}, {"1": 0.95, "2": 0.05}, "1"),
        ({"2": 1}, {"1": 0.0, "2": 1.0}, "2"),
        ({"1": 0.4, "2": 0.6, "default": "1"}, {"1": 0.4, "2": 0.6}, "1"),
        ({"1": 0.5 + 5e-7, "2": 0.5}, {"1": 0.5 + 5e-7, "2": 0.5}, "1"),
    ],
)
def test_how_requests_are_shared(traffic: Any, shares: dict[str, float], default: str) -> None:
    fields = VERSIONS if traffic is None else {**VERSIONS, "traffic": traffic}
    found = read({"deployments": {"c": fields}}).deployments["c"].shared_traffic
    assert (found.shares, found.default) == (shares, default)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"traffic": {"1": 0.5, "2": 0.4}}, "expected shares by version that sum to 1, got 0.9"),
        ({"traffic": {"1": 1, "3": 0}}, "traffic: expected shares of the versions `1`, `2`, got one of `3`"),
        ({"traffic": {"1": 1, "default": "3"}}, "traffic.default: expected one of the versions `1`, `2`, got '3'"),
        ({"traffic": {"1": 1, "shadow": "3"}}, "traffic.shadow: expected one of the versions `1`, `2`, got '3'"),
        (
            {"traffic": {"1": 0.9, "2": 0.1, "shadow": "2"}},
            "shadow: expected a version without a share, got '2', which has 0.1 of the requests",
        ),
        ({"traffic": {"1": 1, "2": 0, "default": "2", "shadow": "2"}}, "expected another version than the default"),
        ({"model": "lm:weights", "traffic": {"1": 1, "shadow": "2"}}, "texts of language models are not compared"),
        ({"traffic": 1}, "expected shares by version, such as"),
        ({"traffic": {"1": 1, "stickie": "X-User"}}, "expected the share of a version, 0 to 1, or one of the fields"),
        ({"traffic": {"1": 1.5, "2": -0.5}}, "expected the share of a version, 0 to 1, or one of the fields"),
        ({"traffic": {"1": 1, "rollback": {"errors": 0.5}}}, "greater than or equal to 1, got 0.5"),
        ({"versions": {}, "traffic": {"1": 1}}, "traffic: expected `versions`, which it is shared among"),
        ({"versions": {"1": {"replicass": 2}}}, "`versions.1.replicass`: unknown field"),
        ({"versions": {"1": {"versions": {}}}}, "versions.1.versions: expected beside the deployment's `versions`"),
        ({"versions": {"default": {}}}, "versions: expected names of letters"),
        ({"versions": {"a b": {}}}, "versions: expected names of letters"),
        ({"versions": {"1": {}, "2": {"model": "lm:weights"}}}, "versions: expected all of them to be language models"),
        ({"versions": {"1": {"model": None}}}, "`versions.1`: expected either `model` or `pipeline`"),
    ],
)
def test_what_is_wrong_with_versions_and_their_shares(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read({"deployments": {"c": {**VERSIONS, **fields}}})
    assert message in str(raised.value)


def test_no_other_deployment_may_have_a_version_s_name_and_no_step_may_be_one_with_versions() -> None:
    with pytest.raises(ConfigError, match=r"`c\.1` is the name of another deployment, too; rename one"):
        read({"deployments": {"c": VERSIONS, "c.1": {"model": "m:D"}}})
    heads = {"y": {"deployment": "c"}}
    graph = {"pipeline": {"placement": "graph", "trunk": {"model": "m:T"}, "heads": heads}}
    with pytest.raises(ConfigError, match="expected a deployment without versions, got `c`"):
        read({"deployments": {"c": VERSIONS, "p": graph}})
