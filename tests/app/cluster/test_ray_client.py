"""What is asked of Ray, of which a stand-in keeps what it was asked."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from app.cluster import holder
from app.cluster.nodes import Node
from app.cluster.ray_client import ActorGone, RayClient, shortage
from app.config.sections import NodePlacement
from app.errors import StartError


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


class GetTimeoutError(Exception):
    """As Ray's, of which the others are no kinds."""


class RayError(Exception):
    pass


class RayActorError(RayError):
    pass


class ActorUnavailableError(RayActorError):
    pass


class Kind:
    """A class of actors; it keeps the options and arguments that its actors are started with."""

    def __init__(self, made: object) -> None:
        assert made is holder.Holder
        self.given: dict[str, Any] = {}

    def options(self, **options: Any) -> Kind:
        self.given = options
        return self

    def remote(self, *arguments: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        return self.given, arguments


class Reference:
    """What a call of an actor returns at once."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def future(self) -> Future[object]:
        found: Future[object] = Future()
        if isinstance(self.answer, Exception):
            found.set_exception(self.answer)
        else:
            found.set_result(self.answer)
        return found


class Actor:
    """An actor that answers, or raises."""

    def __init__(self, answer: object) -> None:
        self.said = self.order = types.SimpleNamespace(remote=lambda *arguments: Reference(answer))


def get(reference: Reference, timeout: float | None = None) -> object:
    """Stands for `ray.get`."""
    return reference.future().result(timeout)


def get_actor(name: str) -> object:
    """Stands for `ray.get_actor`."""
    if name.endswith("gone"):
        raise ValueError(f"no actor {name}")
    return name


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """What stands for the package, with two nodes."""
    found: Any = types.ModuleType("ray")
    found.init = lambda **options: None
    found.shutdown = lambda: None
    found.cloudpickle = types.SimpleNamespace(register_pickle_by_value=lambda module: None)
    found.exceptions = types.SimpleNamespace(
        GetTimeoutError=GetTimeoutError, RayError=RayError, RayActorError=RayActorError,
        ActorUnavailableError=ActorUnavailableError,
    )  # fmt: skip
    found.remote, found.get, found.get_actor = Kind, get, get_actor
    names = ["supervisor", "replica:a-1.1", "replica:a-1.gone", "replica:b-1.2"]
    strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
    found.util = types.SimpleNamespace(list_named_actors=lambda: names, scheduling_strategies=strategies)
    found.nodes = lambda: [
        {**SMALL, "NodeID": "a1", "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7},
        {**LARGE, "NodeID": "b2", "NodeManagerAddress": "10.0.0.2", "Alive": False},
        {**LARGE, "NodeID": "c3", "NodeManagerAddress": "10.0.0.3", "NodeManagerPort": 7, "Labels": None},
    ]
    state = types.SimpleNamespace(available_resources_per_node=lambda: {"a1": {"CPU": 1.0}, "b2": {"CPU": 64.0}})
    found._private = types.SimpleNamespace(state=state)
    monkeypatch.setitem(sys.modules, "ray", found)
    module: types.ModuleType = found
    return module


@pytest.fixture
def client(ray: types.ModuleType) -> Iterator[RayClient]:
    found = RayClient("head:6379")
    yield found
    found.close()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartError, match=r"^cluster\.engine: Ray isn't installed: pip install 'headwater\[cluster\]'"):
        RayClient("auto")


@pytest.mark.parametrize(
    ("error", "text"),
    [(ConnectionError("no head\nat line 3"), "no head"), (TimeoutError(), "TimeoutError"), (ValueError("x"), "x")],
)
def test_a_head_that_is_not_there_is_named(ray: types.ModuleType, error: Exception, text: str) -> None:
    def init(**options: object) -> None:
        raise error

    ray.__dict__["init"] = init
    with pytest.raises(StartError, match=rf"^cluster\.address: no Ray at 'head:6379': {text}; start one with"):
        RayClient("head:6379")


@pytest.mark.parametrize(
    ("placement", "memory", "node", "expected"),
    [
        ({}, None, "", {"num_gpus": 0, "num_cpus": 1, "scheduling_strategy": "SPREAD"}),
        ({}, None, "a1", {"num_gpus": 0, "num_cpus": 1, "scheduling_strategy": ("a1", True)}),
        ({"cpus": 2, "pack": True}, 1000, "",
         {"num_gpus": 0, "num_cpus": 2, "scheduling_strategy": "DEFAULT", "memory": 1000}),
        ({"gpus": 0.5, "labels": {"kind": "!x"}}, 1000, "",  # the memory is the GPU's
         {"num_gpus": 0.5, "num_cpus": 1, "scheduling_strategy": "SPREAD", "label_selector": {"kind": "!x"}}),
    ],
)  # fmt: skip
def test_what_a_replica_takes_is_said_to_ray(
    client: RayClient, placement: dict[str, Any], memory: int | None, node: str, expected: dict[str, Any]
) -> None:
    place = NodePlacement.model_validate(placement)
    starting = client.start_replica("replica:a-1.1", ["x"], b"spec", {"A": "1"}, place, memory, node)
    options, arguments = asyncio.run(starting)
    assert options == {
        "name": "replica:a-1.1", "lifetime": "detached", "max_concurrency": 16, "max_restarts": 0, **expected
    }  # fmt: skip
    assert arguments == (["x"], b"spec", {"A": "1"}, False)


def test_the_supervisor_is_one_and_started_again(client: RayClient) -> None:
    options, arguments = client.start_supervisor("supervisor", ["x"], b"spec", {})
    assert (options["max_restarts"], options["get_if_exists"], options["num_cpus"]) == (-1, True, 0)
    assert arguments == (["x"], b"spec", {}, True)


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (GetTimeoutError(), TimeoutError, "no answer"),
        (ActorUnavailableError("its node can't be reached"), TimeoutError, "its node can't be reached"),
        (RayActorError("the actor died\nat line 3"), ActorGone, r"the actor died\Z"),
        (RayError(""), ActorGone, "RayError"),
    ],
)
def test_an_actor_that_is_gone_is_told_from_one_that_can_not_be_reached(
    client: RayClient, answer: Exception, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        asyncio.run(client.said(Actor(answer)))
    with pytest.raises(error, match=text):
        client.ask(Actor(answer), 1)
    with pytest.raises(error, match=text):
        client.ask_order(Actor(answer), "stop")


def test_actors_are_found_by_name(client: RayClient) -> None:
    assert asyncio.run(client.said(Actor("10.0.0.1:1 token"))) == "10.0.0.1:1 token"
    assert client.ask(Actor("10.0.0.1:1 token"), 1) == "10.0.0.1:1 token"
    assert list(asyncio.run(client.replicas())) == ["replica:a-1.1", "replica:b-1.2"]
    assert client.find("supervisor") == "supervisor"
    with pytest.raises(ActorGone):
        client.find("gone")


def test_only_nodes_that_are_alive_count(client: RayClient) -> None:
    assert asyncio.run(client.node_addresses()) == {"10.0.0.1", "10.0.0.3"}
    assert asyncio.run(client.missing(NodePlacement(gpus=9))) == "it takes 9 GPU, and the largest node has 8"
    assert asyncio.run(client.nodes()) == [
        Node("a1", SMALL["Resources"], {"CPU": 1.0}, {}, "10.0.0.1:7"),
        Node("c3", LARGE["Resources"], LARGE["Resources"], {}, "10.0.0.3:7"),  # it has not said yet what is free
    ]


def test_a_machine_answers_while_its_raylet_listens(client: RayClient) -> None:
    async def scenario() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        machine = Node("a1", {}, {}, {}, f"127.0.0.1:{port}")
        assert await client.answers(machine)
        server.close()
        await server.wait_closed()
        assert not await client.answers(machine)

    asyncio.run(scenario())


def test_private_parts_of_ray_are_still_there() -> None:
    internal_kv = pytest.importorskip("ray.experimental.internal_kv")
    for name, wanted in {
        "_internal_kv_get": ["key", "namespace"],
        "_internal_kv_put": ["key", "value", "overwrite", "namespace"],
        "_internal_kv_del": ["key", "namespace"],
    }.items():
        assert set(wanted) <= set(inspect.signature(getattr(internal_kv, name)).parameters)
    state = pytest.importorskip("ray._private.state")
    assert not inspect.signature(state.available_resources_per_node).parameters
