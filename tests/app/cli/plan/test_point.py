"""Sizes, and the sections of the configuration that they become."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from headwater_server.cli.plan.point import Point, grid, section_of, takes_instances, threads_of
from headwater_server.cli.plan.profiles import profile_yaml
from headwater_server.cli.plan.subject import make_subject
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config, Deployment


def config_of(**section: Any) -> Config:
    return read_config({"deployments": {"one": section}}, source="test", environment={}, flags={})


def deployment(**section: Any) -> Deployment:
    return config_of(**section).deployments["one"]


def test_small_sizes_come_first_and_each_once() -> None:
    points = grid([8, 1, 8], [1, 2], [1])
    assert points == [Point(1), Point(8), Point(1, 2), Point(8, 2)]


def test_cores_are_shared_among_the_calls() -> None:
    plain = deployment(model="my.models:Scale")
    assert [threads_of(plain, Point(1, *pair), 8) for pair in ((1, 1), (2, 1), (2, 2), (4, 4))] == [8, 4, 2, 1]
    assert threads_of(deployment(model="my.models:Scale", threads=3), Point(1, 4, 4), 8) == 3


def test_a_section_keeps_what_the_size_does_not_change() -> None:
    given = deployment(
        model="my.models:Scale", options={"factor": 2}, timeout_s=7, replicas={"min": 1, "max": 5},
        batching={"max_batch_size": 64, "max_queue_delay_ms": 2, "max_in_flight": 1},
    )  # fmt: skip
    assert section_of(given, Point(8, 2, 3), 12) == {
        "model": "my.models:Scale", "options": {"factor": 2}, "timeout_s": 7.0, "replicas": 3, "instances": 2,
        "threads": 2, "batching": {"max_batch_size": 8, "max_queue_delay_ms": 2.0},
    }  # fmt: skip


def test_of_a_language_model_the_sequences_are_sized() -> None:
    given = deployment(model="lm:models/llama", options={"dtype": "bfloat16", "max_sequences": 64})
    assert not takes_instances(given)
    assert section_of(given, Point(8, 1, 2), 4) == {
        "model": "lm:models/llama", "options": {"dtype": "bfloat16", "max_sequences": 8}, "replicas": 2, "threads": 2,
    }  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_yaml_of_a_profile_is_a_configuration(replicas: int) -> None:
    pipeline = {"trunk": {"model": "a:Trunk"}, "heads": {"x": {"model": "a:Head", "options": {"output": "x"}}}}
    config = read_config(
        {
            "server": {"workers": 2, "runtime_dir": "/tmp/x"},
            "deployments": {"fan": {"pipeline": pipeline}, "other": {"model": "a:B"}},
        },
        source="test", environment={}, flags={},
    )  # fmt: skip
    point = Point(4, 1, replicas)
    subject = make_subject("models.yaml", config, "fan", (), cores=2, seconds=4, tokens=64, input=None)
    text = profile_yaml(subject, point, ["balanced: two replicas.", "Predicted: 1 GiB."])
    assert text.startswith("# balanced: two replicas.\n# Predicted: 1 GiB.\n")
    again = read_config(yaml.safe_load(text), source="profile", environment={}, flags={})
    assert again.server == config.server
    assert list(again.deployments) == ["fan"]
    found = again.deployments["fan"]
    assert (found.batching.max_batch_size, found.replicas.max, found.threads) == (4, replicas, max(1, 2 // replicas))
    assert found.pipeline == config.deployments["fan"].pipeline
