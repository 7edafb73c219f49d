"""What is asked of Ray, of which a stand-in keeps what it was asked."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from headwater.environment import install_command
from headwater_server.cluster import holder, ray_client
from headwater_server.cluster.nodes import Node
from headwater_server.cluster.ray_client import ActorGone, RayClient
from headwater_server.config.sections import NodePlacement
from headwater_server.errors import StartError

# As `ray.nodes` has them.
SMALL: dict[str, Any] = {"Alive": True, "Resources": {"CPU": 4, "memory": 1e9, "GPU": 1}, "Labels": {}}
LARGE: dict[str, Any] = {"Alive": True, "Resources": {"CPU": 64, "memory": 1e9, "GPU": 8}, "Labels": {"kind": "large"}}


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
    found.get_runtime_context = lambda: types.SimpleNamespace(gcs_address="10.0.0.1:6379")
    strategies = types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
    found.util = types.SimpleNamespace(list_named_actors=lambda: names, scheduling_strategies=strategies)
    found.nodes = lambda: [
        {**SMALL, "NodeID": "a1", "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7},
        {**LARGE, "NodeID": "b2", "NodeManagerAddress": "10.0.0.2", "Alive": False},
        {**LARGE, "NodeID": "c3", "NodeManagerAddress": "10.0.0.3", "NodeManagerPort": 7, "Labels": None},
    ]
    state = types.SimpleNamespace(
        available_resources_per_node=lambda: {"a1": {"CPU": 1.0}, "b2": {"CPU": 64.0}, "c3": {"CPU": 2.0, "GPU": 8.0}}
    )
    found._private = types.SimpleNamespace(state=state)  # private: where Ray has the free resources of each node
    kv = types.ModuleType("ray.experimental")
    kv.__dict__["internal_kv"] = types.SimpleNamespace(_internal_kv_get=lambda key, namespace: None)
    for module in (found, kv):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    ray: types.ModuleType = found
    return ray


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[bytes, bytes], bytes]:
    """What Ray stores, by namespace and key."""
    found: dict[tuple[bytes, bytes], bytes] = {}

    def put(key: bytes, value: bytes, overwrite: bool = False, *, namespace: bytes) -> None:
        if overwrite or (namespace, key) not in found:
            found[namespace, key] = value

    module: Any = types.ModuleType("ray.experimental.internal_kv")
    # private: all names of Ray's key-value store begin so
    module.__dict__.update(
        _internal_kv_get=lambda key, *, namespace: found.get((namespace, key)),
        _internal_kv_put=put,
        _internal_kv_del=lambda key, *, del_by_prefix=False, namespace: found.pop((namespace, key)),
    )
    package: Any = types.ModuleType("ray.experimental")
    package.internal_kv = module
    monkeypatch.setitem(sys.modules, "ray.experimental", package)
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", module)
    return found


@pytest.fixture
def client(ray: types.ModuleType) -> Iterator[RayClient]:
    found = RayClient("head:6379")
    yield found
    found.close()


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        StartError, match=re.escape(f"cluster.engine: Ray isn't installed: {install_command('cluster', 'ray')}")
    ):
        RayClient("auto")


@pytest.mark.parametrize(
    ("error", "text"),
    [(ConnectionError("no head\nat line 3"), "no head"), (TimeoutError(), "TimeoutError"), (ValueError("x"), "x")],
)
def test_a_head_that_is_not_there_is_named(ray: types.ModuleType, error: Exception, text: str) -> None:
    def init(**options: object) -> None:
        raise error

    ray.__dict__["init"] = init
    with pytest.raises(StartError, match=rf"^cluster\.address: no Ray at 'head:6379': {text}; start Ray with"):
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
    text = "it takes 9 GPU, and the largest node has 8"
    assert asyncio.run(client.look(NodePlacement(gpus=9), None)) == (text, False)
    free = {"CPU": 2.0, "GPU": 8.0}
    assert asyncio.run(client.nodes()) == [
        Node("a1", SMALL["Resources"], {"CPU": 1.0}, {}, "10.0.0.1:7"),
        Node("c3", LARGE["Resources"], free, {}, "10.0.0.3:7"),
    ]


@pytest.mark.parametrize(("placement", "has_room"), [({"cpus": 2}, True), ({"cpus": 3}, False), ({"gpus": 8}, True)])
def test_room_is_what_others_have_left(client: RayClient, placement: dict[str, Any], has_room: bool) -> None:
    assert asyncio.run(client.look(NodePlacement.model_validate(placement), None)) == ("", has_room)


def have_head(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., None]) -> None:
    """Have Ray's head answer so when it is asked for a key."""
    # private: the name of Ray's function, which has no public one
    monkeypatch.setattr(sys.modules["ray.experimental"].internal_kv, "_internal_kv_get", answer)


def test_a_head_that_does_not_answer_is_noted_and_asked_once(
    client: RayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back, asked = threading.Event(), []

    def ask(key: bytes, namespace: bytes) -> None:
        asked.append(key)
        assert is_back.wait(30)

    assert client.head_trouble(30) == ""
    have_head(monkeypatch, ask)
    for _ in range(2):
        assert client.head_trouble(0.01).startswith("Ray's head at 10.0.0.1:6379 doesn't answer: running replicas")
    is_back.set()
    assert client.head_trouble(30) == ""
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            "RPC error: WrongClusterID: Perhaps the client is accessing GCS after it has restarted",
            "was restarted",
        ),
        ("RPC error: UNAVAILABLE", "doesn't answer: running replicas"),
    ],
)
def test_a_head_that_has_forgotten_the_cluster_is_told_from_one_that_is_gone(
    client: RayClient, monkeypatch: pytest.MonkeyPatch, error: str, text: str
) -> None:
    def ask(key: bytes, namespace: bytes) -> None:
        raise RuntimeError(error)

    have_head(monkeypatch, ask)
    assert client.head_trouble(30).startswith(f"Ray's head at 10.0.0.1:6379 {text}")


def test_a_head_that_is_gone_when_it_is_first_asked_is_named(
    ray: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_client, "CONNECT_TIMEOUT_S", 0.01)
    never = threading.Event()
    ray.__dict__["init"] = lambda **options: never.wait(30)
    try:
        with pytest.raises(
            StartError, match=r"^cluster\.address: no Ray at 'head:6379': no answer within 0\.01 s; start"
        ):
            RayClient("head:6379")
    finally:
        never.set()


async def test_what_is_stored_is_found_until_it_is_deleted(
    client: RayClient, storage: dict[tuple[bytes, bytes], bytes]
) -> None:
    assert await client.get("desired") is None
    await client.put("desired", b"1")
    await client.put("epoch", b"7")
    await client.put("desired", b"2")
    assert (await client.get("desired"), await client.get("epoch")) == (b"2", b"7")
    await client.delete("desired")
    assert await client.get("desired") is None
    assert storage == {(b"headwater", b"epoch"): b"7"}


async def test_a_machine_answers_while_its_raylet_listens(client: RayClient) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    machine = Node("a1", {}, {}, {}, f"127.0.0.1:{port}")
    assert await client.answers(machine)
    server.close()
    await server.wait_closed()
    assert not await client.answers(machine)


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
