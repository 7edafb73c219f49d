"""Stands for the supervisor and its replicas, which are no processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

from headwater.signature import Signature, TensorSpec
from headwater_server.config.schema import Config, Deployment
from headwater_server.control.load import DeploymentLoad
from headwater_server.control.messages import Command, CommandAnswer, Drained
from headwater_server.control.routing import ReplicaRoute, State
from headwater_server.process.machine import HOST
from headwater_server.process.proc import GroupUse
from headwater_server.process.socket_http import ask_socket
from headwater_server.supervisor.autoscaler import Autoscaler
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.deployments import Deployments
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.lifecycle import Lifecycle
from headwater_server.supervisor.memory_budget import MemoryBudget, ReplicaMemory
from headwater_server.supervisor.replica_set import ReplicaSet
from headwater_server.supervisor.states import Composite

SIGNATURES = {
    step: Signature("", (TensorSpec(x, "FP32", (width,)),), (TensorSpec(y, "FP32", (count,)),), max_batch_size=8)
    for step, x, width, y, count in (
        ("p.trunk", "x", 2, "features", 3),
        ("p.head", "features", 3, "y", 1),
        ("shared", "features", 3, "z", 1),
    )
}
GRAPH = {
    "placement": "graph",
    "trunk": {"model": "m:Trunk"},
    "heads": {"head": {"model": "m:Head"}, "other": {"deployment": "shared"}},
}


class Replica:
    """Stands for a `ReplicaHandle`."""

    def __init__(self, name: str, id: str, exited: asyncio.Future[None]) -> None:
        self.name = name
        self.id = id
        self.exited = exited
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.ending = asyncio.Event()
        self.batch_limit = 0
        self.signature: Signature | None = SIGNATURES.get(name, SIGNATURES["shared"])
        self.facts: dict[str, str] = {}
        self.reason = ""
        self.leftovers: list[str] = []
        self.group = 0
        self.is_reachable = self.has_place = True
        self.is_lost_with_node = self.is_cut_off = False
        self.is_stubborn = self.is_permanent = self.is_shortage = False
        self.config: Deployment | None = None
        """What it was started with."""
        self.device = "auto"
        self.adapters: dict[str, str] = {}
        self.socket = ""

    def get_ready(self) -> None:
        self.ready.set_result(True)

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.ending.set()
        if not self.ready.done():
            self.ready.set_result(False)
        if not self.exited.done():
            self.exited.set_result(None)

    def stop(self) -> None:
        if not self.is_stubborn:
            self.end("stopped")

    def kill(self) -> None:
        self.end("killed")

    def account(self) -> str:
        return self.reason

    def cause(self) -> str:
        return self.reason

    async def wait_for_place(self, timeout_s: float) -> None:
        return

    async def use(self) -> GroupUse:
        return GroupUse()

    async def remains(self) -> list[str]:
        return self.leftovers

    async def ask_vllm(self, url: str, body: str, timeout_s: float) -> tuple[int, bytes]:
        return await asyncio.to_thread(ask_socket, Path(self.socket), "POST", url, body, timeout_s)

    def route(self) -> ReplicaRoute:
        return ReplicaRoute(self.id, f"unix:{self.socket}", "")


TASKS: set[asyncio.Task[None]] = set()
"""Tasks that run. Tests drop supervisors, and asyncio reports tasks that are collected while they are pending."""


class Supervisor(ChildProcesses):
    """Stands for the supervisor: it has the sets, and does as told by the test."""

    def __init__(self, deployments: dict[str, Any], allow_load: str = "settings") -> None:
        config = Config.model_validate({"deployments": deployments, "server": {"allow_load": allow_load}})
        super().__init__(ReplicaMemory(), (), self.drain, self.on_change)
        self.start_slots = asyncio.Semaphore(8)
        self.deployments = Deployments(config, self)
        self.composites = self.deployments.composites
        self.sets = self.deployments.sets
        self.lifecycle = Lifecycle(self.deployments, self)
        self.launched: list[Replica] = []
        self.auto_ready = self.has_place = True
        self.failing: set[str] = set()
        """Deployments of which nothing starts."""
        self.drains: list[tuple[str, float, list[str] | None]] = []
        self.drain_gate: asyncio.Event | None = None
        self.drained = Drained()
        self.states: dict[str, list[State]] = {}

    def launch(self, name: str, config: Deployment, on_progress: Callable[[str], None], fork: object) -> ReplicaHandle:
        exited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replica = Replica(name, f"{name}-{len(self.launched)}", exited)
        replica.config = config
        replica.device = config.placements[0]
        replica.has_place = self.has_place
        self.launched.append(replica)
        on_progress("importing")
        if name in self.failing:
            replica.end("RuntimeError: no weights here")
        elif self.auto_ready and self.has_place:
            replica.get_ready()
        return replica

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        TASKS.add(task)
        task.add_done_callback(TASKS.discard)
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
        steps = {name: one.route(1) for name, one in self.sets.items()}
        for graph in self.composites.values():
            graph.update(steps)
        told: list[ReplicaSet | Composite] = [*self.sets.values(), *self.composites.values()]
        for one in told:
            seen = self.states.setdefault(one.name, [])
            if not seen or seen[-1] is not one.state:
                seen.append(one.state)

    async def start(self) -> None:
        for one in self.sets.values():
            one.start()
        await settle()

    async def do(self, action: str, name: str, config: str | dict[str, Any] | None = None) -> CommandAnswer:
        text = json.dumps(config) if isinstance(config, dict) else config
        return await self.lifecycle.answer(Command(7, action, name, {} if text is None else {"config": text}))

    async def told(self, action: str, name: str, config: str | dict[str, Any] | None = None) -> tuple[int, str]:
        """Status and error."""
        answer = await self.do(action, name, config)
        assert answer.id == 7
        return answer.status, answer.content.get("error", "")


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - no event of the product's
        await asyncio.sleep(0)


def one(**fields: Any) -> dict[str, Any]:
    return {"a": {"model": "m:A", **fields}}


def pipeline(**fields: Any) -> dict[str, Any]:
    return {"p": {"pipeline": GRAPH, **fields}, "shared": {"model": "m:Shared"}}


NO_GROUP = 1 << 22
"""The groups of the tests' replicas are numbered from here: no process has such a number, as process 1 has 1."""


