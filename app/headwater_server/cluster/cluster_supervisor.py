"""The supervisor of a cluster: decides which replicas there should be, has Ray place them, and informs all gateways.

`headwater_server.cluster.holder` runs it as ``python -m headwater_server.cluster.cluster_supervisor``, with a
`SupervisorSpec` on its standard input. Its first line of output is an `Announcement`, written after it has adopted the
replicas of an earlier supervisor; or, if it can't serve, a `headwater_server.cluster.discovery.Trouble`. When its
standard input ends, it ends at once and leaves the replicas to the next supervisor. After the line ``stop`` it ends the
replicas, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import logging
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, Final, NamedTuple

import msgspec

from headwater_server.cluster.agent import AgentSpec, digest
from headwater_server.cluster.holder import outlive_no_holder, own_output, read_spec
from headwater_server.cluster.nodes import Node, choose, needs
from headwater_server.cluster.ray_client import PREFIX, RayClient
from headwater_server.cluster.remote_replica import Context, RemoteReplica
from headwater_server.config.content import config_content, content
from headwater_server.config.reader import read_config
from headwater_server.config.schema import Config, Deployment
from headwater_server.config.sections import ReplicaBounds
from headwater_server.control.control_server import ControlServer
from headwater_server.control.messages import Command, CommandAnswer
from headwater_server.control.routing import RoutingTable
from headwater_server.errors import ConfigError, StartError
from headwater_server.security.file_watch import FileWatch
from headwater_server.security.keys_file import keys_are_wanted
from headwater_server.security.peer_tls import PeerTls
from headwater_server.supervisor.child_processes import ChildProcesses, until
from headwater_server.supervisor.handle import ReplicaHandle
from headwater_server.supervisor.memory_budget import ReplicaMemory
from headwater_server.supervisor.supervisor import Orchestrator
from headwater_server.telemetry.logs import finish_log, set_up_logging

__all__ = ["Announcement", "SupervisorSpec", "main", "what_is_served"]

logger = logging.getLogger("headwater")

DESIRED, EPOCH = "desired", "epoch"
"""Keys in Ray's storage."""
STARTS: Final = 64
"""Limit of replicas that start at once, on all nodes together."""
PING_EVERY_S: Final = 1.0
HUNG_S: Final = 60.0
"""Seconds that no replica is placed on a node that didn't answer. By then Ray has noticed the node's end, or the node
answers again."""
RECONCILE_EVERY_S: Final = 30.0
"""Seconds between searches for replicas that no supervisor follows, such as replicas on a node that came back."""
HEAD_TIMEOUT_S: Final = 3.0
"""Seconds without an answer after which Ray's head counts as gone."""
ADOPT_TIMEOUT_S: Final = 6.0
"""Seconds that a replica of an earlier supervisor may take to report its state."""
STORE_TIMEOUT_S: Final = 5.0
"""Seconds that an answer to an operator's command waits until Ray's storage has the desired state."""
GATEWAYS_DRAIN_S: Final = 5.0
"""Seconds that gateways may take to end beyond their shutdown timeout, when everything is stopped."""


class SupervisorSpec(NamedTuple):
    """Everything that the supervisor is started with."""

    config: Config
    user_paths: tuple[str, ...]
    """Folders of the user's modules, for every replica's ``sys.path``."""

    def encoded(self) -> bytes:
        """Encode as JSON."""
        return json.dumps({"config": config_content(self.config), "user_paths": self.user_paths}).encode()

    @classmethod
    def decoded(cls, raw: bytes) -> SupervisorSpec:
        """Decode from JSON."""
        fields = json.loads(raw)
        return cls(_config(fields["config"]), tuple(fields["user_paths"]))


def _config(raw: Any) -> Config:
    return read_config(raw, source="the cluster's configuration", environment={}, flags={})


