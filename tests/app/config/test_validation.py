"""The messages about a wrong configuration."""

from __future__ import annotations

from typing import Any

import pytest

from headwater_server.config.reader import InvalidConfig, read_config
from headwater_server.errors import ConfigError

VLLM: dict[str, Any] = {"model": "vllm:m", "python": "python"}
CALLS: dict[str, Any] = {"batching": {"max_in_flight": 1}}
MINIMAL: dict[str, Any] = {"deployments": {"scale": {"model": "headwater.zoo.scale:Scale"}}}


def read(content: object, environment: dict[str, str] | None = None, **flags: Any) -> Any:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return read_config(content, source="test.yaml", environment=environment or {}, flags=dotted)


def adapted(adapters: dict[str, str], **others: object) -> dict[str, Any]:
    """A configuration with these adapters."""
    return {"deployments": {"a": {**VLLM, "options": {"adapters": adapters}}, **others}}


def weighing(weights: object) -> dict[str, Any]:
    """A configuration with these weights of priorities."""
    return {"deployments": {"a": {"model": "m:M", "batching": {"priority_weights": weights}}}}


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
        (adapted({"b": ""}), "`deployments.a`: `options.adapters.b`: "),
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
        (
            {"deployments": {"a": {"model": "m:M", "versions": {"1": {"batching": {"max_batchsize": 1}}}}}},
            "`versions.1.batching.max_batchsize`: unknown field; did you mean `max_batch_size`?",
        ),
        ({**MINIMAL, "cluster": {"engine": "ray", "adress": "x:1"}}, "unknown field; did you mean `address`?"),
    ],
)
def test_an_unknown_name_comes_with_the_one_that_may_be_meant(content: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert message in str(caught.value)


def test_all_that_is_wrong_with_a_deployment_as_a_whole_is_named_at_once() -> None:
    fields = {"model": "lm:x", "pipeline": {"trunk": {"model": "m:T"}, "heads": {"h": {"model": "m:H"}}}}
    with pytest.raises(InvalidConfig) as caught:
        read({"deployments": {"a": {**fields, "options": {"a": 1}, "instances": 9, "max_compute_s": 3, **CALLS}}})
    assert len(caught.value.problems) == 6
    assert all(problem.startswith("`deployments.a`: ") for problem in caught.value.problems)
