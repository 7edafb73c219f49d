"""The configuration of a cluster: its section, and what `device` means there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config
from headwater_server.config.sections import NodePlacement
from headwater_server.errors import ConfigError


def config(cluster: object = None, environment: dict[str, str] | None = None, **fields: Any) -> Config:
    """One deployment with these fields, in a cluster unless that is None."""
    content: dict[str, Any] = {"deployments": {"a": {"model": "some:Model", **fields}}}
    if cluster is not None:
        content["cluster"] = cluster
    return read_config(content, source="file", environment=environment or {}, flags={})


RAY = {"engine": "ray"}


def test_without_the_section_there_is_no_cluster() -> None:
    assert config().cluster is None


def test_defaults_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = config(RAY).cluster
    assert found is not None
    assert (found.engine, found.address, found.host, found.tls) == ("ray", "auto", None, None)
    found = config({**RAY, "address": "10.0.0.1:6379", "tls": "certificates", "host": "0.0.0.0"}).cluster
    assert found is not None
    assert (found.address, found.tls, found.host) == ("10.0.0.1:6379", tmp_path / "certificates", "0.0.0.0")


def test_the_environment_may_set_a_field() -> None:
    found = config(RAY, {"HEADWATER_CLUSTER__ADDRESS": "head:6379"}).cluster
    assert found is not None
    assert found.address == "head:6379"


def test_it_is_no_part_of_what_is_served() -> None:
    assert config(RAY).deployments == config().deployments
    assert config(RAY).with_cluster(None).cluster is None


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({}, r"cluster\.engine"),
        ({"engine": "slurm"}, r"cluster\.engine.*'ray'"),
        ({**RAY, "address": ""}, r"cluster\.address"),
        ({**RAY, "adress": "head:6379"}, r"cluster\.adress"),
        ({**RAY, "host": "10.0.0.1"}, r"cluster.*host: expected a loopback address without `cluster\.tls`, got '10\."),
        ({**RAY, "host": "0.0.0.0"}, r"cluster.*host: .*set `cluster\.tls`"),
        ({**RAY, "host": "replicas.example"}, r"cluster.*host: .*got 'replicas\.example'"),
        ("ray", r"cluster"),
    ],
)
def test_what_is_wrong_is_told_with_its_field(cluster: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(cluster)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_without_tls_ports_may_be_on_loopback(host: str) -> None:
    found = config({**RAY, "host": host}).cluster
    assert found is not None
    assert found.host == host


def test_faults_elsewhere_are_told_together_with_the_sections() -> None:
    with pytest.raises(ConfigError) as caught:
        config({**RAY, "address": ""}, timeout_s=-1)
    assert "cluster.address" in str(caught.value)
    assert "deployments.a.timeout_s" in str(caught.value)


@pytest.mark.parametrize(
    ("device", "expected", "placements"),
    [
        ("auto", NodePlacement(), ("auto",)),
        ("cpu", NodePlacement(), ("cpu",)),
        ("cuda", NodePlacement(gpus=1), ("cuda",)),
        ({"gpus": 2, "cpus": 8}, NodePlacement(gpus=2, cpus=8), ("cuda",)),
        ({"gpus": 0.25}, NodePlacement(gpus=0.25), ("cuda",)),
        ({"cpus": 0.5, "labels": {"zone": "a"}, "pack": True},
         NodePlacement(cpus=0.5, labels={"zone": "a"}, pack=True), ("cpu",)),
    ],
)  # fmt: skip
def test_what_a_device_takes_of_a_node(device: object, expected: NodePlacement, placements: tuple[str, ...]) -> None:
    deployment = config(RAY, device=device).deployments["a"]
    assert (deployment.node_placement, deployment.placements) == (expected, placements)
    assert deployment.on(placements[0]) == deployment


@pytest.mark.parametrize("device", ["cuda:0", ["cuda:0", "cuda:1"], ["cpu"]])
def test_ray_chooses_the_gpus(device: object) -> None:
    with pytest.raises(ConfigError, match=r"deployments\.a\.device: expected cpu, cuda, or \{gpus, cpus, labels, pack"):
        config(RAY, device=device)
    assert config(device=device).deployments["a"].placements


def test_without_a_cluster_there_are_no_nodes() -> None:
    with pytest.raises(ConfigError, match=r"`deployments\.a\.device`: expected auto.*without the section `cluster`"):
        config(device={"gpus": 1})


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ({"gpus": 1.5}, r"gpus: expected a whole number above 1, got 1\.5"),
        ({"gpus": -1}, r"gpus: "),
        ({"cpus": "many"}, r"cpus: "),
        ({"gpu": 1}, r"gpu: "),
        ({"labels": ["a"]}, r"labels: "),
    ],
)
def test_a_wrong_part_of_a_device_is_named(device: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"deployments\.a\.device.*{{gpus, cpus, labels, pack}}; {message}"):
        config(RAY, device=device)


def test_a_vllm_takes_as_many_gpus_as_it_is_spread_over(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "model": f"vllm:{tmp_path}",
        "python": "/usr/bin/python3",
        "options": {"tensor_parallel_size": 4},
    }
    read = config(RAY, device="cuda", **fields)
    assert read.deployments["a"].node_placement == NodePlacement(gpus=4)


def test_steps_of_a_pipeline_have_devices_of_their_own() -> None:
    steps: dict[str, Any] = {
        "trunk": {"model": "m:Trunk", "device": {"gpus": 1}},
        "heads": {"head": {"model": "m:Head"}},
    }
    content = {"deployments": {"p": {"pipeline": {"placement": "graph", **steps}}}, "cluster": RAY}
    found = read_config(content, source="file", environment={}, flags={}).all_deployments()
    assert found["p.trunk"].node_placement == NodePlacement(gpus=1)
    assert found["p.head"].node_placement == NodePlacement()
    steps["trunk"]["device"] = "cuda:1"
    with pytest.raises(ConfigError, match=r"deployments\.p\.trunk\.device: expected cpu"):
        read_config(content, source="file", environment={}, flags={})
