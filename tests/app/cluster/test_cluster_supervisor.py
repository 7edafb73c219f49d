"""The supervisor of a cluster: what it takes over, what it remembers, and what gateways are told."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from headwater_server.cluster import agent_link, cluster_supervisor, remote_replica
from headwater_server.cluster.cluster_supervisor import (
    DESIRED,
    EPOCH,
    Announcement,
    ClusterSupervisor,
    SupervisorSpec,
    what_is_served,
)
from headwater_server.cluster.holder import write_spec
from headwater_server.cluster.nodes import Node
from headwater_server.config.cluster import Cluster
from headwater_server.config.schema import Config
from headwater_server.config.sections import NodePlacement
from headwater_server.control.link import SupervisorLink
from headwater_server.control.messages import Drain, Drained, Hello
from headwater_server.control.routing import DeploymentRoute, RoutingTable, State
from headwater_server.transport.address import host_and_port
from tests.app.cluster.stand_in import READY, Agent, Ray, clustered, until


class Ended(BaseException):
    """The supervisor has ended at once, with this status."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried again soon, and a supervisor that ends doesn't end the tests."""

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(agent_link, "RETRY_S", 0.01)
    monkeypatch.setattr(remote_replica, "PLACE_LOOK_S", 0.01)
    monkeypatch.setattr(os, "_exit", end)


def config(**deployments: dict[str, Any]) -> Config:
    """Deployments of a cluster with one model each."""
    found = {name: {"model": "m:M", **fields} for name, fields in (deployments or {"a": {}}).items()}
    content = {"server": {"allow_load": "any"}, "deployments": found}
    return Config.model_validate(content).with_cluster(Cluster(engine="ray"))


class Bench:
    """A supervisor, and the end of its input and output that is the actor's."""

    def __init__(self, ray: Ray, config: Config, epoch: int) -> None:
        client: Any = ray
        self.supervisor = ClusterSupervisor(SupervisorSpec(config, ("/srv/models",)), client, epoch, None)
        self.orders = asyncio.StreamReader()
        self.output = io.StringIO()
        self.running = asyncio.create_task(self._run())
        self.ended: int | None = None
        """The status with which it has ended at once."""

    async def _run(self) -> None:
        try:
            await self.supervisor.run(self.orders, self.output)
        except Ended as error:
            self.ended = error.args[0]

    async def announced(self) -> Announcement:
        """What it says once it serves."""
        await until(lambda: "\n" in self.output.getvalue() or self.running.done())
        return msgspec.json.decode(self.output.getvalue(), type=Announcement)

    async def end(self) -> None:
        """End it as a process that is killed."""
        self.supervisor.children.stop()
        finishing = asyncio.create_task(self.supervisor.children.finish())
        await asyncio.sleep(0)  # with which it waits for all tasks, and cancels them if it is cancelled
        for task in (self.running, finishing):
            task.cancel()
        await asyncio.gather(self.running, finishing, return_exceptions=True)
        await self.supervisor.control.close()


class Gateway:
    """One gateway, and what it is told."""

    def __init__(self, name: int = 0) -> None:
        self.table = RoutingTable()
        self.tables = 0
        self.drains: list[tuple[str, list[str] | None]] = []
        self.quarantined: list[tuple[str, bytes]] = []
        self.cancelled: list[str] = []
        self.link = SupervisorLink(
            self._drain, lambda model, fingerprint: self.quarantined.append((model, fingerprint)), self._cancel
        )
        self._name = name
        self._following: asyncio.Task[None] | None = None

    async def _drain(self, order: Drain) -> Drained:
        self.drains.append((order.model, order.replicas))
        return Drained()

    async def _cancel(self, request_id: str) -> int:
        self.cancelled.append(request_id)
        return self._name

    async def join(self, where: Announcement, workers: int = 1) -> Gateway:
        """Connect, and wait for the first table."""
        reader, writer = await asyncio.open_connection(*host_and_port(where.address))

        async def follow() -> None:
            async with contextlib.aclosing(
                self.link.tables_from(reader, writer, Hello(where.token, workers))
            ) as tables:
                async for table in tables:
                    self.table, self.tables = table, self.tables + 1

        self._following = asyncio.create_task(follow())
        await until(lambda: self.tables > 0)
        return self

    async def leave(self) -> None:
        """Close the connection."""
        assert self._following is not None
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)

    def route(self, name: str = "a") -> DeploymentRoute:
        """The route of a deployment."""
        return next(one for one in self.table.deployments if one.name == name)

    def ids(self, name: str = "a") -> list[str]:
        """The replicas that serve."""
        return [one.id for one in self.route(name).replicas]

    def retiring(self, name: str = "a") -> list[str]:
        """The replicas that get nothing new."""
        return [one.id for one in self.route(name).retiring]

    async def tell(self, action: str, model: str, **arguments: Any) -> None:
        """Have a command carried out."""
        answer = await self.link.command(action, model, arguments)
        assert answer.status == 200, answer.content


