"""What is asked of Ray, as far as that needs no Ray."""

from __future__ import annotations

from typing import Any

import pytest

from app.cluster.ray_client import shortage
from app.config.sections import NodePlacement


def node(gpus: float = 0, cpus: float = 4, **labels: str) -> dict[str, Any]:
    """As `ray.nodes` has it: what a node has none of is not named."""
    resources = {"CPU": cpus, "memory": 1e9} | ({"GPU": gpus} if gpus else {})
    return {"Alive": True, "Resources": resources, "Labels": {name.replace("_", "-"): labels[name] for name in labels}}


SMALL, LARGE = node(1), node(8, 64, kind="large")


@pytest.mark.parametrize(
    ("placement", "nodes", "expected"),
    [
        ({}, [SMALL], ""),
        ({}, [], "Ray has no node"),
        ({"gpus": 1}, [node(), SMALL], ""),
        ({"gpus": 0.5}, [node(), SMALL], ""),
        ({"gpus": 2}, [node(), SMALL], "it takes 2 GPU, and the largest node has 1"),
        ({"gpus": 0.5}, [node()], "it takes 0.5 GPU, and the largest node has 0"),
        ({"gpus": 2}, [SMALL, LARGE], ""),
        ({"cpus": 8}, [SMALL], "it takes 8 CPU, and the largest node has 4"),
        ({"cpus": 64, "gpus": 8}, [SMALL, LARGE], ""),
        ({"cpus": 8, "gpus": 1}, [SMALL, node(cpus=64)], "no node has the 1 GPU and 8 CPU that it takes"),
        ({"labels": {"kind": "large"}}, [SMALL, LARGE], ""),
        ({"labels": {"kind": "huge"}}, [SMALL, LARGE], "no node has the labels {'kind': 'huge'}"),
        (
            {"labels": {"kind": "large"}, "gpus": 9},
            [LARGE, node(16)],
            "it takes 9 GPU, and the largest such node has 8",
        ),
        ({"labels": {"kind": "large", "zone": "b"}}, [LARGE], "no node has the labels {'kind': 'large', 'zone': 'b'}"),
        ({"labels": {"kind": "large"}}, [{"Resources": {"CPU": 4}, "Labels": None}], "no node has the labels"),
    ],
)
def test_what_no_node_can_ever_have_is_told(placement: dict[str, Any], nodes: list[Any], expected: str) -> None:
    found = shortage(NodePlacement.model_validate(placement), nodes)
    assert found.startswith(expected)
    assert bool(found) is bool(expected)


@pytest.mark.parametrize("selector", ["!large", "in(huge,giant)", "!in(large)"])
def test_selectors_are_left_to_ray(selector: str) -> None:
    assert shortage(NodePlacement(labels={"kind": selector}), [SMALL, LARGE]) == ""
    found = shortage(NodePlacement(labels={"kind": selector}, gpus=9), [SMALL, LARGE])
    assert found == "it takes 9 GPU, and the largest node has 8"