class Announcement(msgspec.Struct, frozen=True):
    """How gateways reach the supervisor, and the settings that they need before they connect."""

    address: str
    """``HOST:PORT`` at which the supervisor listens for gateways."""
    token: str
    """The secret that gateways send in `Hello`."""
    epoch: int
    """Greater than the epoch of any earlier supervisor."""
    serves: str
    """Digest of the deployments that the supervisor was started with."""
    server: dict[str, Any]
    """The configuration's `headwater_server.config.schema.Server`, for gateways without a configuration."""
    security: dict[str, Any]
    """The configuration's `SecuritySection`, for the same gateways."""
    asks_for_keys: bool
    """Whether the supervisor's machine has API keys; then each gateway must have keys, too."""
    tls: str | None
    """The folder with the cluster's certificates, the same on all machines; None: plain text."""


class _Desired(NamedTuple):
    """The configuration as commands and rollbacks have changed it; kept in Ray's storage."""

    config: Config
    set_aside: frozenset[str]
    """Replica sets that an operator unloaded."""
    bounds: Mapping[str, ReplicaBounds]
    """Bounds of each replica set."""
    generations: Mapping[str, int]
    """Generation of each replica set. Data that gateways cache, such as answers, are valid for a single generation,
    under any supervisor."""
    began_as: str
    """Digest of the configuration before the changes."""

    def encoded(self) -> bytes:
        """Encode as JSON."""
        bounds = {name: content(replica_bounds) for name, replica_bounds in self.bounds.items()}
        config = config_content(self.config)
        fields = {
            "config": config,
            "set_aside": sorted(self.set_aside),
            "bounds": bounds,
            "generations": dict(self.generations),
            "began_as": self.began_as,
        }
        return json.dumps(fields).encode()

    @classmethod
    def decoded(cls, raw: bytes) -> _Desired:
        """Decode from JSON."""
        fields = json.loads(raw)
        bounds = {name: ReplicaBounds.model_validate(raw_bounds) for name, raw_bounds in fields["bounds"].items()}
        return cls(
            _config(fields["config"]), frozenset(fields["set_aside"]), bounds, fields["generations"], fields["began_as"]
        )