@contextlib.asynccontextmanager
async def supervised(ray: Ray, served: Config, epoch: int = 3) -> AsyncIterator[tuple[Bench, Gateway]]:
    """A supervisor that serves, and a gateway with its table."""
    bench, gateway = Bench(ray, served, epoch), Gateway()
    try:
        await gateway.join(await bench.announced())
        yield bench, gateway
    finally:
        if gateway._following is not None:
            await gateway.leave()
        await bench.end()


async def test_it_starts_what_is_configured_and_tells_where_it_is() -> None:
    served = config(a={"replicas": 2, "device": {"gpus": 1, "labels": {"kind": "x"}}}, b={})
    async with clustered() as ray, supervised(ray, served) as (bench, gateway):
        await until(lambda: len(gateway.ids()) == 2 and len(gateway.ids("b")) == 1)
        assert sorted(gateway.ids() + gateway.ids("b")) == sorted(spec.id for spec, _ in ray.started)
        assert all(spec.id.startswith(f"{spec.name}-3.") for spec, _ in ray.started)
        assert {spec.name: placement for spec, placement in ray.started} == {
            "a": NodePlacement(gpus=1, labels={"kind": "x"}), "b": NodePlacement(),
        }  # fmt: skip
        assert {spec.user_paths for spec, _ in ray.started} == {("/srv/models",)}
        assert len({spec.token for spec, _ in ray.started}) == 3
        where = await bench.announced()
        assert (where.epoch, where.serves, where.tls) == (3, what_is_served(served), None)
        assert where.server == served.server.model_dump(mode="json")
        assert (gateway.table.epoch, gateway.route().state) == (3, State.READY)


# Nodes


def machine(id: str, cpus: float = 8) -> Node:
    """A node with nothing on it, as far as Ray knows."""
    return Node(id, {"CPU": cpus}, {"CPU": cpus}, {})


def chosen(ray: Ray, name: str = "a") -> list[str]:
    """The nodes that were chosen for a deployment's replicas, in order."""
    return [node for (spec, _), node in zip(ray.started, ray.chosen, strict=True) if spec.name == name]


async def test_replicas_of_a_deployment_are_on_different_nodes_also_after_losses_and_reloads() -> None:
    async with clustered() as ray:
        ray.machines = [machine(id) for id in ("n1", "n2", "n3")]
        served = config(a={"replicas": 3}, b={"replicas": 2})
        async with supervised(ray, served) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 3 and len(gateway.ids("b")) == 2)
            assert (sorted(chosen(ray)), len(set(chosen(ray, "b")))) == (["n1", "n2", "n3"], 2)
            lost = next(agent for agent in ray.actors.values() if agent.state.node == chosen(ray)[1])
            before = len(chosen(ray, lost.state.name))
            await lost.end()
            await until(lambda: len(chosen(ray, lost.state.name)) > before)
            assert chosen(ray, lost.state.name)[-1] == lost.state.node
            await until(lambda: len(gateway.ids()) == 3)
            await gateway.tell("reload", "a")
            assert sorted(chosen(ray)[-3:]) == ["n1", "n2", "n3"]


@pytest.mark.slow
async def test_those_that_a_reload_replaces_keep_nobody_from_their_nodes() -> None:
    served = config(a={"replicas": 2})
    async with clustered() as ray:
        for number in (1, 2):
            await ray.add(f"a-1.{number}", served.deployments["a"], node="n1")
        ray.machines = [machine("n1"), machine("n2")]
        async with supervised(ray, served) as (_, gateway):
            await gateway.tell("reload", "a")
            assert sorted(chosen(ray)) == ["n1", "n2"]
            await gateway.tell("scale", "a", min=3, max=3)
            await gateway.tell("scale", "a", min=4, max=4)
            assert sorted(chosen(ray)) == ["n1", "n1", "n2", "n2"]


