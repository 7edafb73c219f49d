"""A gateway of a cluster: serves the deployments that the cluster's supervisor decides on, also while the supervisor is
gone."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Final

import msgspec

from headwater.errors import Problem
from headwater.signature import Signature
from headwater_server.cluster.agent_link import AgentLink
from headwater_server.cluster.agent_messages import AgentState, Beat
from headwater_server.cluster.cluster_supervisor import Announcement, SupervisorSpec, what_is_served
from headwater_server.cluster.dial import connected, within
from headwater_server.cluster.discovery import Trouble, announcements
from headwater_server.config.cluster import Cluster
from headwater_server.config.reader import PLACEHOLDER
from headwater_server.config.schema import Config
from headwater_server.control.control_server import ControlServer
from headwater_server.control.link import SupervisorLink
from headwater_server.control.load import LoadReport, together
from headwater_server.control.messages import Command, CommandAnswer, Drain, Drained, Hello, QuarantinedRequest
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.errors import StartError, Unavailable
from headwater_server.process.proc import GroupUse
from headwater_server.security.file_watch import FileWatch
from headwater_server.security.keys_file import keys_are_wanted
from headwater_server.security.peer_tls import PeerTls
from headwater_server.supervisor.child_processes import ChildProcesses
from headwater_server.supervisor.front import Front
from headwater_server.supervisor.memory_budget import ReplicaMemory
from headwater_server.telemetry.model_counts import ModelCounts
from headwater_server.telemetry.observer import ReplicaView

__all__ = ["serve_gateway"]

logger = logging.getLogger("headwater")

REPORT_EVERY_S: Final = 1.0
SILENCE_S: Final = 4.0
"""Seconds without a message after which the connection to the supervisor is cut and opened again."""
RETRY_S: Final = 0.5
LAST_COUNTS_S: Final = 30.0
"""Seconds that a replica that left the routing table may take to exit; later counts are lost."""
AWAY: Final = "its replicas can't be reached"


class _Watch:
    """A replica's reachability and resource use, as this gateway sees them; also keeps its custom metrics."""

    def __init__(
        self, route: ReplicaRoute, tls: PeerTls | None, on_reach: Callable[[], None], counts: ModelCounts
    ) -> None:
        self.route = route
        self._is_leaving = False
        self._has_exited = asyncio.Event()
        self._counts = counts
        self.is_reachable = True
        self.use: GroupUse | None = None
        self._on_reach = on_reach
        self.link = AgentLink(
            route.http_address, route.token, 0, tls, on_state=self._see, on_beat=self._take, on_reach=self._note
        )
        self.task = asyncio.create_task(self.link.run())

    def _take(self, beat: Beat) -> None:
        self.use = GroupUse(beat.threads, beat.resident_bytes, beat.gpu_bytes, beat.gpu_utilization)
        if beat.counts:
            self._counts.take(self.route.id, beat.counts)

    def _see(self, state: AgentState) -> None:
        if state.has_exited:
            self._has_exited.set()

    async def leave(self) -> None:
        """Follow a replica that left the routing table until it has exited, for its last counts."""
        self._is_leaving = True
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await within(LAST_COUNTS_S, self._has_exited.wait())
            self._counts.end(self.route.id)
        finally:
            self.task.cancel()

    def _note(self, is_reachable: bool) -> None:
        self.is_reachable = is_reachable
        if self._is_leaving:
            return
        logger.warning("%s: %s", self.route.id, "in reach again" if is_reachable else "out of reach: set aside")
        self._on_reach()


