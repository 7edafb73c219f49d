"""A cluster without Ray: what stands for its actors, and agents that say what a test has them say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headwater.signature import Signature, TensorSpec
from headwater_server.cluster.agent import AgentSpec, digest
from headwater_server.cluster.agent_messages import (
    LISTENER,
    Adapters,
    AgentHello,
    AgentState,
    Ask,
    Beat,
    Order,
    Said,
    encode,
)
from headwater_server.cluster.nodes import Node
from headwater_server.cluster.port import Port
from headwater_server.cluster.ray_client import PREFIX, ActorGone
from headwater_server.config.schema import Deployment
from headwater_server.config.sections import NodePlacement
from headwater_server.control.routing import ReplicaRoute
from headwater_server.security.peer_tls import PeerTls

__all__ = ["READY", "Agent", "Ray", "clustered", "until"]

SIGNATURE = Signature("", (TensorSpec("x", "FP32", (2,)),), (TensorSpec("y", "FP32", (1,)),), max_batch_size=8)
READY: dict[str, Any] = {"is_ready": True, "signature": msgspec.to_builtins(SIGNATURE), "facts": {"device": "cpu"}}
"""What an agent says once its replica serves."""
BEAT_S = 0.5


class Agent:
    """An actor and its agent, whose replica does nothing by itself; it ends when the actor does."""

    def __init__(
        self,
        id: str,
        token: str = "token",
        deployment: Deployment | None = None,
        tls: PeerTls | None = None,
        order_token: str = "orders",
    ) -> None:
        self.id = id
        self.token = token
        self.order_token = order_token
        self.state = AgentState(ReplicaRoute(id, "", token), name=id.rpartition("-")[0])
        if deployment is not None:
            started_with = {"deployment": digest(deployment), "adapters": deployment.adapters}
            self.state = msgspec.structs.replace(self.state, **started_with)
        self.orders: list[str] = []
        self.epochs: list[int] = []
        """Of those who said hello."""
        self.asked: list[Ask] = []
        self.answer: Said | None = Said(0, 200, "done")
        """To what is asked of vLLM; None: nothing is said."""
        self.is_away = False
        """Whether every connection is closed again at once."""
        self.turned_away = 0
        self.is_open = asyncio.Event()
        """Whether it has said where its port is."""
        self.gone = asyncio.Event()
        self.address = ""
        self.port = Port("m", ReplicaRoute(id, "unix:/nonexistent/h", token), tls=tls, on_control=self._listen)
        self.writers: set[asyncio.StreamWriter] = set()
        """To those who listen."""

    async def open(self, beats: bool = True, port: int = 0, **said: Any) -> None:
        """Open the port, and have this said there."""
        self.address = await self.port.start("127.0.0.1", port)
        node = "127.0.0.1"
        route = msgspec.structs.replace(self.state.route, http_address=self.address, node=node)
        self.say(route=route, **said)
        if beats:
            self.port.spawn(self._beat())
        self.is_open.set()

    def say(self, **changes: Any) -> None:
        """Change what is said of the replica."""
        self.state = msgspec.structs.replace(self.state, **changes)
        self.send(self.state)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message to all who listen."""
        for writer in self.writers:
            writer.write(encode(message))

    def leave(self) -> None:
        """Get out of reach, although the port is still there."""
        self.is_away = True
        for writer in self.writers:
            writer.transport.abort()

    async def end(self) -> None:
        """End as a process does that is killed."""
        self.gone.set()
        self.is_open.set()
        await self.port.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.send(Beat())

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_away:
            self.turned_away += 1
            return
        hello = LISTENER.decode(await reader.readline())
        assert isinstance(hello, AgentHello)
        assert hello.token == (self.order_token if hello.epoch else "")
        self.epochs.append(hello.epoch)
        writer.write(encode(self.state))
        self.writers.add(writer)
        try:
            while line := await reader.readline():
                message = LISTENER.decode(line)
                if isinstance(message, Order):
                    self.orders.append(message.what)
                    self.say(is_ending=True, has_exited=True, reason="stopped" if message.what == "stop" else "killed")
                elif isinstance(message, Adapters):
                    self.say(adapters=message.adapters)
                elif isinstance(message, Ask):
                    self.asked.append(message)
                    if self.answer is not None:
                        writer.write(encode(msgspec.structs.replace(self.answer, number=message.number)))
        finally:
            self.writers.discard(writer)