async def test_ray_chooses_where_no_node_has_capacity() -> None:
    async with clustered() as ray:
        ray.machines = [machine("n1", 1), machine("n2", 1)]
        async with supervised(ray, config(a={"replicas": 3})) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 3)
            assert sorted(chosen(ray)) == ["", "n1", "n2"]


async def test_what_starts_at_once_shares_what_others_have_left() -> None:
    async with clustered() as ray:
        ray.said_at_start = None
        ray.machines = [machine("n1")._replace(free={"CPU": 2})]
        async with supervised(ray, config(a={"replicas": 3})):
            await until(lambda: len(ray.started) == 3)
            assert sorted(chosen(ray)) == ["", "n1", "n1"]


async def test_no_replica_is_placed_on_a_node_that_is_gone_before_ray_knows() -> None:
    async with clustered() as ray:
        ray.machines = [machine("n1"), machine("n2")]
        async with supervised(ray, config(a={"replicas": 2})) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 2)
            ray.gone = {"n1"}
            await next(agent for agent in ray.actors.values() if agent.state.node == "n1").end()
            await until(lambda: len(ray.started) == 3 and len(gateway.ids()) == 2)
            assert chosen(ray)[-1] == "n2"
            ray.gone = set()
            await gateway.tell("scale", "a", min=3, max=3)
            assert chosen(ray)[-1] == "n1"


async def test_no_replica_is_placed_on_a_node_that_has_just_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replica, "OUT_OF_REACH_S", 0.1)

    async with clustered() as ray:
        ray.machines = [machine("n1"), machine("n2")]
        async with supervised(ray, config(a={"replicas": 2})) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 2)
            hung = next(agent for agent in ray.actors.values() if agent.state.node == "n1")
            hung.leave()
            await until(lambda: len(ray.started) == 3)
            assert chosen(ray)[-1] == "n2"
            await until(lambda: len(gateway.ids()) == 2)
            monkeypatch.setattr(cluster_supervisor, "HUNG_S", 0)
            await gateway.tell("scale", "a", min=3, max=3)
            assert chosen(ray)[-1] == "n1"


# Taking over


async def test_replicas_that_fit_are_taken_over_and_what_lacks_is_started() -> None:
    served = config(a={"replicas": 2}, b={"replicas": {"min": 1, "max": 3}})
    async with clustered() as ray:
        kept = [await ray.add("a-1.1", served.deployments["a"])]
        kept += [await ray.add(f"b-2.{number}", served.deployments["b"]) for number in (1, 2)]
        async with supervised(ray, served) as (_, gateway):
            assert {"b-2.1", "b-2.2"} == set(gateway.ids("b"))
            await until(lambda: len(gateway.ids()) == 2)
            assert gateway.ids()[0] == "a-1.1"
            assert [spec.name for spec, _ in ray.started] == ["a"]
            assert gateway.route("b").wanted == 2
            assert ([agent.orders for agent in kept], ray.killed) == ([[], [], []], [])
            assert {epoch for agent in kept for epoch in agent.epochs} == {3}


UNFIT: dict[str, dict[str, Any]] = {
    "starting": {"is_ready": False},
    "another configuration": {"deployment": b"another"},
    "ending": {"is_ending": True, "reason": "crashed"},
}


@pytest.mark.parametrize("said", UNFIT.values(), ids=UNFIT)
async def test_what_does_not_fit_is_ended_and_replaced(said: dict[str, Any]) -> None:
    served = config()
    async with clustered() as ray:
        agent = await ray.add("a-1.1", served.deployments["a"], **said)
        async with supervised(ray, served) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 1)
            assert gateway.ids()[0].startswith("a-3.")
            await agent.gone.wait()
            assert (set(agent.orders), ray.killed) == ({"kill"}, ["a-1.1"])


