"""The chart's values: what is wrong is refused, and every value is in the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.deploy.charts import ROOT, Manifest, refusal, render

CHART = ROOT / "deploy" / "helm" / "headwater"
VALUES: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
FREE = {
    "config",
    "nodeSelector",
    "affinity",
    "podLabels",
    "podAnnotations",
    "annotations",
    "labels",
    "limits",
    "requests",
}
"""Mappings whose names are the user's."""


def mappings(values: Manifest, *path: str) -> Iterator[tuple[str, ...]]:
    """The path of each mapping whose names the chart defines."""
    yield path
    for name, value in values.items():
        if isinstance(value, dict) and name not in FREE:
            yield from mappings(value, *path, name)


def nested(path: tuple[str, ...], value: Any) -> Any:
    for name in reversed(path):
        value = {name: value}
    return value


def test_a_typo_is_refused_in_every_mapping() -> None:
    paths = list(mappings(VALUES))
    assert len(paths) > 10
    for path, made in zip(paths, render(*(nested((*path, "tpyo"), 1) for path in paths)), strict=True):
        assert "additional properties 'tpyo' not allowed" in made.get("refused", ""), path


def test_the_schema_has_the_values_and_no_other() -> None:
    def names(schema: Any, *path: str) -> Iterator[tuple[str, ...]]:
        for name, inner in schema.get("properties", {}).items():
            yield (*path, name)
            if name not in FREE:
                yield from names(inner, *path, name)

    def of_values(values: Any, *path: str) -> Iterator[tuple[str, ...]]:
        for name, inner in values.items():
            yield (*path, name)
            if isinstance(inner, dict) and name not in FREE:
                yield from of_values(inner, *path, name)

    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(names(schema)) - {("global",)} == set(of_values(VALUES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"replicas": "two"}, "/replicas"),
        ({"sharedMemory": "lots"}, "/sharedMemory"),
        ({"autoscaling": {"engine": "hap"}}, "/autoscaling/engine"),
        ({"config": {"deployment": {}}}, "/config"),
        ({"models": {"hostPath": "srv/models"}}, "/models/hostPath"),
        ({"models": {"claim": "a", "image": "b"}}, "models: expected at most one of claim, hostPath and image"),
        ({"keys": {"secret": "a", "content": "{}"}}, "keys: expected secret or content, got both"),
        (
            {"config": {"deployments": {"a": {"model": "m:A"}}, "server": {"grpc_port": 9001}}},
            "config.server.grpc_port: expected none",
        ),
        ({"grpc": {"enabled": True, "port": 8000}}, "grpc.port: expected another port than service.port"),
        ({"shutdown": {"gracePeriodSeconds": 59}}, "shutdown.gracePeriodSeconds: expected at least 60"),
        (
            {"serviceMonitor": {"enabled": True}, "keys": {"secret": "a"}},
            "serviceMonitor.key.secret: expected a Secret",
        ),
        ({"autoscaling": {"engine": "hpa", "min": 7}}, "autoscaling.min: expected at most autoscaling.max (6), got 7"),
        (
            {
                "autoscaling": {"engine": "keda"},
                "config": {"deployments": {"a": {"model": "m:A", "replicas": {"min": 1, "max": 2}}}},
            },
            "config.deployments.a.replicas: expected a number",
        ),
    ],
)
def test_what_cannot_work_is_refused(values: Manifest, expected: str) -> None:
    assert expected in refusal(values)


def test_what_just_fits_is_not_refused() -> None:
    assert refusal({"shutdown": {"gracePeriodSeconds": 60}}) == ""
