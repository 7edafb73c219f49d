"""Load, unload and reload as the supervisor carries them out, with replicas that are no processes."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from app.config import Config
from app.control import Command, CommandAnswer, Drained
from app.graph_state import GraphState, StepState
from app.lifecycle import Lifecycle
from app.replica_host import Launched
from app.replica_process import ReplicaProcess
from app.replica_set import ReplicaSet
from app.routing import ReplicaRoute, State
from inference.signature import Signature, TensorSpec

SIGNATURES = {
    "p.trunk": Signature(
        "", (TensorSpec("x", "FP32", (2,)),), (TensorSpec("features", "FP32", (3,)),), max_batch_size=8
    ),
    "p.head": Signature(
        "", (TensorSpec("features", "FP32", (3,)),), (TensorSpec("y", "FP32", (1,)),), max_batch_size=8
    ),
    "shared": Signature(
        "", (TensorSpec("features", "FP32", (3,)),), (TensorSpec("z", "FP32", (1,)),), max_batch_size=8
    ),
}
GRAPH = {
    "placement": "graph",
    "trunk": {"model": "m:Trunk"},
    "heads": {"head": {"model": "m:Head"}, "other": {"deployment": "shared"}},
}


class Replica:
    """Stands for a `ReplicaProcess`."""

    def __init__(self, name: str, id: str, exited: asyncio.Future[int]) -> None:
        self.name = name
        self.id = id
        self.exited = exited
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ending = asyncio.Event()
        self.signature = SIGNATURES.get(name, SIGNATURES["shared"])
        self.facts: dict[str, str] = {}
        self.reason = ""
        self.leftovers: list[str] = []
        self.directory = Path("/nonexistent")
        self.group = 0
        self.is_stubborn = False

    def get_ready(self) -> None:
        self.ready.set_result(True)

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.ending.set()
        if not self.ready.done():
            self.ready.set_result(False)
        if not self.exited.done():
            self.exited.set_result(0)

    def stop(self) -> None:
        if not self.is_stubborn:
            self.end("stopped")

    def kill(self) -> None:
        self.end("killed")

    async def ended(self) -> None: ...

    def route(self) -> ReplicaRoute:
        return ReplicaRoute(self.id, "", "")


class Supervisor:
    """Stands for the supervisor: it has the sets, and does as told by the test."""

    def __init__(self, deployments: dict[str, Any]) -> None:
        config = Config.model_validate({"deployments": deployments})
        self.is_stopping = False
        self.start_slots = asyncio.Semaphore(8)
        self.graphs = {
            name: GraphState(name, one) for name, one in config.deployments.items() if one.pipeline is not None
        }
        self.sets = {
            name: ReplicaSet(name, one, self, name.partition(".")[0] if "." in name else None)
            for name, one in config.all_deployments().items()
        }
        self.lifecycle = Lifecycle(self.sets, self.graphs, self)
        self.launched: list[Replica] = []
        self.auto_ready = True
        self.failing: set[str] = set()
        """Deployments of which nothing starts."""
        self.drains: list[tuple[str, float, list[str] | None]] = []
        self.drain_gate: asyncio.Event | None = None
        self.drained = Drained()
        self.states: dict[str, list[State]] = {}

    def launch(self, replicas: ReplicaSet, on_progress: Callable[[str], None]) -> Launched:
        exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        replica = Replica(replicas.name, f"{replicas.name}-{len(self.launched)}", exited)
        self.launched.append(replica)
        on_progress("importing")
        if replicas.name in self.failing:
            replica.end("RuntimeError: no weights here")
        elif self.auto_ready:
            replica.get_ready()
        return Launched(cast(ReplicaProcess, replica), exited)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        task.add_done_callback(lambda done: done.cancelled() or done.result())
        return task

    async def wait_for_stop(self, timeout_s: float) -> None:
        await asyncio.sleep(0 if timeout_s < 100 else timeout_s)

    async def drain(self, name: str, timeout_s: float, replicas: list[str] | None) -> Drained:
        self.drains.append((name, timeout_s, replicas))
        if self.drain_gate is not None:
            await self.drain_gate.wait()
        return self.drained

    def on_change(self) -> None:
        steps = {one.name: StepState(one.state, one.reason, one.signature) for one in self.sets.values()}
        for graph in self.graphs.values():
            graph.update(steps)
        told: list[ReplicaSet | GraphState] = [*self.sets.values(), *self.graphs.values()]
        for one in told:
            seen = self.states.setdefault(one.name, [])
            if not seen or seen[-1] is not one.state:
                seen.append(one.state)

    async def start(self) -> None:
        for one in self.sets.values():
            one.start()
        await settle()

    async def do(self, action: str, name: str) -> CommandAnswer:
        return await self.lifecycle.answer(Command(7, action, name))

    async def told(self, action: str, name: str) -> tuple[int, str]:
        """Status and error."""
        answer = await self.do(action, name)
        assert answer.id == 7
        return answer.status, answer.content.get("error", "")


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - no event of the product's
        await asyncio.sleep(0)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        try:
            await scenario()
        finally:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    asyncio.run(asyncio.wait_for(main(), 20))


def one(**fields: Any) -> dict[str, Any]:
    return {"a": {"model": "m:A", **fields}}


# One deployment


def test_unload_drains_then_ends_and_says_so_and_load_brings_it_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        supervisor = Supervisor(one(drain_timeout_s=7))
        await supervisor.start()
        a = supervisor.sets["a"]
        supervisor.drained = Drained(2, 1)
        supervisor.drain_gate = asyncio.Event()
        unloading = asyncio.create_task(supervisor.do("unload", "a"))
        await settle()
        assert (a.state, a.is_set_aside, list(a.ready)) == (State.DRAINING, True, ["a-0"])
        supervisor.drain_gate.set()
        answer = await unloading
        assert answer.status == 200
        assert answer.content.pop("took_s") >= 0
        assert answer.content == {
            "name": "a", "state": "UNAVAILABLE", "drained": 2, "ended": 1,
            "freed": {"host_bytes": 0, "gpu_bytes": None}, "leftovers": [],
        }  # fmt: skip
        assert supervisor.drains == [("a", 7, None)]
        assert a.reason == "it is unloaded: load it with POST /v2/repository/models/a/load"
        assert (a.ready, a.is_loaded, len(supervisor.launched)) == ({}, False, 1)

        answer = await supervisor.do("load", "a")
        assert (answer.status, answer.content["state"]) == (200, "READY")
        assert (list(a.ready), a.is_set_aside) == (["a-1"], False)
        seen = ["LOADING", "READY", "DRAINING", "UNLOADING", "UNAVAILABLE", "LOADING", "READY"]
        logged = [line for line in caplog.messages if " -> " in line]
        assert [line.split(": ")[1] for line in logged] == [
            f"{before} -> {after}" for before, after in itertools.pairwise(seen)
        ]

    run(scenario)


def test_what_it_is_in_already_is_a_conflict_that_changes_nothing() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        status, error = await supervisor.told("load", "a")
        assert (status, "READY" in error, "reload" in error) == (409, True, True)
        assert supervisor.sets["a"].state is State.READY
        await supervisor.do("unload", "a")
        before = supervisor.sets["a"].since_s
        status, error = await supervisor.told("unload", "a")
        assert (status, "nothing to unload" in error) == (409, True)
        status, error = await supervisor.told("reload", "a")
        assert (status, "expected load" in error) == (409, True)
        assert supervisor.sets["a"].since_s == before
        assert (await supervisor.told("load", "b"))[0] == 404
        assert (await supervisor.told("unload", "b")) == (404, "model 'b': unknown; this server has `a`")

    run(scenario)


@pytest.mark.parametrize("first", ["unload", "reload"])
@pytest.mark.parametrize("second", ["load", "unload", "reload"])
def test_one_thing_at_a_time(first: str, second: str) -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        supervisor.drain_gate = asyncio.Event()
        under_way = asyncio.create_task(supervisor.do(first, "a"))
        await settle()
        assert await supervisor.told(second, "a") == (
            409,
            f"model `a`: {first} is under way; expected {second} after its end",
        )
        supervisor.drain_gate.set()
        assert (await under_way).status == 200

    run(scenario)


def test_a_load_that_fails_is_tried_once_and_may_be_told_again() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        await supervisor.do("unload", "a")
        supervisor.failing.add("a")
        status, error = await supervisor.told("load", "a")
        a = supervisor.sets["a"]
        assert (status, "RuntimeError: no weights here" in error) == (500, True)
        assert (a.state, a.is_set_aside, a.has_given_up, len(supervisor.launched)) == (State.FAILED, False, False, 2)
        supervisor.failing.clear()
        assert await supervisor.told("load", "a") == (200, "")
        assert a.state is State.READY

    run(scenario)


def test_of_a_load_with_several_replicas_all_start_or_none_stays() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one(replicas=2))
        await supervisor.start()
        assert len(supervisor.sets["a"].ready) == 2
        await supervisor.do("unload", "a")
        supervisor.auto_ready = False
        loading = asyncio.create_task(supervisor.told("load", "a"))
        await settle()
        good, bad = supervisor.launched[2:]
        good.get_ready()
        bad.end("out of memory")
        assert (await loading)[0] == 500
        assert good.exited.done()
        assert not supervisor.sets["a"].is_loaded

    run(scenario)


def test_a_deployment_that_has_given_up_can_be_loaded() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        supervisor.failing.add("a")
        await supervisor.start()
        a = supervisor.sets["a"]
        await until(lambda: a.state is State.FAILED)
        assert (a.has_given_up, len(supervisor.launched)) == (True, 5)
        assert (await supervisor.told("unload", "a"))[0] == 409
        supervisor.failing.clear()
        assert await supervisor.told("load", "a") == (200, "")
        assert (a.state, a.has_given_up) == (State.READY, False)

    run(scenario)


def test_a_replica_that_is_lost_while_it_drains_is_not_replaced() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        supervisor.drain_gate = asyncio.Event()
        unloading = asyncio.create_task(supervisor.do("unload", "a"))
        await settle()
        supervisor.launched[0].end("killed by SIGKILL")
        await settle()
        assert supervisor.sets["a"].state is State.DRAINING
        assert supervisor.sets["a"].ready == {}
        supervisor.drain_gate.set()
        assert (await unloading).content["state"] == "UNAVAILABLE"
        assert len(supervisor.launched) == 1

    run(scenario)


def test_what_waits_for_its_next_try_can_be_unloaded() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        supervisor.auto_ready = False
        supervisor.launched[0].end("killed by SIGKILL")
        await settle()
        assert (supervisor.sets["a"].state, len(supervisor.launched)) == (State.UNAVAILABLE, 2)
        assert await supervisor.told("unload", "a") == (200, "")
        assert supervisor.launched[1].exited.done()
        assert (supervisor.sets["a"].state, len(supervisor.launched)) == (State.UNAVAILABLE, 2)
        assert supervisor.sets["a"].is_set_aside

    run(scenario)


def test_what_remains_makes_it_failed_and_is_told() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        supervisor.launched[0].leftovers = ["/dev/shm/psm_1: Permission denied"]
        answer = await supervisor.do("unload", "a")
        assert (answer.status, answer.content["state"]) == (500, "FAILED")
        assert answer.content["leftovers"] == ["/dev/shm/psm_1: Permission denied"]
        assert "/dev/shm/psm_1" in answer.content["error"]
        assert "/dev/shm/psm_1" in supervisor.sets["a"].reason
        assert await supervisor.told("load", "a") == (200, "")

    run(scenario)


def test_a_replica_that_does_not_end_when_told_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.replica_set.REPLICA_END_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        supervisor.launched[0].is_stubborn = True
        answer = await supervisor.do("unload", "a")
        assert (answer.status, answer.content["warnings"]) == (200, ["replica a-0: killed"])

    run(scenario)


# Reload


def test_reload_switches_when_the_new_one_is_ready_and_then_retires_the_old() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one(drain_timeout_s=7))
        await supervisor.start()
        a = supervisor.sets["a"]
        supervisor.auto_ready = False
        supervisor.drained = Drained(4, 0)
        supervisor.drain_gate = asyncio.Event()
        reloading = asyncio.create_task(supervisor.do("reload", "a"))
        await settle()
        assert list(a.ready) == ["a-0"]
        supervisor.launched[1].get_ready()
        await settle()
        route = a.route(1)
        assert [replica.id for replica in route.replicas] == ["a-1"]
        assert [replica.id for replica in route.retiring] == ["a-0"]
        assert supervisor.drains == [("a", 7, ["a-0"])]
        assert not supervisor.launched[0].exited.done()
        supervisor.drain_gate.set()
        answer = await reloading
        assert (answer.status, answer.content["state"], answer.content["drained"]) == (200, "READY", 4)
        assert supervisor.launched[0].exited.done()
        assert a.route(1).retiring == ()
        assert supervisor.states["a"] == [State.LOADING, State.READY]

        supervisor.launched[1].end("killed by SIGKILL")  # the new one is kept like any other
        await settle()
        assert len(supervisor.launched) == 3

    run(scenario)


def test_a_reload_that_fails_leaves_what_serves() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one(replicas=2))
        await supervisor.start()
        supervisor.failing.add("a")
        status, error = await supervisor.told("reload", "a")
        assert (status, "RuntimeError: no weights here" in error, "goes on serving" in error) == (500, True, True)
        a = supervisor.sets["a"]
        assert (a.state, list(a.ready), supervisor.drains) == (State.READY, ["a-0", "a-1"], [])
        assert supervisor.states["a"] == [State.LOADING, State.READY]

    run(scenario)


def test_with_strategy_recreate_the_old_one_ends_first() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one(strategy="recreate"))
        await supervisor.start()
        supervisor.auto_ready = False
        reloading = asyncio.create_task(supervisor.do("reload", "a"))
        await until(lambda: len(supervisor.launched) == 2)
        assert supervisor.launched[0].exited.done()
        supervisor.launched[1].get_ready()
        answer = await reloading
        assert (answer.status, answer.content["state"]) == (200, "READY")
        assert supervisor.states["a"][-5:] == [
            State.DRAINING, State.UNLOADING, State.UNAVAILABLE, State.LOADING, State.READY,
        ]  # fmt: skip

    run(scenario)


def test_nothing_is_started_by_a_server_that_stops() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(one())
        await supervisor.start()
        supervisor.is_stopping = True
        assert await supervisor.told("reload", "a") == (
            503,
            "the server is stopping; what served before goes on serving",
        )
        assert len(supervisor.launched) == 1

    run(scenario)


# A pipeline whose steps are deployments


def pipeline(**fields: Any) -> dict[str, Any]:
    return {"p": {"pipeline": GRAPH, **fields}, "shared": {"model": "m:Shared"}}


def test_a_step_goes_with_its_pipeline_only() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(pipeline())
        await supervisor.start()
        for action in ("load", "unload", "reload"):
            status, error = await supervisor.told(action, "p.trunk")
            assert (status, "step of the pipeline `p`" in error) == (409, True)

    run(scenario)


def test_a_pipeline_drains_before_its_steps_and_takes_only_its_own_with_it() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(pipeline(drain_timeout_s=5))
        await supervisor.start()
        graph = supervisor.graphs["p"]
        assert graph.state is State.READY
        supervisor.drain_gate = asyncio.Event()
        unloading = asyncio.create_task(supervisor.do("unload", "p"))
        await settle()
        assert (graph.state, graph.route(1).is_open) == (State.DRAINING, False)
        assert supervisor.sets["p.trunk"].state is State.READY  # what is in flight needs it
        supervisor.drain_gate.set()
        answer = await unloading
        assert (answer.status, answer.content["state"]) == (200, "UNAVAILABLE")
        assert [name for name, _, _ in supervisor.drains] == ["p", "p.trunk", "p.head"]
        assert all(left_s <= 5 for _, left_s, _ in supervisor.drains)
        states = {name: one.state for name, one in supervisor.sets.items()}
        assert states == {"p.trunk": State.UNAVAILABLE, "p.head": State.UNAVAILABLE, "shared": State.READY}
        assert graph.is_set_aside
        assert graph.reason == "it is unloaded: load it with POST /v2/repository/models/p/load"
        assert (await supervisor.told("unload", "p"))[0] == 409

        assert await supervisor.told("load", "p") == (200, "")
        assert (graph.state, graph.is_set_aside) == (State.READY, False)
        assert supervisor.states["p"][-5:] == [
            State.DRAINING, State.UNLOADING, State.UNAVAILABLE, State.LOADING, State.READY,
        ]  # fmt: skip
        assert (await supervisor.told("load", "p"))[0] == 409

    run(scenario)


def test_a_shared_step_can_be_unloaded_and_the_pipeline_says_so() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(pipeline())
        await supervisor.start()
        assert await supervisor.told("unload", "shared") == (200, "")
        graph = supervisor.graphs["p"]
        assert (graph.state, "step `other` is UNAVAILABLE: it is unloaded" in graph.reason) == (State.READY, True)

    run(scenario)


def test_a_pipeline_of_which_a_step_fails_to_load_can_be_told_again() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(pipeline())
        await supervisor.start()
        await supervisor.do("unload", "p")
        supervisor.failing.add("p.trunk")
        status, error = await supervisor.told("load", "p")
        assert (status, "p.trunk" in error) == (500, True)
        assert supervisor.graphs["p"].state.value == "FAILED"
        supervisor.failing.clear()
        assert await supervisor.told("load", "p") == (200, "")
        assert supervisor.graphs["p"].state is State.READY
        assert [replica.name for replica in supervisor.launched].count("p.head") == 2  # it was there already

    run(scenario)


def test_a_pipelines_reload_replaces_all_its_own_steps_or_none() -> None:
    async def scenario() -> None:
        supervisor = Supervisor(pipeline())
        await supervisor.start()
        supervisor.failing.add("p.head")
        before = {name: list(one.ready) for name, one in supervisor.sets.items()}
        assert (await supervisor.told("reload", "p"))[0] == 500
        assert {name: list(one.ready) for name, one in supervisor.sets.items()} == before
        assert [replica.exited.done() for replica in supervisor.launched[3:]] == [True, True]
        supervisor.failing.clear()
        assert await supervisor.told("reload", "p") == (200, "")
        after = {name: list(one.ready) for name, one in supervisor.sets.items()}
        assert after["shared"] == before["shared"]
        assert after["p.trunk"] != before["p.trunk"]
        assert after["p.head"] != before["p.head"]
        assert supervisor.states["p"] == [State.LOADING, State.READY]

    run(scenario)