async def test_adapters_may_have_been_loaded_since_the_start() -> None:
    model = {"model": "vllm:/models/x", "python": "/usr/bin/python3", "options": {"adapters": {"fr": "fr"}}}
    served = config(a={**model, "replicas": 2})
    before = served.deployments["a"].with_adapters({})
    async with clustered() as ray:
        await ray.add("a-1.1", before, adapters={"fr": "fr"})  # as an earlier supervisor told it
        unloaded = await ray.add("a-1.2", before)
        async with supervised(ray, served) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 2)
            assert gateway.ids()[0] == "a-1.1"
            await unloaded.gone.wait()
            assert ray.killed == ["a-1.2"]


async def test_those_that_are_too_many_and_those_that_nobody_wants_are_ended() -> None:
    served = config(a={"replicas": 2})
    async with clustered() as ray:
        agents = [await ray.add(f"a-1.{number}", served.deployments["a"]) for number in range(3)]
        stranger = await ray.add("z-1.1", served.deployments["a"])
        async with supervised(ray, served) as (_, gateway):
            assert gateway.ids() == ["a-1.0", "a-1.1"]
            await agents[2].gone.wait()
            assert stranger.gone.is_set()
            assert sorted(ray.killed) == ["a-1.2", "z-1.1"]
            assert (ray.started, stranger.epochs) == ([], [])


def listening() -> set[int]:
    """The ports at which this process listens."""
    connections = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


async def test_it_announces_itself_only_once_it_has_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_supervisor, "ADOPT_TIMEOUT_S", 20)

    served = config()
    async with clustered() as ray:
        agent = await ray.add("a-1.1", served.deployments["a"])
        agent.is_away = True
        ports = listening()
        bench, gateway = Bench(ray, served, 3), Gateway()
        try:
            await until(lambda: agent.turned_away > 2)
            assert bench.output.getvalue() == ""
            assert listening() == ports
            agent.is_away = False
            await gateway.join(await bench.announced())
            assert (gateway.ids(), ray.started) == (["a-1.1"], [])
            await gateway.leave()
        finally:
            await bench.end()


async def test_replicas_that_say_nothing_are_waited_for_no_longer_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_supervisor, "ADOPT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(remote_replica, "OUT_OF_REACH_S", 0.2)

    served = config()
    async with clustered() as ray:
        agent = await ray.add("a-1.1", served.deployments["a"])
        agent.is_away = True
        async with supervised(ray, served) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 1)
            assert gateway.ids() != ["a-1.1"]
            await agent.gone.wait()


async def test_a_replica_that_has_ended_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_supervisor, "ADOPT_TIMEOUT_S", 1000)

    served = config()
    async with clustered() as ray:
        agent = await ray.add("a-1.1", served.deployments["a"])
        await agent.end()

        async def replicas() -> dict[str, Agent]:
            return dict(ray.actors)

        monkeypatch.setattr(ray, "replicas", replicas)
        async with supervised(ray, served) as (_, gateway):
            await until(lambda: len(gateway.ids()) == 1)
            assert gateway.ids() != ["a-1.1"]


# What operators have changed


def stored(ray: Ray) -> dict[str, Any]:
    """What is kept in Ray's storage for the next supervisor."""
    found: dict[str, Any] = json.loads(ray.storage[DESIRED])
    return found


async def test_what_operators_have_changed_outlives_a_supervisor() -> None:
    storage: dict[str, bytes] = {}
    served = config(a={}, b={"replicas": {"min": 1, "max": 2}}, c={})
    async with clustered(storage) as ray, supervised(ray, served) as (_, gateway):
        await until(lambda: all(gateway.ids(name) for name in "abc"))
        await gateway.tell("scale", "b", min=2, max=3)
        assert stored(ray)["bounds"]["b"]["max"] == 3  # the answer comes after this
        await gateway.tell("unload", "a")
        await gateway.tell("reload", "c", config=json.dumps({"timeout_s": 7}))
        await gateway.tell("load", "d", config=json.dumps({"model": "m:D"}))
    async with clustered(storage) as ray, supervised(ray, served, epoch=4) as (_, gateway):
        await until(lambda: len(gateway.ids("b")) == 2 and bool(gateway.ids("c")) and bool(gateway.ids("d")))
        a, b = gateway.route("a"), gateway.route("b")
        assert (a.state, a.is_set_aside, a.replicas) == (State.UNAVAILABLE, True, ())
        assert (b.least, b.most, b.wanted) == (2, 3, 2)
        assert gateway.route("c").timeout_s == 7
        # After a reload nothing of before holds, such as kept answers.
        assert [gateway.route(name).generation for name in "abc"] == [3, 3, 4]
        assert sorted(spec.name for spec, _ in ray.started) == ["b", "b", "c", "d"]
        await gateway.tell("load", "a")
        await until(lambda: gateway.route("a").state is State.READY)
        await gateway.tell("unload", "d")
        await until(lambda: "d" not in stored(ray)["config"]["deployments"])
    async with clustered(storage) as ray, supervised(ray, served, epoch=5) as (_, gateway):
        await until(lambda: bool(gateway.ids("a")))
        assert [one.name for one in gateway.table.deployments] == ["a", "b", "c"]