class Ray:
    """Stands for a `RayClient`: its actors are `Agent`s of this process."""

    def __init__(self, storage: dict[str, bytes] | None = None) -> None:
        self.storage = {} if storage is None else storage
        self.actors: dict[str, Agent] = {}
        self.started: list[tuple[AgentSpec, NodePlacement]] = []
        self.chosen: list[str] = []
        """The node that each was started on; empty: none was chosen."""
        self.machines: list[Node] = []
        self.gone: set[str] = set()
        """Machines that are gone, although they are among the others still."""
        self.said_at_start: dict[str, Any] | None = READY
        """What an agent that is started says; None: it has no place yet."""
        self.shortage = ""
        self.has_room = False
        self.failures = 0
        """So many times it says that its head is gone."""
        self.looks = 0
        """How often it was asked which replicas there are."""
        self.killed: list[str] = []
        self.trouble = ""
        self.head_looks = 0
        """How often it was asked what is wrong with its head."""

    def head_trouble(self, timeout_s: float) -> str:
        self.head_looks += 1
        return self.trouble

    async def add(self, id: str, deployment: Deployment, /, **said: Any) -> Agent:
        """An agent that an earlier supervisor has started."""
        agent = self.actors[f"{PREFIX}{id}"] = Agent(id, deployment=deployment)
        await agent.open(**{**READY, **said})
        return agent

    async def start_replica(
        self,
        name: str,
        command: Sequence[str],
        spec: bytes,
        environment: Mapping[str, str],
        placement: NodePlacement,
        memory: int | None,
        node: str = "",
    ) -> Agent:
        found = AgentSpec.decoded(spec)
        assert name == f"{PREFIX}{found.id}"
        self.started.append((found, placement))
        self.chosen.append(node)
        agent = self.actors[name] = Agent(found.id, found.token, found.deployment, order_token=found.order_token)
        if self.said_at_start is not None:
            await agent.open(**{"node": node, **self.said_at_start})
        return agent

    async def nodes(self) -> list[Node]:
        return self.machines

    async def answers(self, node: Node) -> bool:
        return node.id not in self.gone

    async def replicas(self) -> dict[str, Agent]:
        self._fail()
        self.looks += 1
        return {name: agent for name, agent in self.actors.items() if not agent.gone.is_set()}

    async def said(self, actor: Agent, timeout_s: float | None = None) -> str:
        await actor.is_open.wait()
        if actor.gone.is_set():
            raise ActorGone("the actor died")
        return f"{actor.address} {actor.token} {actor.order_token}"

    async def kill(self, actor: Agent) -> None:
        self.killed.append(actor.id)
        await actor.end()

    async def look(self, placement: NodePlacement, memory: int | None) -> tuple[str, bool]:
        return self.shortage, self.has_room

    async def put(self, key: str, value: bytes) -> None:
        self._fail()
        self.storage[key] = value

    async def get(self, key: str) -> bytes | None:
        return self.storage.get(key)

    async def delete(self, key: str) -> None:
        self.storage.pop(key, None)

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the head is gone")


@contextlib.asynccontextmanager
async def clustered(storage: dict[str, bytes] | None = None) -> AsyncIterator[Ray]:
    """A cluster, whose actors end with the context."""
    ray = Ray(storage)
    try:
        yield ray
    finally:
        for agent in list(ray.actors.values()):
            await agent.end()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not holds():  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)
