"""The schema: what a configuration may say, and what is then the case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from headwater_server.config.content import config_content
from headwater_server.config.pipeline import Step
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config, Deployment
from headwater_server.config.sections import ReplicaBounds, Section
from headwater_server.errors import ConfigError

MINIMAL: dict[str, Any] = {"deployments": {"scale": {"model": "headwater.zoo.scale:Scale"}}}


def read(content: object, environment: dict[str, str] | None = None, **flags: Any) -> Any:
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return read_config(content, source="test.yaml", environment=environment or {}, flags=dotted)


def test_a_model_is_all_that_is_needed() -> None:
    config = read(MINIMAL)
    assert config.server.port == 8000
    assert config.server.host == "127.0.0.1"
    assert config.deployments["scale"].batching.max_queue_size == 1024


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
    with pytest.raises(ConfigError, match=r"max_compute_s: not supported for a language model, .*`options.max_step_s`"):
        read(content)


@pytest.mark.parametrize(
    ("given", "limit"),
    [(0.5, 0.5), (1, 1.0), (2000, 2000), ("16GiB", 16 * 2**30), (0, None), (1.5, None), (True, None)],
)
def test_the_memory_limit_is_a_part_or_a_size(given: object, limit: float | int | None) -> None:
    if limit is None:
        with pytest.raises(ConfigError, match=r"`server\.memory_limit`: expected a fraction such as 0\.8, or bytes"):
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
    with pytest.raises(ConfigError, match=r"cache: not supported for a language model"):
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


def test_there_are_at_most_sixty_fields_besides_two() -> None:
    """So many a reader of the reference can take in: what no operator will ever set is a constant."""
    fields = set(fields_in(Config, set())) - {"Server.grpc_port", "Server.unknown_fields"}
    assert len(fields) <= 60, fields


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


def test_a_versions_cache_is_merged_into_the_deployments() -> None:
    fields = {
        **VERSIONS,
        "cache": {"max_bytes": 9, "per_key": True},
        "versions": {"1": {}, "2": {"cache": {"ttl_s": 3}}},
    }
    cache = read({"deployments": {"c": fields}}).all_deployments()["c.2"].cache
    assert (cache.max_bytes, cache.ttl_s, cache.per_key) == (9, 3, True)


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
        ({"traffic": {"1": 1, "3": 0}}, "traffic: expected shares of the versions `1`, `2`, got a share of `3`"),
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
        ({"versions": {}, "traffic": {"1": 1}}, "traffic: expected `versions`, which share the requests"),
        ({"versions": {"1": {"replicass": 2}}}, "`versions.1.replicass`: unknown field"),
        ({"versions": {"1": {"versions": {}}}}, "versions.1.versions: expected in the deployment itself"),
        ({"versions": {"default": {}}}, "versions: expected names of letters"),
        ({"versions": {"a b": {}}}, "versions: expected names of letters"),
        ({"versions": {"1": {}, "2": {"model": "lm:weights"}}}, "versions: expected only language models"),
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