class ClusterProcesses(ChildProcesses):
    """Has Ray place replicas, instead of starting them on this machine."""

    def __init__(self, config: Config, user_paths: tuple[str, ...], context: Context, *about: Any) -> None:
        super().__init__(ReplicaMemory(), user_paths, *about)
        self.start_slots = asyncio.Semaphore(STARTS)
        self.first_generation = context.epoch  # gateways may have answers of an earlier supervisor's generations
        self._config = config
        self._context = context
        self._paths = user_paths
        self._replaced: set[str] = set()
        """Ids of replicas that serve only until their replacements have started."""
        self._hung: dict[str, float] = {}
        """Time at which a node last lost a replica because the node didn't answer, by the node's id."""
        self._suspects: set[str] = set()
        """Nodes that lost a replica without a report. They may be gone without Ray having noticed."""

    def launch(self, name: str, config: Deployment, on_progress: Callable[[str], None], fork: object) -> ReplicaHandle:
        """See `ChildProcesses.launch`. Returns at once: Ray places the replica later, and its agent starts it."""
        self._launched += 1
        id = f"{name}-{self._context.epoch:x}.{self._launched}"
        token, order_token = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        cluster, server = self._config.cluster, self._config.server
        assert cluster is not None
        spec = AgentSpec(
            name, id, config, self._paths, token, order_token, server.runtime_dir, cluster.host, cluster.tls,
            server.log_format,
        )  # fmt: skip
        placement = config.node_placement
        ray, command = self._context.ray, [sys.executable, "-m", "headwater_server.cluster.agent"]
        replica = self._replica(id, config, on_progress)

        async def place(is_chosen: bool) -> Any:
            if is_chosen:
                nodes = await self._nodes()
                counts, reserved = self._placed(name)
                replica.node = choose(placement, config.memory, nodes, counts, reserved)
            return await ray.start_replica(
                f"{PREFIX}{id}", command, spec.encoded(), {"PWD": os.getcwd()}, placement, config.memory, replica.node
            )

        self._follow(replica, place, functools.partial(ray.look, placement, config.memory))
        return replica

    def adopt(self, name: str, actor: Any, config: Deployment) -> RemoteReplica:
        """Follow a replica that an earlier supervisor started. ``name`` is the actor's name, with `PREFIX`."""
        id = name.removeprefix(PREFIX)
        replica = self._replica(id, config, lambda text: None)

        async def place(is_chosen: bool) -> Any:
            return actor

        async def look() -> tuple[str, bool]:
            return "", False

        self._follow(replica, place, look)
        return replica

    @contextlib.contextmanager
    def replacing(self, name: str) -> Iterator[None]:
        """See `ChildProcesses.replacing`. The present replicas don't count when nodes are chosen by the number of the
        deployment's replicas, so the replacements may start on the same nodes."""
        old = {id for id in self.replicas if _deployment_of(id) == name}
        self._replaced |= old
        try:
            yield
        finally:
            self._replaced -= old

    async def _nodes(self) -> list[Node]:
        """Ray's nodes and their free resources, without the nodes that are known not to answer."""
        ray, since_s = self._context.ray, time.monotonic() - HUNG_S
        nodes = [node for node in await ray.nodes() if self._hung.get(node.id, since_s) <= since_s]
        suspects = [node for node in nodes if node.id in self._suspects]
        answers = await asyncio.gather(*map(ray.answers, suspects))
        gone = {node.id for node, does_answer in zip(suspects, answers, strict=True) if not does_answer}
        self._suspects = gone
        return [node._replace(free=self._left(node)) for node in nodes if node.id not in gone]

    def _left(self, node: Node) -> dict[str, float]:
        """A node's free resources, minus the reservations of replicas that may still wait to start there: Ray may not
        count these reservations yet."""
        mine = (replica for replica in self.replicas.values() if isinstance(replica, RemoteReplica))
        waiting = [replica.takes for replica in mine if replica.node == node.id and not replica.has_place]
        return {
            name: amount - sum(reservation.get(name, 0) for reservation in waiting)
            for name, amount in node.free.items()
        }

    def _placed(self, name: str) -> tuple[Counter[str], dict[str, list[Mapping[str, float]]]]:
        """The number of a deployment's replicas on each node, without replicas that end or are being replaced; and the
        reservations of all deployments' replicas there."""
        counts: Counter[str] = Counter()
        reserved: dict[str, list[Mapping[str, float]]] = {}
        for id, replica in self.replicas.items():
            if isinstance(replica, RemoteReplica) and replica.node:
                reserved.setdefault(replica.node, []).append(replica.takes)
                counts[replica.node] += (
                    _deployment_of(id) == name and id not in self._replaced and not replica.ending.is_set()
                )
        return counts, reserved

    def _replica(self, id: str, config: Deployment, on_progress: Callable[[str], None]) -> RemoteReplica:
        takes = needs(config.node_placement, config.memory)
        return RemoteReplica(id, config.placements[0], config.adapters, takes, self._context, on_progress)

    def _follow(self, replica: RemoteReplica, place: Callable[[bool], Any], look: Callable[[], Any]) -> None:
        self.replicas[replica.id] = replica
        replica.exited = self.spawn(replica.follow(place, look))
        replica.exited.add_done_callback(lambda _: self._forget(replica))

    def _forget(self, replica: RemoteReplica) -> None:
        self.replicas.pop(replica.id, None)
        if replica.has_hung:
            self._hung[replica.node] = time.monotonic()
        elif replica.is_lost_with_node and replica.node:
            self._suspects.add(replica.node)