async def test_replicas_of_what_was_unloaded_are_ended() -> None:
    served = config()
    async with clustered() as ray:
        async with supervised(ray, served) as (bench, gateway):
            await until(lambda: bool(gateway.ids()))
            await gateway.tell("unload", "a")
            await until(lambda: stored(ray)["set_aside"] == ["a"])
        left = await ray.add("a-1.1", served.deployments["a"])
        async with supervised(ray, served, epoch=4) as (bench, gateway):
            assert left.gone.is_set()
            assert gateway.route().is_set_aside
            assert len(ray.started) == 1
            assert bench.ended is None


async def test_an_answer_says_if_storage_can_not_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_supervisor, "PING_EVERY_S", 0.01)
    monkeypatch.setattr(cluster_supervisor, "STORE_TIMEOUT_S", 0.05)
    async with clustered() as ray, supervised(ray, config()) as (_, gateway):
        await until(lambda: bool(gateway.ids()) and DESIRED in ray.storage)
        ray.failures = 1_000_000
        answer = await gateway.link.command("unload", "a", {})
        assert answer.status == 200
        assert "Ray's storage can't be written" in answer.content["warning"]
        ray.failures = 0
        assert "warning" not in (await gateway.link.command("load", "a", {})).content


async def test_storage_that_can_not_be_written_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_supervisor, "PING_EVERY_S", 0.01)

    async with clustered() as ray, supervised(ray, config()) as (_, gateway):
        await until(lambda: bool(gateway.ids()) and DESIRED in ray.storage)
        ray.failures = 2
        await gateway.tell("unload", "a")
        await until(lambda: stored(ray)["set_aside"] == ["a"])
        assert ray.failures == 0
    assert caplog.text.count("Ray's storage can't be written; trying again: the head is gone") == 2


# While it serves


async def test_a_head_that_is_gone_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster_supervisor, "PING_EVERY_S", 0.01)
    caplog.set_level("INFO", "headwater")

    def lines() -> list[str]:
        return [one.message for one in caplog.records if one.message.startswith("Ray's head")]

    async with clustered() as ray, supervised(ray, config()) as (_, gateway):
        await until(lambda: bool(gateway.ids()))
        ray.trouble = "Ray's head is gone"
        await until(lambda: bool(lines()))
        asked = ray.head_looks
        await until(lambda: ray.head_looks > asked + 3)
        ray.trouble = ""
        await until(lambda: len(lines()) > 1)
    assert lines() == ["Ray's head is gone", "Ray's head answers again"]


async def test_what_nobody_has_is_ended_if_it_is_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_supervisor, "RECONCILE_EVERY_S", 0.02)

    served = config()
    async with clustered() as ray, supervised(ray, served) as (_, gateway):
        await until(lambda: bool(gateway.ids()))
        ray.failures = 1  # which it survives
        stranger = await ray.add("a-1.7", served.deployments["a"])
        looks = ray.looks
        await stranger.gone.wait()
        assert ray.looks >= looks + 2
        assert (ray.killed, stranger.orders) == (["a-1.7"], [])
        looks = ray.looks
        await until(lambda: ray.looks > looks + 3)
        assert ray.killed == ["a-1.7"]


