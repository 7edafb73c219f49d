"""A gateway of a cluster, between its own workers and a supervisor that does what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from headwater.metrics_file import used_bytes
from headwater.model_metrics import Metrics
from headwater_server.cluster import agent_link
from headwater_server.cluster import gateway as gateway_module
from headwater_server.cluster.agent_messages import Beat
from headwater_server.cluster.cluster_supervisor import Announcement, what_is_served
from headwater_server.cluster.discovery import Trouble
from headwater_server.cluster.gateway import AWAY, ClusterGateway, joined, serve_gateway
from headwater_server.config.cluster import Cluster
from headwater_server.config.schema import Config
from headwater_server.control.control_server import ControlServer
from headwater_server.control.link import SupervisorLink
from headwater_server.control.load import DeploymentLoad, LoadReport
from headwater_server.control.messages import Command, CommandAnswer, Drain, Drained, QuarantinedRequest
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.errors import StartError
from headwater_server.telemetry.model_counts import ModelCounts, read_model_totals
from headwater_server.transport.address import host_and_port
from tests.app.cluster.stand_in import READY, Agent, until

GONE = "the cluster's supervisor is gone; its last table stays in use until it is back"
CONFIG = Config.model_validate({"server": {"workers": 2}, "deployments": {"a": {"model": "m:M"}}})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again, or done from time to time, is done soon."""
    monkeypatch.setattr(agent_link, "RETRY_S", 0.01)
    monkeypatch.setattr(gateway_module, "RETRY_S", 0.01)
    monkeypatch.setattr(gateway_module, "REPORT_EVERY_S", 0.02)
    monkeypatch.setattr(gateway_module, "SILENCE_S", 60)
    monkeypatch.setattr(gateway_module, "LAST_COUNTS_S", 0.02)