class Machine(Supervisor):
    """With memory, of which each replica takes as much as `size` says."""

    def __init__(
        self,
        deployments: dict[str, Any],
        limit: int | None = None,
        gpus: Mapping[str, int] = {},
        allow_load: str = "settings",
    ) -> None:
        super().__init__(deployments, allow_load)
        self.sizes: dict[str, int] = {}
        """By deployment; others take 100."""
        self.loads: dict[str, DeploymentLoad] = {}
        self.now_s = 0.0
        self.measurements = 0
        if limit is not None:
            budget = MemoryBudget({HOST: limit, **gpus})
            self.memory = ReplicaMemory(budget, self._measured, used=lambda: {})
        self.utilization: Mapping[str, float] = {}
        self.autoscaler = Autoscaler(
            self.sets, lambda: self.loads, self.lifecycle.is_busy, self, self._see, clock=lambda: self.now_s
        )

    def _see(self, shares: Mapping[str, float]) -> None:
        self.utilization = shares

    def launch(self, name: str, *others: Any) -> Any:
        launched = super().launch(name, *others)
        self.launched[-1].group = NO_GROUP + len(self.launched)
        return launched

    async def drain(self, name: str, timeout_s: float, replicas: list[str] | None) -> Drained:
        """The gate holds up what single replicas have."""
        if replicas is None:
            return Drained()
        return await super().drain(name, timeout_s, replicas)

    def _measured(self, groups: Collection[int]) -> dict[int, dict[str, int]]:
        self.measurements += 1
        return {group: {HOST: self.sizes.get(self.launched[group - NO_GROUP - 1].name, 100)} for group in groups}

    async def scale(self, name: str, least: int, most: int | None = None) -> CommandAnswer:
        arguments = {"min": least, "max": most or least}
        return await self.lifecycle.answer(Command(7, "scale", name, arguments))

    async def tick(self, seconds: float) -> None:
        """Let the autoscaler see so much time."""
        for _ in range(round(seconds / 0.5)):
            self.now_s += 0.5
            self.autoscaler.tick()
            await settle()

    @property
    def alive(self) -> list[str]:
        return [replica.id for replica in self.launched if not replica.exited.done()]


def range_of(least: int, most: int, **fields: Any) -> dict[str, Any]:
    scaling = {"up_after_s": 1, "down_after_s": 2}
    return one(replicas={"min": least, "max": most}, scaling=scaling, **fields)


BUSY = DeploymentLoad("a", 9, 1.0, 1.0, 10)
QUIET = DeploymentLoad("a", 0, 0.0, 0.0, 0)


async def started(machine: Machine, count: int = 1, name: str = "a") -> ReplicaSet:
    for found in machine.sets.values():
        found.start()
    await until(lambda: len(machine.sets[name].ready) == count)
    return machine.sets[name]