async def test_a_replica_out_of_reach_gets_nothing_new_and_one_that_is_lost_is_replaced() -> None:
    async with clustered() as ray, supervised(ray, config(a={"replicas": 2})) as (_, gateway):
        await until(lambda: len(gateway.ids()) == 2)
        first, second = ray.actors.values()
        first.leave()
        await until(lambda: gateway.ids() == [second.id])
        assert gateway.retiring() == [first.id]
        first.is_away = False
        await until(lambda: len(gateway.ids()) == 2)
        assert (len(ray.started), gateway.retiring()) == (2, [])
        await second.end()
        await until(lambda: len(ray.started) == 3 and len(gateway.ids()) == 2)
        assert second.id not in gateway.ids()


@pytest.mark.slow
async def test_a_replica_that_stays_out_of_reach_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_replica, "OUT_OF_REACH_S", 0.5)

    async with clustered() as ray, supervised(ray, config(a={"replicas": 2})) as (_, gateway):
        await until(lambda: len(gateway.ids()) == 2)
        first, second = ray.actors.values()
        first.leave()
        await until(lambda: (gateway.ids(), gateway.retiring()) == ([second.id], [first.id]))
        await until(lambda: len(gateway.ids()) == 2)
        assert gateway.retiring() == []
        assert first.id not in gateway.ids()
        await first.gone.wait()


async def test_an_unload_waits_for_what_a_replica_out_of_reach_has_in_flight() -> None:
    async with clustered() as ray, supervised(ray, config()) as (_, gateway):
        await until(lambda: len(gateway.ids()) == 1)
        (agent,) = ray.actors.values()
        agent.leave()
        await until(lambda: gateway.ids() == [])
        unloading = asyncio.create_task(gateway.tell("unload", "a"))
        await until(lambda: gateway.drains == [("a", None)])
        agent.is_away = False
        await unloading


async def test_what_has_no_place_says_why() -> None:
    async with clustered() as ray:
        ray.said_at_start, ray.shortage = None, "it takes 1 GPU, and the largest node has 0"
        async with supervised(ray, config()) as (_, gateway):
            await until(lambda: ray.shortage in gateway.route().reason)
            assert gateway.route().state is State.LOADING
            (agent,) = ray.actors.values()
            await agent.open(**READY)
            await until(lambda: gateway.route().state is State.READY)


async def test_workers_of_all_gateways_share_what_is_bounded() -> None:
    served = config(a={"batching": {"max_queue_size": 60}})
    async with clustered() as ray, supervised(ray, served) as (bench, gateway):
        assert gateway.route().max_queue_size == 60
        other = await Gateway().join(await bench.announced(), workers=2)
        await until(lambda: gateway.route().max_queue_size == other.route().max_queue_size == 20)
        await other.leave()
        await until(lambda: gateway.route().max_queue_size == 60)


async def test_a_gateway_that_joins_gets_each_table_once() -> None:
    async with clustered() as ray, supervised(ray, config()) as (bench, gateway):
        await until(lambda: bool(gateway.ids()))
        reader, writer = await asyncio.open_connection(*host_and_port((await bench.announced()).address))
        writer.write(msgspec.json.encode(Hello((await bench.announced()).token)) + b"\n")
        found = [json.loads(await reader.readline())["type"] for _ in range(2)]
        writer.close()
        await writer.wait_closed()
        assert found == ["table", "change"]


async def test_cancelling_and_quarantine_reach_the_other_gateways() -> None:
    async with clustered() as ray, supervised(ray, config()) as (bench, first):
        others = [await Gateway(number).join(await bench.announced()) for number in (2, 3)]
        assert await first.link.cancel_elsewhere("key:mine") == 5
        assert [one.cancelled for one in (first, *others)] == [[], ["key:mine"], ["key:mine"]]
        others[0].link.report_quarantined("a", b"\x01")
        await until(lambda: bool(first.quarantined) and bool(others[1].quarantined))
        assert (first.quarantined, others[0].quarantined) == ([("a", b"\x01")], [])
        for one in others:
            await one.leave()


# Its end


async def test_a_stop_lets_gateways_drain_ends_all_and_forgets_what_was_desired() -> None:
    async with clustered() as ray, supervised(ray, config(a={"replicas": 2})) as (bench, gateway):
        await until(lambda: len(gateway.ids()) == 2 and DESIRED in ray.storage)
        bench.orders.feed_data(b"stop\n")
        await until(lambda: gateway.table.draining)
        agents = list(ray.actors.values())
        assert [agent.orders for agent in agents] == [[], []]  # the gateway is still there
        await gateway.leave()
        await bench.running
        assert bench.ended is None
        assert [agent.orders for agent in agents] == [["stop"], ["stop"]]
        assert all(agent.gone.is_set() for agent in agents)
        assert DESIRED not in ray.storage


