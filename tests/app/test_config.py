"""Reading the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.config import load_config, read_config
from app.errors import ConfigError

MINIMAL: dict[str, Any] = {"deployments": {"scale": {"model": "inference.zoo.scale:Scale"}}}


def read(content: object, environment: dict[str, str] | None = None, **flags: Any) -> Any:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return read_config(content, source="test.yaml", environment=environment or {}, flags=dotted)


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
        ConfigError, match=r"`server\.prot`: unknown field \(environment variable HEADWATER_SERVER__PROT"
    ):
        read(MINIMAL, {"HEADWATER_SERVER__PROT": "1"})
    with pytest.raises(
        ConfigError, match=r"`deployments\.text`: expected either `model` or `pipeline`.* \(environment variable"
    ):
        read(MINIMAL, {"HEADWATER_DEPLOYMENTS__TEXT__TIMEOUT_S": "5"})
    with pytest.raises(ConfigError) as caught:
        read({**MINIMAL, "server": {"port": "abc"}}, {"HEADWATER_DEPLOYMENTS__SCALE__TIMEOUT_S": "5"})
    assert "laid over" not in str(caught.value)


@pytest.mark.parametrize("text", ["deployments: [", "\tdeployments: x", "a: b: c"])
def test_bad_yaml_is_said_to_be_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path, environment={}, flags={})


def test_a_missing_file_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        load_config(tmp_path / "none.yaml", environment={}, flags={})


@pytest.mark.parametrize("name", sorted(path.name for path in (Path(__file__).parents[2] / "configs").glob("*.yaml")))
def test_the_shipped_configurations_are_valid(name: str) -> None:
    assert load_config(Path(__file__).parents[2] / "configs" / name, environment={}, flags={}).deployments


@pytest.mark.parametrize("model", ["lm:models/llama", "lm:inference.zoo:weights/tiny_lm"])
def test_a_language_model_is_a_folder(model: str) -> None:
    config = read({"deployments": {"a": {"model": model, "options": {"max_sequences": 4}}}})
    assert config.deployments["a"].model == model