class Dials:
    """What `asyncio.open_connection` has done."""

    def __init__(self) -> None:
        self.refusals = 0
        self.writers: list[asyncio.StreamWriter] = []
        """Of the connections that were opened."""


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> Dials:
    found, connect = Dials(), asyncio.open_connection

    async def dial(*address: Any, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            reader, writer = await connect(*address, **options)
        except ConnectionRefusedError:
            found.refusals += 1
            raise
        found.writers.append(writer)
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", dial)
    return found


def table(*replicas: ReplicaRoute, state: State = State.READY, **fields: Any) -> RoutingTable:
    return RoutingTable((DeploymentRoute("a", state, replicas=replicas),), **fields)


class Supervisor:
    """A supervisor's end."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.commands: list[Command] = []
        self.quarantined: list[QuarantinedRequest] = []
        self.changes = 0
        """How often a gateway has come or gone."""
        self.control = ControlServer(
            self._answer, epoch, on_quarantined=self.quarantined.append, on_workers=self._note_change
        )
        self.address = ""

    async def _answer(self, command: Command) -> CommandAnswer:
        self.commands.append(command)
        return CommandAnswer(command.id, 200, {"did": command.action})

    def _note_change(self) -> None:
        self.changes += 1

    async def start(self, port: int = 0) -> Announcement:
        """Listen. Returns what it announces."""
        self.address = f"127.0.0.1:{await self.control.start_for_gateways('127.0.0.1', port, 'secret', None)}"
        return self.announcement

    @property
    def announcement(self) -> Announcement:
        server = CONFIG.server.model_dump(mode="json")
        return Announcement(self.address, "secret", self.epoch, what_is_served(CONFIG), server, {}, False, None)


class Worker:
    """A worker of the gateway."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.table = RoutingTable()
        self.drains: list[Drain] = []
        self.is_free = asyncio.Event()
        """Whether it says that it has drained."""
        self.is_free.set()
        self.cancelled: list[str] = []
        self.quarantined: list[str] = []
        self.link = SupervisorLink(self._drain, lambda model, fingerprint: self.quarantined.append(model), self._cancel)

    async def _drain(self, order: Drain) -> Drained:
        self.drains.append(order)
        await self.is_free.wait()
        return Drained(self.number, 1)

    async def _cancel(self, request_id: str) -> int:
        self.cancelled.append(request_id)
        return self.number

    async def follow(self, path: Path) -> None:
        async with contextlib.aclosing(self.link.tables(path)) as tables:
            async for table in tables:
                self.table = table

    @property
    def route(self) -> DeploymentRoute:
        return self.table.deployments[0]

    @property
    def ids(self) -> list[str]:
        return [one.id for route in self.table.deployments for one in route.replicas]

    @property
    def retiring(self) -> list[str]:
        return [one.id for route in self.table.deployments for one in route.retiring]


class Bench:
    """A gateway, its two workers, and where it finds supervisors."""

    def __init__(self, first: Announcement) -> None:
        self.found: asyncio.Queue[Announcement | Trouble] = asyncio.Queue()
        self.uplink = ClusterGateway(CONFIG, lambda url, served: None, self._announcements(), first, None).uplink
        self.workers = [Worker(1), Worker(2)]

    async def _announcements(self) -> AsyncGenerator[Announcement | Trouble, None]:
        while True:
            yield await self.found.get()


@contextlib.asynccontextmanager
async def joining(supervisor: Supervisor) -> AsyncIterator[Bench]:
    """A gateway of this supervisor, whose table all have."""
    bench = Bench(await supervisor.start())
    control = bench.uplink.control
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        path = Path(folder) / "control"
        await control.start(path)
        following = [asyncio.create_task(worker.follow(path)) for worker in bench.workers]
        try:
            await bench.uplink.prepare()
            await until(lambda: supervisor.control.workers == 2 and control.workers == 2)
            yield bench
        finally:
            await bench.uplink.end(lambda: True)
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await control.close()
            await supervisor.control.close()


def plain(id: str) -> ReplicaRoute:
    """A replica that nobody watches."""
    return ReplicaRoute(id, "127.0.0.1:1", "token")


async def test_what_is_wrong_with_the_cluster_is_said_of_all_models_until_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = Supervisor(4)
    async with joining(first) as bench:
        worker = bench.workers[0]
        first.control.publish(
            RoutingTable((DeploymentRoute("a", State.READY, shortage="one less"), DeploymentRoute("b", State.READY)))
        )
        await until(lambda: len(worker.table.deployments) == 2)
        for _ in range(2):
            bench.found.put_nowait(Trouble("Ray's head is gone"))
        said = ["one less; Ray's head is gone", "Ray's head is gone"]
        await until(lambda: [one.shortage for one in worker.table.deployments] == said)
        assert {one.state for one in worker.table.deployments} == {State.READY}
        bench.found.put_nowait(first.announcement)
        await until(lambda: [one.shortage for one in worker.table.deployments] == ["one less", ""])
    lines = [one.message for one in caplog.records if "head" in one.message]
    assert lines == ["Ray's head is gone", "cluster: Ray's head answers again, and the supervisor is known"]


async def test_the_last_table_stays_while_the_supervisor_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Supervisor(4), Supervisor(5)
    async with joining(first) as bench:
        worker = bench.workers[0]
        first.control.publish(table(plain("a-4.1")))
        await until(lambda: worker.ids == ["a-4.1"])
        assert bench.uplink.is_decided
        await first.control.close()
        await until(lambda: GONE in caplog.text)
        answer = await worker.link.command("unload", "a")
        assert answer.status == 503
        assert answer.content["error"].startswith("model `a`: unload: the cluster's supervisor is gone")
        assert await worker.link.cancel_elsewhere("mine") == 2  # of the other worker here
        assert worker.ids == ["a-4.1"]
        second.control.publish(table(plain("a-5.1")))
        await bench.found.put(await second.start())
        await until(lambda: worker.ids == ["a-5.1"])
        answer = await worker.link.command("unload", "a", {"config": "{}"})
        assert (answer.status, answer.content) == (200, {"did": "unload"})
        (command,) = second.commands
        assert (command.action, command.model, command.arguments) == ("unload", "a", {"config": "{}"})
        await second.control.close()


async def test_an_earlier_supervisor_is_not_listened_to(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, earlier = Supervisor(4), Supervisor(3)
    async with joining(supervisor) as bench:
        supervisor.control.publish(table(plain("a-4.1")))
        await until(lambda: bench.workers[0].ids == ["a-4.1"])
        earlier.control.publish(table(plain("a-3.1")))
        await bench.found.put(await earlier.start())
        await until(bench.found.empty)
        supervisor.control.publish(table(plain("a-4.2")))
        await until(lambda: bench.workers[0].ids == ["a-4.2"])
        assert earlier.control.workers == 0
        # One that has its address is connected to, but not obeyed.
        await earlier.control.close()
        await supervisor.control.close()
        await until(lambda: GONE in caplog.text)
        again = Supervisor(3)
        again.control.publish(table(plain("a-3.2")))
        await again.start(host_and_port(supervisor.address)[1])
        await until(lambda: "the table of an earlier supervisor is ignored" in caplog.text)
        assert bench.workers[0].ids == ["a-4.2"]
        await again.control.close()


async def test_replicas_out_of_reach_keep_what_they_have_and_get_nothing_new_until_they_are_back() -> None:
    agents = [Agent("a-4.1"), Agent("a-4.2")]
    for agent in agents:
        await agent.open(**READY)
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        worker = bench.workers[0]
        routes = [agent.state.route for agent in agents]
        supervisor.control.publish(table(*routes, plain("b-4.3")))
        await until(lambda: len(worker.ids) == 3 and all(agent.epochs for agent in agents))
        assert {epoch for agent in agents for epoch in agent.epochs} == {0}
        agents[0].leave()
        await until(lambda: worker.ids == ["a-4.2", "b-4.3"])
        assert worker.retiring == ["a-4.1"]
        supervisor.control.publish(table(*routes))
        await until(lambda: worker.ids == ["a-4.2"])
        agents[1].leave()
        await until(lambda: worker.ids == [])
        assert (worker.route.state, worker.route.reason) == (State.UNAVAILABLE, AWAY)
        assert worker.retiring == ["a-4.1", "a-4.2"]
        supervisor.control.publish(table(*routes, state=State.DRAINING))
        await until(lambda: worker.route.state is State.DRAINING)
        assert (worker.ids, worker.retiring) == ([], ["a-4.1", "a-4.2"])
        supervisor.control.publish(table(*routes))
        await until(lambda: worker.route.state is State.UNAVAILABLE)
        agents[0].is_away = False
        await until(lambda: worker.ids == ["a-4.1"])
        assert worker.retiring == ["a-4.2"]
        assert worker.route.state is State.READY
        agents[1].is_away = False
        await until(lambda: worker.ids == ["a-4.1", "a-4.2"])
        agents[0].send(Beat(3, 1000))
        await until(lambda: any(view.use and view.use.threads == 3 for view in bench.uplink.replica_views()))
        supervisor.control.publish(table(routes[1]))
        await until(lambda: worker.ids == ["a-4.2"])
        await until(lambda: not agents[0].writers)  # it is no longer watched
        agents[1].send(Beat(4, 1000))
        await until(lambda: [view.id for view in bench.uplink.replica_views()] == ["a-4.2"])
    for agent in agents:
        await agent.end()


async def test_custom_metrics_of_replicas_are_kept_also_their_last_after_they_left_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_module, "LAST_COUNTS_S", 60.0)
    agent = Agent("a-4.1")
    await agent.open(**READY)
    metrics = Metrics()
    metrics.open(tmp_path / "there", "a")
    rows = metrics.counter("rows", "Rows.")

    def kept() -> list[float]:
        return [numbers[0] for numbers in read_model_totals(tmp_path / "here").records.values()]

    (tmp_path / "here").mkdir()
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        bench.uplink.children.model_counts = ModelCounts(tmp_path / "here")
        supervisor.control.publish(table(agent.state.route))
        await until(lambda: bool(agent.writers))
        for count in (1, 2):
            rows.inc()
            agent.send(Beat(counts=used_bytes(tmp_path / "there")))
            await until(lambda count=count: kept() == [count])  # type: ignore[misc]
        supervisor.control.publish(table())
        await until(lambda: bench.workers[0].ids == [])
        rows.inc()
        agent.send(Beat(counts=used_bytes(tmp_path / "there")))
        agent.say(has_exited=True)
        await until(lambda: not agent.writers)
        assert kept() == [3]
        assert [path.name for path in (tmp_path / "here").iterdir()] == ["ended-replicas"]
    await agent.end()


async def test_a_replica_that_refused_connections_is_taken_back(dials: Dials) -> None:
    agent, again = Agent("a-4.1"), Agent("a-4.1")
    await agent.open(**READY)
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        worker = bench.workers[0]
        supervisor.control.publish(table(agent.state.route))
        await until(lambda: worker.ids == ["a-4.1"] and bool(agent.epochs))
        await agent.end()
        await until(lambda: worker.ids == [] and dials.refusals > agent_link.REFUSALS)
        await again.open(port=host_and_port(agent.address)[1], **READY)
        await until(lambda: worker.ids == ["a-4.1"])
    await again.end()


async def test_drains_are_passed_on_and_summed() -> None:
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        assert await supervisor.control.drain("a", 9, ["a-4.1"], ["x"]) == Drained(1 + 2, 1 + 1)
        for worker in bench.workers:
            (order,) = worker.drains
            assert (order.model, order.timeout_s, order.replicas, order.adapters) == ("a", 9, ["a-4.1"], ["x"])


async def test_a_drain_waits_for_a_gateway_that_reconnects(dials: Dials) -> None:
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        worker = bench.workers[0]
        worker.is_free.clear()
        drain = asyncio.create_task(supervisor.control.drain("a", 9))
        await until(lambda: len(worker.drains) == 1)
        dials.writers[-1].transport.abort()
        await until(lambda: len(worker.drains) == 2)  # it has come again, and is asked again
        assert not drain.done()
        worker.is_free.set()
        assert await drain == Drained(1 + 2, 1 + 1)


async def test_a_gateway_that_ends_is_not_waited_for() -> None:
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        await bench.uplink.end(lambda: True)
        await until(lambda: supervisor.control.is_deserted)


async def test_a_cluster_that_is_stopped_ends_the_gateway() -> None:
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        supervisor.control.publish(table(plain("a-4.1"), draining=True))
        await bench.uplink.children.stopping.wait()
        await until(lambda: all(worker.table.draining for worker in bench.workers))
        assert bench.uplink.children.status == 0


async def test_loads_of_its_workers_are_reported_together() -> None:
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        for worker in bench.workers:
            worker.link.report(LoadReport([DeploymentLoad("a", worker.number, 0.1 * worker.number, 0.5, 1)]))
        expected = [LoadReport([DeploymentLoad("a", 3, 0.2, 1.0, 2)])]
        await until(lambda: supervisor.control.loads() == expected)


async def test_cancelling_and_quarantine_go_both_ways() -> None:
    supervisor = Supervisor(4)
    async with joining(supervisor) as bench:
        one, two = bench.workers
        assert await supervisor.control.cancel("theirs") == 1 + 2
        assert await one.link.cancel_elsewhere("mine") == 2
        assert (one.cancelled, two.cancelled) == (["theirs"], ["theirs", "mine"])
        supervisor.control.quarantine(QuarantinedRequest("a", "00"))
        await until(lambda: one.quarantined == two.quarantined == ["a"])
        one.link.report_quarantined("b", b"\xff")
        await until(lambda: two.quarantined == ["a", "b"])
        await until(lambda: supervisor.quarantined == [QuarantinedRequest("b", "ff")])
        assert one.quarantined == ["a"]


async def test_a_silent_supervisor_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "SILENCE_S", 0.05)

    supervisor = Supervisor(4)
    async with joining(supervisor):
        await until(lambda: supervisor.changes > 4)  # it comes, goes, comes again, ...


