"""Which machine a replica should be on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.cluster.nodes import Node, choose, needs, shortage
from headwater_server.config.sections import NodePlacement


def node(id: str, cpus: float = 4, gpus: float = 0, used: float = 0, **labels: str) -> Node:
    """A machine, of whose CPUs so many are reserved, and half of whose memory."""
    resources = {"CPU": cpus, "memory": 2e9} | ({"GPU": gpus} if gpus else {})
    return Node(id, resources, {**resources, "CPU": cpus - used, "memory": 1e9}, labels)


ONE = {"CPU": 1.0}


@pytest.mark.parametrize(
    ("placement", "memory", "nodes", "own", "others", "expected"),
    [
        ({}, None, [], {}, {}, ""),
        ({}, None, [node("b"), node("a")], {}, {}, "a"),
        ({}, None, [node("a"), node("b")], {"a": 1}, {}, "b"),
        ({}, None, [node("a"), node("b")], {"a": 1}, {"b": 3}, "b"),  # the deployment's own come first
        ({}, None, [node("a"), node("b")], {}, {"a": 1}, "b"),
        ({}, None, [node("a", used=4), node("b")], {"b": 9}, {}, "b"),
        ({}, None, [node("a", used=4), node("b", cpus=0)], {}, {}, ""),
        ({"cpus": 2}, None, [node("a", cpus=4), node("b", cpus=2)], {}, {"a": 3, "b": 1}, ""),  # Ray knows of none yet
        ({"gpus": 0.5}, None, [node("a"), node("b", gpus=1)], {"b": 1}, {}, "b"),
        ({}, None, [node("a", gpus=1), node("b")], {}, {"b": 2}, "b"),  # GPUs are for those that take some
        ({}, None, [node("a", gpus=1), node("b")], {"b": 1}, {}, "a"),
        ({}, 10**9, [node("a")], {}, {}, "a"),
        ({}, 10**9 + 1, [node("a")], {}, {}, ""),
        ({"gpus": 1}, 10**12, [node("a", gpus=1)], {}, {}, "a"),  # the memory is the GPU's
        ({"labels": {"kind": "x"}}, None, [node("a"), node("b", kind="y"), node("c", kind="x")], {"c": 1}, {}, "c"),
        ({"labels": {"kind": "!x"}}, None, [node("a", kind="x"), node("b", kind="y")], {"b": 1}, {}, "b"),
        ({"labels": {"kind": "in(x, y)"}}, None, [node("a", kind="z"), node("b", kind="y")], {}, {}, "b"),
        ({"labels": {"kind": "!in(x,y)"}}, None, [node("a", kind="x"), node("b")], {}, {}, "b"),
        ({"pack": True}, None, [node("a"), node("b"), node("c")], {"b": 2, "c": 1}, {"a": 5}, "b"),
        ({"pack": True}, None, [node("a"), node("b")], {}, {"b": 1}, "b"),
        ({"pack": True}, None, [node("a", used=4), node("b")], {"a": 4}, {}, "b"),
        ({"pack": True}, None, [node("a", gpus=1), node("b")], {"a": 1}, {}, "b"),
    ],
)
def test_the_machine_that_is_chosen(
    placement: dict[str, Any],
    memory: int | None,
    nodes: list[Node],
    own: dict[str, int],
    others: dict[str, int],
    expected: str,
) -> None:
    reserved = {id: [ONE] * count for id, count in others.items()}
    assert choose(NodePlacement.model_validate(placement), memory, nodes, own, reserved) == expected


SIZES = st.integers(0, 6)


@given(
    cpus=st.lists(SIZES, min_size=1, max_size=6),
    used=st.lists(SIZES, min_size=6, max_size=6),
    replicas=st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0.5, 1.0, 2.0, 3.0])), max_size=24),
    pack=st.booleans(),
)
def test_no_two_of_a_deployment_are_on_a_machine_while_another_that_can_has_none(
    cpus: list[int], used: list[int], replicas: list[tuple[str, float]], pack: bool
) -> None:
    nodes = [node(f"n{number}", size, used=min(size, used[number])) for number, size in enumerate(cpus)]
    reserved: dict[str, list[Mapping[str, float]]] = {}
    own: dict[str, Counter[str]] = {name: Counter() for name in "abc"}

    def can(one: Node, wanted: float) -> bool:
        ours = sum(taken["CPU"] for taken in reserved.get(one.id, ()))
        return min(one.resources["CPU"] - ours, one.free["CPU"]) >= wanted

    for name, wanted in replicas:
        placement = NodePlacement(cpus=wanted, pack=pack)
        found = choose(placement, None, nodes, own[name], reserved)
        fitting = {one.id for one in nodes if can(one, wanted)}
        assert (found in fitting) if fitting else (found == "")
        if found:
            counts = {id: own[name][id] for id in fitting}
            assert counts[found] == (max if pack else min)(counts.values())
            reserved.setdefault(found, []).append(needs(placement, None))
            own[name][found] += 1


SMALL, LARGE = node("a", gpus=1), node("b", 64, 8, kind="large")


@pytest.mark.parametrize(
    ("placement", "nodes", "expected"),
    [
        ({}, [SMALL], ""),
        ({}, [], "Ray has no node"),
        ({"gpus": 1}, [node("c"), SMALL], ""),
        ({"gpus": 0.5}, [node("c"), SMALL], ""),
        ({"gpus": 2}, [node("c"), SMALL], "it takes 2 GPU, and the largest node has 1"),
        ({"gpus": 0.5}, [node("c")], "it takes 0.5 GPU, and the largest node has 0"),
        ({"gpus": 2}, [SMALL, LARGE], ""),
        ({"cpus": 8}, [SMALL], "it takes 8 CPU, and the largest node has 4"),
        ({"cpus": 64, "gpus": 8}, [SMALL, LARGE], ""),
        ({"cpus": 8, "gpus": 1}, [SMALL, node("c", 64)], "no node has the 1 GPU and 8 CPU that it takes"),
        ({"labels": {"kind": "large"}}, [SMALL, LARGE], ""),
        ({"labels": {"kind": "huge"}}, [SMALL, LARGE], "no node has the labels {'kind': 'huge'}"),
        (
            {"labels": {"kind": "large"}, "gpus": 9},
            [LARGE, node("c", gpus=16)],
            "it takes 9 GPU, and the largest such node has 8",
        ),
        ({"labels": {"kind": "large", "zone": "b"}}, [LARGE], "no node has the labels {'kind': 'large', 'zone': 'b'}"),
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