async def test_what_runs_stays_if_it_ends_otherwise() -> None:
    async with clustered() as ray, supervised(ray, config()) as (bench, gateway):
        await until(lambda: bool(gateway.ids()) and DESIRED in ray.storage)
        bench.orders.feed_eof()
        await bench.running
        assert bench.ended == 1
        (agent,) = ray.actors.values()
        assert (agent.orders, ray.killed, DESIRED in ray.storage) == ([], [], True)


async def test_it_gives_way_to_one_that_has_followed(caplog: pytest.LogCaptureFixture) -> None:
    async with clustered() as ray, supervised(ray, config()) as (bench, gateway):
        await until(lambda: bool(gateway.ids()))
        (agent,) = ray.actors.values()
        agent.say(is_stale=True)
        await bench.running
        assert (bench.ended, agent.orders, ray.killed) == (1, [], [])
    assert "another supervisor has taken over" in caplog.text


# As a process

PROCESS = """
import asyncio, os, sys
from pathlib import Path
from headwater_server.cluster import cluster_supervisor as supervisor
from headwater_server.cluster.ray_client import ActorGone
folder = Path(sys.argv[1])
class Ray:
    def __init__(self, address):
        assert address == "head:6379"
    async def node_addresses(self):
        return set(sys.argv[2].split())
    async def get(self, key):
        return (folder / key).read_bytes() if (folder / key).exists() else None
    async def put(self, key, value):
        (folder / key).write_bytes(value)
    async def delete(self, key):
        (folder / key).unlink(missing_ok=True)
    async def replicas(self):
        return {}
    async def start_replica(self, *arguments):
        return "actor"
    async def said(self, actor, timeout_s=None):
        await asyncio.Event().wait()
    async def look(self, placement, memory):
        return "", False
    def head_trouble(self, timeout_s):
        return ""
    async def kill(self, actor):
        pass
supervisor.RayClient = Ray
supervisor.main()
"""


def process(folder: Path, orders: bytes | None, nodes: str = "10.0.0.1") -> tuple[dict[str, Any], int]:
    """The first line of a supervisor's process, and its exit status after these orders, or without any more of them."""
    found = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder), nodes], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "HEADWATER_RAY": "head:6379", "HEADWATER_NODE": "10.0.0.1"},
    )  # fmt: skip
    assert found.stdin is not None
    assert found.stdout is not None
    write_spec(found.stdin, SupervisorSpec(config(), ()).encoded())
    said = json.loads(found.stdout.readline())
    if orders is not None:
        found.stdin.write(orders)
        found.stdin.flush()
        found.wait()
    found.stdin.close()
    status = found.wait()
    found.stdout.close()
    return said, status


@pytest.mark.slow
def test_each_process_has_a_greater_epoch_and_only_a_stop_ends_it_for_good(tmp_path: Path) -> None:
    began_s = int(time.time())
    first, status = process(tmp_path, None)
    assert first["epoch"] >= began_s  # an earlier one may have been forgotten
    assert (status, (tmp_path / DESIRED).exists()) == (1, True)  # Ray starts another one
    assert first["address"].startswith("127.0.0.1:")  # not this node's address, as there is no TLS
    (tmp_path / EPOCH).write_bytes(b"%d" % (first["epoch"] + 1_000_000))  # its clock was ahead
    second, status = process(tmp_path, b"stop\n")
    assert (second["epoch"] - first["epoch"], status, (tmp_path / DESIRED).exists()) == (1_000_001, 0, False)
    assert second["token"] != first["token"]


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False])
def test_several_machines_need_tls(tmp_path: Path, is_first: bool) -> None:
    if not is_first:
        (tmp_path / EPOCH).write_bytes(b"7")
    said, status = process(tmp_path, None, "10.0.0.1 10.0.0.2")
    assert said["error"].startswith("cluster.tls: expected a folder with ca.crt, tls.crt and tls.key")
    assert status == (0 if is_first else 1)  # one that replaces another is tried again, as replicas may depend on it
