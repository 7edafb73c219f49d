"""A configuration that comes with a load: what is let in, and how it is laid over the server's own."""

from __future__ import annotations

import json
import time
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from headwater_server.config.overlay import CODE_FIELDS, MAX_CONFIG_BYTES, check_allowed, lay_over, parse_overlay
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config, Deployment
from headwater_server.errors import BadRequest, Forbidden

ROOT = Path(__file__).parents[3]


def config(deployments: dict[str, Any], **server: Any) -> Config:
    return read_config({"deployments": deployments, "server": server}, source="test", environment={}, flags={})


def laid(fields: dict[str, Any], **section: Any) -> Deployment:
    first = config({"a": {"model": "m:A", **section}})
    return lay_over(first, first, "a", fields).deployments["a"]


# Reading


def text_of(fields: Iterable[str]) -> str:
    return "{" + ",".join(fields) + "}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object with a deployment's fields, got a list"),
        ("null", "got null"),
        ('{"timeout_s": NaN}', "NaN is not a number in JSON"),
        ('{"timeout_s": 1, "timeout_s": 2}', "duplicate key `timeout_s`"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a":' * 40 + "1" + "}" * 40, "levels of nesting"),
        ('{"a": ' + "1" * 10_000 + "}", "not valid JSON"),
        (" " * (MAX_CONFIG_BYTES + 1), "expected at most"),
        ({"timeout_s": 1}, "as JSON text, got an object"),
    ],
    ids=range(10),
)
def test_what_is_no_section_is_refused(text: object, told: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_overlay(text)
    assert raised.value.message.startswith("parameters.config: ")
    assert told in raised.value.message


def numbered(count: int, value: str) -> list[str]:
    return [f'"{number}":{value}' for number in range(count)]


@pytest.mark.parametrize("count", [5_000, 20_000])
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (lambda count: text_of(numbered(count, "0")), "at most 1000 fields outside `options`"),
        (lambda count: text_of(['"versions":' + text_of(numbered(count, "{}"))]), "at most 1000 fields"),
        (lambda count: text_of(['"pipeline":[' + ",".join(['{"a":0}'] * count) + "]"]), "at most 1000 fields"),
        (lambda count: text_of([*numbered(count, "0"), '"0":0']), "duplicate key `0`"),
        (lambda count: text_of([*numbered(count, "0"), '"x":0', '"x":0']), "duplicate key `x`"),
    ],
    ids=range(5),
)
def test_a_section_of_many_fields_is_refused_at_once(text: Callable[[int], str], told: str, count: int) -> None:
    began_s = time.process_time()
    with pytest.raises(BadRequest) as raised:
        parse_overlay(text(count))
    assert told in raised.value.message
    assert time.process_time() - began_s < count / 10_000  # a field takes microseconds


def test_options_may_have_any_number_of_fields() -> None:
    options = {str(number): {"a": 0} for number in range(2_000)}
    assert laid(parse_overlay(json.dumps({"options": options}))).options == options


# Laying over


def test_sections_are_merged_and_other_values_replaced() -> None:
    found = laid(
        {"batching": {"max_batch_size": 8}, "timeout_s": 5, "warmup_batch_sizes": [2]},
        batching={"max_batch_size": 4, "max_queue_size": 99},
        timeout_s=7,
        warmup_batch_sizes=[1, 4],
        drain_timeout_s=3,
    )
    assert (found.batching.max_batch_size, found.batching.max_queue_size) == (8, 99)
    assert (found.timeout_s, found.warmup_batch_sizes, found.drain_timeout_s) == (5, (2,), 3)


def test_a_cache_is_merged_as_other_sections_are() -> None:
    cache = laid({"cache": {"max_bytes": "1MiB"}}, cache={"max_bytes": "4MiB", "ttl_s": 5, "per_key": True}).cache
    assert cache is not None
    assert (cache.max_bytes, cache.ttl_s, cache.per_key) == (2**20, 5, True)
    cache = laid({"cache": {"ttl_s": None}}, cache={"max_bytes": "4MiB", "ttl_s": 5}).cache
    assert cache is not None
    assert (cache.max_bytes, cache.ttl_s) == (4 * 2**20, None)
    assert laid({"cache": None}, cache={"max_bytes": "4MiB"}).cache is None


@pytest.mark.parametrize("placement", ["fused", "graph"])
def test_a_steps_cache_is_merged_too(placement: str) -> None:
    steps = {"trunk": {"model": "m:T", "cache": {"max_bytes": 9, "per_key": True}}, "heads": {"h": {"model": "m:H"}}}
    first = config({"p": {"pipeline": {"placement": placement, **steps}}})
    pipeline = (
        lay_over(first, first, "p", {"pipeline": {"trunk": {"cache": {"max_bytes": 5}}}}).deployments["p"].pipeline
    )
    assert pipeline is not None
    assert pipeline.trunk is not None
    assert pipeline.trunk.cache is not None
    assert (pipeline.trunk.cache.max_bytes, pipeline.trunk.cache.per_key) == (5, True)