class ClusterSupervisor:
    """Runs a configuration on a cluster."""

    def __init__(self, spec: SupervisorSpec, ray: RayClient, epoch: int, tls: PeerTls | None) -> None:
        self._first = spec.config
        self._ray = ray
        self._tls = tls
        self._token = secrets.token_urlsafe(24)
        self._epoch = epoch
        self._is_stopped = False
        """Whether an order to stop has come."""
        self._is_serving = False
        """Whether it has adopted the earlier supervisor's replicas, and listens."""
        self._stored: _Desired | None = None
        """The desired state that is stored, or being stored by ``_storing``."""
        self._storing: asyncio.Task[None] | None = None
        context = Context(ray, epoch, tls, lambda: self._on_change(), self._give_way)
        self.control = ControlServer(
            self._answer,
            epoch,
            on_lost=lambda loss: self._orchestrator.note_loss(loss),
            on_workers=lambda: self._on_change(),
        )
        """Talks to the gateways."""
        self.children = ClusterProcesses(spec.config, spec.user_paths, context, self.control.drain, self._on_change)
        """Has Ray place the replicas, and runs the tasks."""
        self._orchestrator = Orchestrator(spec.config, self.children, self.control)

    async def run(self, orders: asyncio.StreamReader, output: IO[str]) -> None:
        """Announce on the output that it serves, and serve until an order to stop comes; return when everything has
        stopped. If the input for orders ends, a later supervisor has followed, or a task has failed, the process exits
        with status 1, and leaves the replicas to the next supervisor."""
        cluster = self._first.cluster
        assert cluster is not None
        has_taken_over = await self._take_over()
        node = os.environ.get("HEADWATER_NODE", "127.0.0.1")
        host = cluster.host or (node if self._tls is not None else "127.0.0.1")
        port = await self.control.start_for_gateways(host, 0, self._token, self._tls, is_successor=has_taken_over)
        self._is_serving = True
        self._on_change()
        announcement = Announcement(
            f"{node if host in ('0.0.0.0', '::') else host}:{port}",
            self._token,
            self._epoch,
            what_is_served(self._first),
            self._first.server.model_dump(mode="json"),
            self._first.security.model_dump(mode="json"),
            keys_are_wanted(self._first.security.keys_file),
            None if cluster.tls is None else str(cluster.tls),
        )
        print(msgspec.json.encode(announcement).decode(), file=output, flush=True)
        for task in (self._watch_gateways(), self._watch_head(), self._reconcile()):
            asyncio.create_task(task).add_done_callback(self.children.note_done)
        reading = asyncio.create_task(orders.readline())
        stopping = asyncio.create_task(self.children.stopping.wait())
        await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done() or reading.result().strip() != b"stop":
            finish_log()
            os._exit(1)  # the next supervisor adopts the replicas
        await self._stop()

    async def _take_over(self) -> bool:
        """Restore the desired state that an earlier supervisor stored, if it began with the same configuration. Adopt
        the earlier supervisor's replicas that fit, end its other replicas, and start the missing replicas.

        Returns whether any replica was adopted.
        """
        desired = _read_desired(await self._ray.get(DESIRED))
        if desired is not None and desired.began_as != what_is_served(self._first):
            logger.warning("ignoring the stored state of an earlier supervisor: it has another configuration")
            desired = None
        sets = self._orchestrator.sets
        if desired is not None:
            self._stored = desired
            self._orchestrator.deployments.restore(desired.config)
            for name, replica_set in sets.items():
                replica_set.generation = desired.generations.get(name, replica_set.generation)
                if name in desired.set_aside:
                    replica_set.stay_unloaded(desired.bounds.get(name, replica_set.bounds))
                elif name in desired.bounds:
                    replica_set.bounds = desired.bounds[name]
                    replica_set.wanted = max(replica_set.bounds.min, min(replica_set.wanted, replica_set.bounds.max))
        candidates: list[tuple[str, RemoteReplica]] = []
        for actor_name, actor in (await self._ray.replicas()).items():
            name = _deployment_of(actor_name.removeprefix(PREFIX))
            if name in sets and not sets[name].is_set_aside:
                candidates.append((name, self.children.adopt(actor_name, actor, sets[name].config)))
            else:
                logger.warning("%s: ending this replica: its deployment is not served any more", actor_name)
                await self._ray.kill(actor)
        if candidates:
            await asyncio.wait(
                {asyncio.create_task(replica.heard.wait()) for _, replica in candidates}, timeout=ADOPT_TIMEOUT_S
            )
        running: dict[str, list[ReplicaHandle]] = {}
        for name, replica in candidates:
            replica_set, state = sets[name], replica.state
            fits = (
                state is not None
                and state.is_ready
                and state.deployment == digest(replica_set.config.on(replica_set.config.placements[0]))
                and replica.adapters == replica_set.config.adapters
            )
            if fits and not replica.ending.is_set() and len(running.get(name, ())) < replica_set.bounds.max:
                running.setdefault(name, []).append(replica)
            else:
                logger.warning("%s: ending this replica: not ready, or not as the configuration says", replica.id)
                replica.kill()
        if running:
            ids = ", ".join(handle.id for handles in running.values() for handle in handles)
            logger.info("taken over from an earlier supervisor: %s", ids)
        self._orchestrator.start(running)
        return bool(running)

    def _on_change(self) -> None:
        if not self._is_serving:
            return
        routes = self._orchestrator.routes(max(1, self.control.workers))
        self.control.publish(RoutingTable(tuple(routes), draining=self._is_stopped))
        desired = self._desired()
        if desired != self._stored and not self.children.is_stopping:
            self._stored = desired
            if self._storing is None or self._storing.done():
                self._storing = asyncio.create_task(self._store())

    def _desired(self) -> _Desired:
        sets = self._orchestrator.sets
        return _Desired(
            self._orchestrator.deployments.config,
            frozenset(name for name, replica_set in sets.items() if replica_set.is_set_aside),
            {name: replica_set.bounds for name, replica_set in sets.items()},
            {name: replica_set.generation for name, replica_set in sets.items()},
            what_is_served(self._first),
        )

    async def _answer(self, command: Command) -> CommandAnswer:
        """Answer an operator's command once the desired state that follows from it is stored, so that a later
        supervisor knows it. If that takes long, the answer has a ``warning``."""
        answer = await self._orchestrator.lifecycle.answer(command)
        self._on_change()
        if self._storing is not None and (await asyncio.wait({self._storing}, timeout=STORE_TIMEOUT_S))[1]:
            answer.content["warning"] = (
                "Ray's storage can't be written: if the supervisor ends now, the next supervisor does not know of this"
            )
        return answer

    async def _store(self) -> None:
        """Store the desired state until the stored state is up to date, and try again after errors. If Ray loses the
        storage, a later supervisor begins anew."""
        stored: _Desired | None = None
        while stored != self._stored and self._stored is not None:
            desired = self._stored
            try:
                await self._ray.put(DESIRED, desired.encoded())
                stored = desired
            except Exception as error:  # for example, Ray's head is gone
                logger.error("Ray's storage can't be written; trying again: %s", error)
                await asyncio.sleep(PING_EVERY_S)

    async def _watch_gateways(self) -> None:
        while True:
            self.control.ping()
            await asyncio.sleep(PING_EVERY_S)

    async def _watch_head(self) -> None:
        """Log when Ray's head is gone, and when it is back."""
        before = ""
        while True:
            trouble = await asyncio.to_thread(self._ray.head_trouble, HEAD_TIMEOUT_S)
            if trouble != before:
                before = trouble
                logger.log(logging.ERROR if trouble else logging.INFO, "%s", trouble or "Ray's head answers again")
            await asyncio.sleep(PING_EVERY_S)

    async def _reconcile(self) -> None:
        """End replicas that no supervisor follows: their nodes came back after the replicas had counted as lost."""
        suspects: set[str] = set()
        while True:
            await asyncio.sleep(RECONCILE_EVERY_S)
            try:
                actors = await self._ray.replicas()
            except Exception as error:  # for example, Ray's head is gone
                logger.error("Ray can't say which replicas there are: %s", error)
                continue
            unknown = {name for name in actors if name.removeprefix(PREFIX) not in self.children.replicas}
            for name in unknown & suspects:  # seen twice: a replica seen once may be starting or ending
                logger.warning("%s: ending this replica: it runs, but the supervisor does not know it", name)
                await self._ray.kill(actors[name])
            suspects = unknown

    def _give_way(self) -> None:
        logger.error("another supervisor has taken over; this supervisor stops")
        self.children.stop()

    async def _stop(self) -> None:
        """Let gateways drain, end all replicas, and delete the stored desired state."""
        self._is_stopped = True
        self.children.stop()
        self._on_change()
        deadline_s = self._first.server.shutdown_timeout_s + GATEWAYS_DRAIN_S
        await until(lambda: self.control.is_deserted, deadline_s)
        await self._orchestrator.end(lambda: False)
        if self._storing is not None:
            self._storing.cancel()
            await asyncio.wait({self._storing})
        await self._ray.delete(DESIRED)
        for actor in (await self._ray.replicas()).values():  # replicas that could not be reached
            await self._ray.kill(actor)
        await self.control.finish()