class Uplink:
    """The gateway's view of the cluster; see `headwater_server.supervisor.front.Backend`.

    Args:
        findings: yields where the supervisor is, or why it can't be found, whenever that changes.
        first: the first result of ``findings``.
        workers: the number of this gateway's workers.
        tls: the cluster's TLS.
        children: runs the tasks.
        control: talks to this gateway's workers.
        on_change: called when routes have changed.
    """

    failure = ""
    """Always empty: a gateway doesn't end because deployments have failed."""

    def __init__(
        self,
        findings: AsyncGenerator[Announcement | Trouble, None],
        first: Announcement,
        workers: int,
        tls: PeerTls | None,
        children: ChildProcesses,
        control: ControlServer,
        on_change: Callable[[], None],
    ) -> None:
        self.link = SupervisorLink(
            self._drain,
            lambda model, fingerprint: control.quarantine(QuarantinedRequest(model, fingerprint.hex())),
            control.cancel,
            self._hear,
        )
        self._findings = findings
        self._where = first
        self._has_moved = asyncio.Event()
        self._hello = functools.partial(Hello, workers=workers, gateway=secrets.token_hex(8))
        self._tls = tls
        self.children = children
        """The processes of this gateway."""
        self.control = control
        """The link to this gateway's workers."""
        self._on_change = on_change
        self._trouble = ""
        """Why the supervisor can't be found now; empty: it is known."""
        self._table = RoutingTable()
        self._is_known = asyncio.Event()
        self._watches: dict[str, _Watch] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Follow replicas that have left the table to their end."""
        self._heard_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    # Methods of a Backend

    @property
    def is_decided(self) -> bool:
        """Whether the supervisor's table is known and no deployment in it is loading."""
        return bool(self._table.deployments) and all(
            route.state is not State.LOADING for route in self._table.deployments
        )

    def start(self) -> None:
        """Do nothing: `prepare` has started everything."""

    async def prepare(self) -> None:
        """Connect to the supervisor, and wait for its first table, or until the server is to stop."""
        for work in (self._follow(), self._find(), self._report()):
            task = asyncio.create_task(work)
            task.add_done_callback(self.children.note_done)
            self._tasks.append(task)
        first_table = asyncio.create_task(self._is_known.wait())
        stopping = asyncio.create_task(self.children.stopping.wait())
        await asyncio.wait({first_table, stopping}, return_when=asyncio.FIRST_COMPLETED)
        first_table.cancel()
        stopping.cancel()

    async def end(self, is_hurried: Callable[[], bool]) -> None:
        """Say goodbye to the supervisor, and disconnect from it and the replicas, which go on."""
        self.link.leave()
        for task in (*self._tasks, *self._leaving, *(watch.task for watch in self._watches.values())):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        await self._findings.aclose()

    def routes(self, workers: int) -> list[DeploymentRoute]:
        """The supervisor's routes, already with the shares of a worker among all gateways' workers. Replicas that this
        gateway can't reach get no new requests, but keep their requests in flight."""
        away = {id for id, watch in self._watches.items() if not watch.is_reachable}
        routes = [_without(route, away) for route in self._table.deployments] if away else list(self._table.deployments)
        return [_troubled(route, self._trouble) for route in routes] if self._trouble else routes

    def replica_views(self) -> list[ReplicaView]:
        """Resource use of the replicas that have reported it to this gateway, wherever they run."""
        return [
            ReplicaView(id.rpartition("-")[0], id, 0, use=watch.use)
            for id, watch in self._watches.items()
            if watch.use is not None
        ]

    def problems(self) -> Iterable[Problem]:
        """Always empty: a gateway starts no replicas."""
        return ()

    def warnings(self) -> Iterable[Problem]:
        """Always empty, as `problems`."""
        return ()

    async def answer(self, command: Command) -> CommandAnswer:
        """Have the supervisor carry out a command; status 503 if the supervisor is gone."""
        try:
            answer = await self.link.command(command.action, command.model, command.arguments)
        except Unavailable:
            text = f"model `{command.model}`: {command.action}: the cluster's supervisor is gone; expected it back soon"
            return CommandAnswer(command.id, 503, {"error": text})
        return msgspec.structs.replace(answer, id=command.id)

    # The supervisor

    async def _drain(self, order: Drain) -> Drained:
        return await self.control.drain(order.model, order.timeout_s, order.replicas, order.adapters)

    def _hear(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()

    async def _find(self) -> None:
        """Follow the search for the supervisor: note where it is, or why it can't be found."""
        async for finding in self._findings:
            trouble = finding.error if isinstance(finding, Trouble) else ""
            if trouble != self._trouble:
                self._trouble = trouble
                logger.warning("%s", trouble or "cluster: Ray's head answers again, and the supervisor is known")
                self._on_change()
            if isinstance(finding, Announcement) and finding.epoch > self._where.epoch:
                self._where = finding
                self._has_moved.set()

    async def _follow(self) -> None:
        """Take the supervisor's tables, and connect again when the connection ends. The last table stays valid while
        the supervisor is gone."""
        while True:
            where = self._where
            self._has_moved.clear()
            is_open = False
            try:
                async with connected(where.address, self._tls) as (reader, writer):
                    is_open = True
                    self._hear()
                    cutting = asyncio.create_task(self._cut_silent(writer, where))
                    try:
                        async for table in self.link.tables_from(reader, writer, self._hello(where.token)):
                            self._take(table)
                    finally:
                        cutting.cancel()
            except (OSError, ValueError, asyncio.TimeoutError, msgspec.MsgspecError) as error:
                logger.log(logging.WARNING if is_open else logging.DEBUG, "the cluster's supervisor: %s", error)
            if is_open and not self.children.is_stopping:
                logger.warning("the cluster's supervisor is gone; its last table stays in use until it is back")
            with contextlib.suppress(asyncio.TimeoutError):
                await within(RETRY_S, self._has_moved.wait())

    async def _cut_silent(self, writer: asyncio.StreamWriter, where: Announcement) -> None:
        """Wait until the supervisor has been silent for `SILENCE_S`, or a later supervisor has replaced it; then close
        the connection."""
        while self._where is where and asyncio.get_running_loop().time() - self._heard_s < SILENCE_S:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_S)
        writer.transport.abort()

    def _take(self, table: RoutingTable) -> None:
        self._table = table
        self._is_known.set()
        routes = {
            replica.id: replica
            for route in table.deployments
            for replica in (*route.replicas, *route.retiring)
            if replica.node
        }
        for id in [id for id in self._watches if id not in routes]:
            task = asyncio.create_task(self._watches.pop(id).leave())
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for id, route in routes.items():
            if id not in self._watches:
                self._watches[id] = _Watch(route, self._tls, self._on_change, self.children.model_counts)
        if table.draining:
            logger.info("the cluster is being stopped, and this gateway with it")
            self.children.stop()
        self._on_change()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self.link.report(
                LoadReport(list(together(self.control.loads()).values()), list(self.control.tallies.values()))
            )