# Its start


@pytest.mark.parametrize("ending", ["table", "stop"])
async def test_nothing_is_known_before_the_first_table(dials: Dials, ending: str) -> None:
    supervisor = Supervisor(4)
    supervisor.control.publish(table(plain("a-4.1")))
    announcement = await supervisor.start()
    bench = Bench(msgspec.structs.replace(announcement, epoch=3, address="127.0.0.1:1"))
    preparing = asyncio.create_task(bench.uplink.prepare())
    await until(lambda: dials.refusals > 2)
    assert not preparing.done()
    if ending == "table":
        await bench.found.put(announcement)
    else:
        bench.uplink.children.stop()
    await preparing
    ids = [one.id for route in bench.uplink.routes(2) for one in route.replicas]
    assert ids == (["a-4.1"] if ending == "table" else [])
    await bench.uplink.end(lambda: True)
    await bench.uplink.control.close()
    await supervisor.control.close()


def announcing(monkeypatch: pytest.MonkeyPatch, said: Announcement) -> None:
    async def found(address: str, spec: object) -> AsyncGenerator[Announcement, None]:
        yield said

    monkeypatch.setattr(gateway_module, "announcements", found)


def test_a_cluster_that_serves_something_else_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Config.model_validate({"deployments": {"b": {"model": "m:M"}}}).with_cluster(Cluster(engine="ray"))
    announcing(monkeypatch, msgspec.structs.replace(Supervisor(1).announcement, address="127.0.0.1:1"))
    with pytest.raises(StartError, match="serves other deployments than this configuration; expected `headwater jo"):
        asyncio.run(serve_gateway(other, (), "auto", {}, lambda url, served: None))