def _deployment_of(id: str) -> str:
    """The name of a replica's deployment."""
    return id.rpartition("-")[0]


def _read_desired(raw: bytes | None) -> _Desired | None:
    if raw is None:
        return None
    try:
        return _Desired.decoded(raw)
    except Exception as error:  # another version of Headwater stored it
        logger.warning("ignoring the stored state of an earlier supervisor, which can't be read: %r", error)
        return None


def what_is_served(config: Config) -> str:
    """A digest of a configuration's deployments."""
    return hashlib.sha256(repr(sorted(config.deployments.items())).encode()).hexdigest()


async def _run(spec: SupervisorSpec, output: IO[str]) -> None:
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin.buffer)
    cluster = spec.config.cluster
    assert cluster is not None
    ray = await asyncio.to_thread(RayClient, os.environ["HEADWATER_RAY"])
    raw = await ray.get(EPOCH)
    try:
        tls = None if cluster.tls is None else PeerTls(cluster.tls)
        if tls is None and len(await ray.node_addresses()) > 1:
            text = "expected a folder with ca.crt, tls.crt and tls.key, since the cluster has several machines"
            raise StartError(f"cluster.tls: {text}")
    except (StartError, ConfigError) as error:
        print(json.dumps({"error": str(error)}), file=output, flush=True)
        # Nothing depends on a first supervisor, so it exits with 0 and Ray does not restart it. A later supervisor is
        # restarted: it may find the missing files on another machine, or later.
        finish_log()
        os._exit(0 if raw is None else 1)
    watch = None if tls is None else asyncio.create_task(FileWatch(tls.paths).run(tls.renew))
    # Greater than any earlier epoch, even if Ray has lost its storage.
    epoch = max(1 if raw is None else int(raw) + 1, int(time.time()))
    await ray.put(EPOCH, str(epoch).encode())
    logger.info("supervisor %d of the cluster", epoch)
    try:
        await ClusterSupervisor(spec, ray, epoch, tls).run(orders, output)
    finally:
        if watch is not None:
            watch.cancel()


def main() -> None:
    """Entry point; see the module's docstring."""
    outlive_no_holder()
    spec = SupervisorSpec.decoded(read_spec(sys.stdin.buffer))
    set_up_logging(spec.config.server.log_format)
    output = own_output()
    status = 1
    try:
        asyncio.run(_run(spec, output))
        status = 0
    except Exception:
        logger.critical("the supervisor can't go on", exc_info=True)
    finish_log()
    os._exit(status)  # waits neither for replicas nor for Ray's threads


if __name__ == "__main__":
    main()