def test_null_takes_the_default() -> None:
    found = laid({"threads": None, "timeout_s": None}, threads=3, timeout_s=7)
    assert (found.threads, found.timeout_s) == (None, Deployment.model_fields["timeout_s"].default)


def test_what_is_laid_over_is_what_the_server_was_started_with_and_others_stay_as_they_are_now() -> None:
    first = config({"a": {"model": "m:A", "timeout_s": 7}, "b": {"model": "m:B"}})
    second = lay_over(first, first, "b", {"timeout_s": 2})
    third = lay_over(first, second, "a", {"drain_timeout_s": 1})
    fourth = lay_over(first, third, "a", {"load_timeout_s": 9})
    a, b = fourth.deployments["a"], fourth.deployments["b"]
    assert (a.timeout_s, a.drain_timeout_s, a.load_timeout_s, b.timeout_s) == (7, 30, 9, 2)
    assert lay_over(first, fourth, "a", {}).deployments["a"] == first.deployments["a"]


def test_a_name_that_there_is_not_takes_a_whole_section() -> None:
    first = config({"a": {"model": "m:A"}})
    assert lay_over(first, first, "b", {"model": "m:B"}).deployments["b"] == Deployment(model="m:B")


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("a", {"timeout_s": -1}, "`deployments.a.timeout_s`: input should be greater than 0, got -1"),
        ("a", {"batching": {"max_batch": 1}}, "`deployments.a.batching.max_batch`: unknown field"),
        ("a", {"batching": 3}, "`deployments.a.batching`: "),
        ("a", {"backend": "python"}, "`deployments.a.backend`: unknown field"),
        ("a", {"model": None}, "expected either `model` or `pipeline`"),
        ("new", {"timeout_s": 1}, "expected either `model` or `pipeline`"),
        ("not a name", {"model": "m:A"}, "deployment name 'not a name': expected letters"),
        ("p", {"pipeline": {"heads": {"h": {"deployment": "nowhere"}}}}, "unknown deployment `nowhere`"),
    ],
)
def test_what_is_wrong_is_told_as_of_a_file(name: str, fields: dict[str, Any], told: str) -> None:
    pipeline = {"placement": "graph", "trunk": {"model": "m:T"}, "heads": {"h": {"deployment": "a"}}}
    first = config({"a": {"model": "m:A"}, "p": {"pipeline": pipeline}})
    with pytest.raises(BadRequest) as raised:
        lay_over(first, first, name, fields)
    assert raised.value.message.startswith("parameters.config: ")
    assert told in raised.value.message


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda path: path.name)
def test_nothing_laid_over_changes_nothing(path: Path) -> None:
    first = read_config(yaml.safe_load(path.read_text()), source="test", environment={}, flags={})
    for name in first.deployments:
        assert lay_over(first, first, name, {}) == first


# Who may


def test_settings_lets_settings_of_named_models_in_and_no_code() -> None:
    first = config({"a": {"model": "m:A"}})
    check_allowed(first, "a", {"timeout_s": 1, "replicas": 2, "batching": {}})
    for field in CODE_FIELDS:
        with pytest.raises(Forbidden, match=f"parameters.config.{field}: it chooses the code that runs"):
            check_allowed(first, "a", {"timeout_s": 1, field: None})
    with pytest.raises(Forbidden, match="model 'b': the server's configuration doesn't name it"):
        check_allowed(first, "b", {"timeout_s": 1})


def test_any_lets_everything_in_and_never_nothing() -> None:
    check_allowed(config({"a": {"model": "m:A"}}, allow_load="any"), "b", {"model": "m:B"})
    with pytest.raises(Forbidden, match="allow_load is never"):
        check_allowed(config({"a": {"model": "m:A"}}, allow_load="never"), "a", {})


def test_a_field_that_is_a_setting_is_a_number_a_choice_or_a_device() -> None:
    """A field with text in it may name a file or a module, and then it belongs to `CODE_FIELDS`; the text in
    ``traffic`` names versions and a header."""
    settings = set(Deployment.model_fields) - CODE_FIELDS
    for name in sorted(settings - {"device", "traffic"}):
        kinds = set(_kinds(Deployment.model_fields[name].annotation))
        assert kinds <= {int, float, bool, type(None)}, f"{name}: is it a setting, or does it choose code? {kinds}"
    assert set(Deployment.model_fields) >= CODE_FIELDS


def _kinds(annotation: Any) -> list[Any]:
    origin = typing.get_origin(annotation)
    if origin is typing.Literal or annotation is Ellipsis:
        return []
    if origin in (typing.Union, types.UnionType, tuple, list):
        return [kind for argument in typing.get_args(annotation) for kind in _kinds(argument)]
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin is dict:
        return _kinds(typing.get_args(annotation)[1])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [kind for field in annotation.model_fields.values() for kind in _kinds(field.annotation)]
    return [annotation]


def test_the_text_of_a_section_is_read_back_as_it_was_written() -> None:
    fields = {"batching": {"max_batch_size": 8}, "options": {"labels": ["a", "é"], "rate": 0.5, "none": None}}
    assert parse_overlay(json.dumps(fields)) == fields