def _without(route: DeploymentRoute, away: set[str]) -> DeploymentRoute:
    """A route in which the replicas out of reach (ids in ``away``) only finish their requests in flight; without
    another replica a READY deployment is UNAVAILABLE."""
    reachable = tuple(replica for replica in route.replicas if replica.id not in away)
    if len(reachable) == len(route.replicas):
        return route
    retiring = (*route.retiring, *(replica for replica in route.replicas if replica.id in away))
    if reachable or route.state is not State.READY:
        return msgspec.structs.replace(route, replicas=reachable, retiring=retiring)
    return msgspec.structs.replace(route, replicas=(), retiring=retiring, state=State.UNAVAILABLE, reason=AWAY)


def _troubled(route: DeploymentRoute, trouble: str) -> DeploymentRoute:
    """A route with the cluster's trouble added to its shortage."""
    return msgspec.structs.replace(route, shortage="; ".join(filter(None, (route.shortage, trouble))))


class ClusterGateway(Front):
    """Serves a cluster's deployments, until a signal stops it or the cluster is stopped."""

    def __init__(
        self,
        config: Config,
        on_serving: Callable[[str, list[tuple[str, Signature | None, str]]], None],
        findings: AsyncGenerator[Announcement | Trouble, None],
        first: Announcement,
        tls: PeerTls | None,
    ) -> None:
        control = ControlServer(
            lambda command: self.uplink.answer(command),
            on_quarantined=lambda report: self.uplink.link.report_quarantined(
                report.model, bytes.fromhex(report.fingerprint)
            ),
            on_lost=lambda loss: self.uplink.link.report_lost(loss),
            on_cancel=lambda request_id: self.uplink.link.cancel_elsewhere(request_id),
        )
        children = ChildProcesses(ReplicaMemory(), (), control.drain, self.on_change)
        self.uplink = Uplink(findings, first, config.server.workers, tls, children, control, self.on_change)
        super().__init__(config, on_serving, control, children, self.uplink)


async def serve_gateway(
    config: Config | None,
    user_paths: tuple[str, ...],
    address: str,
    flags: dict[str, object],
    on_serving: Callable[[str, list[tuple[str, Signature | None, str]]], None],
) -> int:
    """Serve a cluster's deployments on this machine. Returns the exit status.

    Args:
        config: the configuration to serve; if the cluster serves nothing yet, its supervisor is started with it. None:
            join the running cluster.
        user_paths: folders of the user's modules, for every replica's ``sys.path``.
        address: address of Ray's head, or ``auto``.
        flags: the server's fields that differ here from the cluster's configuration, if the gateway joins.
        on_serving: see `Front`.

    Raises:
        StartError: there is no Ray, nothing to join, another configuration is served, or this machine lacks API keys;
            or as `Front.run`.
    """
    spec = None if config is None else SupervisorSpec(config, user_paths)
    findings = announcements(address, spec)
    try:
        first = await anext(findings)
        assert isinstance(first, Announcement)
        if config is not None and first.serves != what_is_served(config):
            raise StartError(
                "cluster: serves other deployments than this configuration; expected `headwater join` to add a "
                "gateway to it, load and reload to change its models, or `headwater stop` to end it first"
            )
        if config is None:
            config = joined(first, address, flags)
        keys_file = config.security.keys_file
        if first.asks_for_keys and not (keys_file.exists() if keys_file is not None else keys_are_wanted(None)):
            where = "the file of `security.keys_file`, or the variable HEADWATER_KEYS,"
            raise StartError(
                "security: the cluster's other gateways ask for API keys, and this machine has none: expected "
                f"{where if keys_file is None else f'the file of `security.keys_file`, {keys_file},'} here as well"
            )
        cluster = config.cluster
        tls = None if cluster is None or cluster.tls is None else PeerTls(cluster.tls)
        watch = None if tls is None else asyncio.create_task(FileWatch(tls.paths).run(tls.renew))
        try:
            return await ClusterGateway(config, on_serving, findings, first, tls).run()
        finally:
            if watch is not None:
                watch.cancel()
    finally:
        await findings.aclose()


def joined(first: Announcement, address: str, flags: dict[str, object]) -> Config:
    """The configuration of a gateway that joins: the cluster's, with this gateway's ``flags``."""
    config = Config.model_validate(
        {
            "server": {**first.server, **flags},
            "security": first.security,
            "deployments": {"none": {"model": PLACEHOLDER}},
        }
    )
    return config.with_cluster(Cluster.model_validate({"engine": "ray", "address": address, "tls": first.tls}))