@pytest.mark.parametrize("joins", [False, True])
def test_without_keys_no_gateway_stands_beside_those_that_ask_for_them(
    monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    async def serve(self: ClusterGateway) -> int:
        return 7

    def start() -> int:
        served = None if joins else CONFIG.with_cluster(Cluster(engine="ray"))
        return asyncio.run(serve_gateway(served, (), "auto", {}, lambda url, served: None))

    monkeypatch.setattr(ClusterGateway, "run", serve)
    monkeypatch.delenv("HEADWATER_KEYS", raising=False)
    said = msgspec.structs.replace(Supervisor(1).announcement, asks_for_keys=True)
    announcing(monkeypatch, said)
    with pytest.raises(StartError, match="the cluster's other gateways ask for API keys, and this machine has none"):
        start()
    monkeypatch.setenv("HEADWATER_KEYS", "")
    assert start() == 7
    monkeypatch.delenv("HEADWATER_KEYS")
    announcing(monkeypatch, msgspec.structs.replace(said, asks_for_keys=False))
    assert start() == 7


def test_who_joins_without_the_clusters_keys_file_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def serve(self: ClusterGateway) -> int:
        return 7

    monkeypatch.setattr(ClusterGateway, "run", serve)
    monkeypatch.setenv("HEADWATER_KEYS", "")  # of which there may be more
    path = tmp_path / "keys.json"
    said = Supervisor(1).announcement
    announcing(monkeypatch, msgspec.structs.replace(said, asks_for_keys=True, security={"keys_file": str(path)}))
    with pytest.raises(StartError, match=f"expected the file of `security.keys_file`, {path}, here as well"):
        asyncio.run(serve_gateway(None, (), "auto", {}, lambda url, served: None))
    path.write_text("{}")
    assert asyncio.run(serve_gateway(None, (), "auto", {}, lambda url, served: None)) == 7


GATEWAY = """
import asyncio, sys
from collections.abc import AsyncGenerator
import msgspec
from headwater_server.cluster.gateway import ClusterGateway
from headwater_server.cluster.cluster_supervisor import Announcement
from headwater_server.config.schema import Config
config = Config.model_validate({"server": {"port": 0}, "deployments": {"a": {"model": "m:M"}}})
async def announcements() -> AsyncGenerator[Announcement, None]:
    await asyncio.Event().wait()
    yield first
first = msgspec.json.decode(sys.argv[1], type=Announcement)
gateway = ClusterGateway(config, lambda url, served: print(url, flush=True), announcements(), first, None)
sys.exit(asyncio.run(gateway.run()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["table", "stop"])
async def test_no_worker_starts_before_the_first_table(ending: str) -> None:
    supervisor, knocks = Supervisor(4), 0

    def knock(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        writer.close()

    silent = await asyncio.start_server(knock, "127.0.0.1", 0)
    supervisor.address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    command = [sys.executable, "-c", GATEWAY, msgspec.json.encode(supervisor.announcement).decode()]
    process = psutil.Popen(command, stdout=subprocess.PIPE)
    try:
        await until(lambda: knocks > 1)
        assert process.children() == []
        silent.close()
        if ending == "table":
            supervisor.control.publish(table(plain("a-4.1")))
            await supervisor.start(host_and_port(supervisor.address)[1])
            url = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
            found = await asyncio.to_thread(httpx.post, f"{url}/v2/repository/index", trust_env=False)
            assert [(one["name"], one["state"]) for one in found.json()] == [("a", "READY")]
    finally:
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
        process.stdout.close()
        await supervisor.control.close()


def test_who_joins_has_the_clusters_settings_and_his_own_flags(tmp_path: Path) -> None:
    first = msgspec.structs.replace(
        Supervisor(1).announcement, tls=str(tmp_path), security={"cors_origins": ["https://app.example"]}
    )
    found = joined(first, "head:6379", {"port": 9000})
    assert (found.server.port, found.server.workers) == (9000, 2)
    assert found.security.cors_origins == ("https://app.example",)
    assert found.cluster == Cluster(engine="ray", address="head:6379", tls=tmp_path)
