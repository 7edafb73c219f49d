"""Configurations as plain values, which mean the same when they are read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headwater_server.config.content import config_content
from headwater_server.config.reader import load_config, read_config
from headwater_server.config.schema import Config

CONFIGS = sorted(path for path in (Path(__file__).parents[3] / "configs").glob("*.yaml"))
CLUSTER = {
    "cluster": {"engine": "ray", "tls": "/etc/tls", "host": "10.0.0.1"},
    "server": {"runtime_dir": "/run/headwater", "memory_limit": "4GiB"},
    "deployments": {
        "a": {
            "model": "m:A",
            "device": {"gpus": 0.5, "labels": {"zone": "a"}},
            "replicas": {"min": 1, "max": 3},
            "batching": {"priority_weights": {1: 8, 5: 4}},
            "environment": {"N": 1},
            "memory": "1GiB",
        }
    },
}


def again(config: Config) -> Config:
    content = json.loads(json.dumps(config_content(config)))
    return read_config(content, source="content", environment={}, flags={})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_is_the_same(path: Path) -> None:
    config = load_config(path, environment={}, flags={})
    assert repr(again(config)) == repr(config)


def test_a_clusters_configuration_is_the_same() -> None:
    config = read_config(CLUSTER, source="test", environment={}, flags={})
    found = again(config)
    assert (repr(found), found.cluster) == (repr(config), config.cluster)
    assert found.all_deployments()["a"].on("cuda") == config.all_deployments()["a"].on("cuda")
