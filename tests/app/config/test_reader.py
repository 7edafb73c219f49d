"""Reading a configuration from a file, the environment and flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater_server.config.reader import InvalidConfig, Unparsed, load_config, load_what, read_config
from headwater_server.errors import ConfigError

MINIMAL: dict[str, Any] = {"deployments": {"scale": {"model": "headwater.zoo.scale:Scale"}}}


def read(content: object, environment: dict[str, str] | None = None, **flags: Any) -> Any:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return read_config(content, source="test.yaml", environment=environment or {}, flags=dotted)


def weighing(weights: object) -> dict[str, Any]:
    """A configuration with these weights of priorities."""
    return {"deployments": {"a": {"model": "m:M", "batching": {"priority_weights": weights}}}}


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
