"""The control socket between supervisor and workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.certificates import authority, issue
from headwater_server.control import control_server, messages
from headwater_server.control.control_server import ControlServer
from headwater_server.control.link import SupervisorLink
from headwater_server.control.load import DeploymentLoad, LoadReport, Tally
from headwater_server.control.messages import (
    DOWNWARD,
    Command,
    CommandAnswer,
    Drain,
    Drained,
    Goodbye,
    Hello,
    Pong,
    encode_line,
)
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, RoutingTable, State
from headwater_server.control.table_change import TableChange
from headwater_server.errors import Unavailable
from headwater_server.security.peer_tls import PeerTls

Tables = AsyncGenerator[RoutingTable, None]


def table(*names: str, draining: bool = False) -> RoutingTable:
    return RoutingTable(
        tuple(
            DeploymentRoute(name, State.READY, replicas=(ReplicaRoute(f"{name}-1", "unix:/h", "token"),))
            for name in names
        ),
        draining,
    )


def content(table: RoutingTable) -> RoutingTable:
    """A table as it was published: the server counts epoch and version."""
    return msgspec.structs.replace(table, epoch=0, version=0)


async def nothing_in_flight(order: Drain) -> Drained:
    return Drained()


class Bench:
    """A supervisor's end, and any number of workers'."""

    def __init__(self, path: Path, on_command: Callable[[Command], Awaitable[CommandAnswer]] | None) -> None:
        self.path = path
        self.server = ControlServer(on_command)
        self._following: list[asyncio.Task[None]] = []

    async def worker(
        self, on_drain: Callable[[Drain], Awaitable[Drained]] = nothing_in_flight
    ) -> tuple[SupervisorLink, asyncio.Task[None]]:
        """A worker that follows the tables, and has the first."""
        link = SupervisorLink(on_drain)
        return link, await self.follow(link)

    async def follow(self, link: SupervisorLink) -> asyncio.Task[None]:
        """Have a worker's end follow the tables."""
        first = asyncio.Event()

        async def follow() -> None:
            async for _ in link.tables(self.path):
                first.set()

        task = asyncio.create_task(follow())
        self._following.append(task)
        await first.wait()
        return task

    async def end(self) -> None:
        await self.server.close()
        await asyncio.gather(*self._following, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - no event of the product's
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def benched(on_command: Callable[[Command], Awaitable[CommandAnswer]] | None = None) -> AsyncIterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="hw-") as folder:
        bench = Bench(Path(folder) / "control", on_command)
        await bench.server.start(bench.path)
        try:
            yield bench
        finally:
            await bench.end()


# Loads


async def test_what_workers_count_is_added_up_from_when_each_is_known_and_stays_when_one_goes() -> None:
    async with benched() as bench:
        first, following = await bench.worker()
        second, _ = await bench.worker()
        for worker, ended in ((first, 5), (first, 8), (second, 100), (second, 101)):
            worker.report(LoadReport(tallies=[Tally("c.2", ended, 0, [ended])]))
        await until(lambda: "c.2" in bench.server.tallies and bench.server.tallies["c.2"].ended == 4)
        following.cancel()
        second.report(LoadReport(tallies=[Tally("c.2", 111, 1, [110])]))
        await until(lambda: bench.server.tallies["c.2"] == Tally("c.2", 14, 1, [13]))


async def test_what_workers_say_last_of_their_load_is_known_until_they_leave() -> None:
    async with benched() as bench:
        first, following = await bench.worker()
        second, _ = await bench.worker()
        one, other, later = (LoadReport([DeploymentLoad("a", rows, 0.1, 0.5, rows)]) for rows in (1, 2, 3))
        first.report(one)
        second.report(other)
        await until(lambda: len(bench.server.loads()) == 2)
        assert {report.deployments[0].waiting for report in bench.server.loads()} == {1, 2}
        second.report(later)
        await until(lambda: later in bench.server.loads())
        assert other not in bench.server.loads()
        following.cancel()
        await until(lambda: bench.server.loads() == [later])


# Tables


async def test_every_worker_gets_the_present_table_and_every_change() -> None:
    async with benched() as bench:
        bench.server.publish(table("a"))
        workers = [SupervisorLink(nothing_in_flight).tables(bench.path) for _ in range(2)]
        assert [content(await anext(worker)) for worker in workers] == [table("a")] * 2
        bench.server.publish(table("a", "b"))
        bench.server.publish(table(draining=True))
        for worker in workers:
            assert content(await anext(worker)) == table("a", "b")
            assert content(await anext(worker)) == table(draining=True)
        await bench.server.close()
        for worker in workers:
            assert await anext(worker, None) is None


async def test_after_the_first_table_only_changes_are_sent() -> None:
    async with benched() as bench:
        bench.server.publish(table("a", "b"))
        reader, writer = await asyncio.open_unix_connection(bench.path)
        first = DOWNWARD.decode(await reader.readline())
        assert isinstance(first, RoutingTable)
        bench.server.publish(table("a", "c"))
        change = DOWNWARD.decode(await reader.readline())
        assert isinstance(change, TableChange)
        assert (change.since, change.version) == (first.version, first.version + 1)
        assert [one.name for one in change.deployments] == ["c"]
        writer.close()


async def test_a_worker_that_missed_a_change_gets_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    async with benched() as bench:
        worker = SupervisorLink(nothing_in_flight).tables(bench.path)
        await anext(worker)
        with monkeypatch.context() as patch:
            # private: the server sends every change to every worker, and a unix socket loses none
            patch.setattr(bench.server, "_workers", set())
            bench.server.publish(table("a"))
        bench.server.publish(table("a", "b"))
        found = await anext(worker)
        assert (content(found), found.version) == (table("a", "b"), 2)
        bench.server.publish(table("b"))
        assert content(await anext(worker)) == table("b")


async def test_a_worker_takes_only_later_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whichever supervisor they are from."""

    link = SupervisorLink(nothing_in_flight)
    found: list[tuple[str, int, int]] = []
    for epoch, name in ((5, "first"), (4, "earlier"), (6, "next")):
        server = ControlServer(epoch=epoch)
        path = tmp_path / name
        await server.start(path)
        server.publish(table(name))

        async def follow(path: Path = path) -> None:
            async for one in link.tables(path):
                found.append((one.deployments[0].name, one.epoch, one.version))

        task = asyncio.create_task(follow())
        await until(lambda name=name: name in caplog.text or name in str(found))  # type: ignore[misc]
        await server.close()
        await task
    assert found == [("first", 5, 1), ("next", 6, 1)]
    assert "the table of an earlier supervisor is ignored (epoch 4, not 5)" in caplog.text


async def test_a_worker_that_leaves_is_forgotten() -> None:
    async with benched() as bench:
        worker = SupervisorLink(nothing_in_flight).tables(bench.path)
        await anext(worker)
        await worker.aclose()
        for _ in range(100):
            bench.server.publish(table("a"))
            await asyncio.sleep(0)
        other = SupervisorLink(nothing_in_flight).tables(bench.path)
        assert content(await anext(other)) == table("a")
        await other.aclose()


# Commands


async def test_many_commands_at_once_each_get_their_own_answer() -> None:
    async def carry_out(command: Command) -> CommandAnswer:
        await gates[command.model].wait()
        return CommandAnswer(command.id, 200, {"did": f"{command.action} {command.model}"})

    gates = {str(number): asyncio.Event() for number in range(20)}
    async with benched(carry_out) as bench:
        (one, _), (other, _) = await bench.worker(), await bench.worker()
        asked = [
            asyncio.create_task((one if number % 2 else other).command("load", str(number))) for number in range(20)
        ]
        for number in reversed(range(20)):  # the last asked is the first answered
            gates[str(number)].set()
            answer = await asked[number]
            assert (answer.status, answer.content) == (200, {"did": f"load {number}"})


async def test_a_command_that_fails_unexpectedly_is_answered_with_500(caplog: pytest.LogCaptureFixture) -> None:
    async def carry_out(command: Command) -> CommandAnswer:
        raise RuntimeError("a mistake")

    async with benched(carry_out) as bench:
        link, _ = await bench.worker()
        answer = await link.command("load", "a")
        assert answer.status == 500
        assert "load failed in the supervisor" in answer.content["error"]
        assert "a mistake" in caplog.text


async def test_a_supervisor_that_ends_fails_what_was_asked_of_it() -> None:
    async def carry_out(command: Command) -> CommandAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async with benched(carry_out) as bench:
        link, following = await bench.worker()
        asked = asyncio.create_task(link.command("unload", "a"))
        await asyncio.sleep(0)
        await bench.server.close()
        with pytest.raises(Unavailable, match="the supervisor is gone"):
            await asked
        await following
        with pytest.raises(Unavailable, match="the supervisor is gone"):
            await link.command("unload", "a")


async def test_a_command_is_carried_out_although_its_worker_ends() -> None:
    done = []
    begun, go = asyncio.Event(), asyncio.Event()

    async def carry_out(command: Command) -> CommandAnswer:
        begun.set()
        await go.wait()
        done.append(command.model)
        return CommandAnswer(command.id, 200, {})

    async with benched(carry_out) as bench:
        link, following = await bench.worker()
        asked = asyncio.create_task(link.command("unload", "a"))
        await begun.wait()
        following.cancel()
        with pytest.raises(Unavailable):
            await asked
        go.set()
        await bench.server.finish()
        assert done == ["a"]


# Signs of life


async def test_a_worker_whose_event_loop_goes_round_answers_each_ping() -> None:
    async with benched() as bench:
        await bench.worker()
        assert bench.server.ping() == {os.getpid(): 0}
        for _ in range(3):
            await until(lambda: bench.server.ping() == {os.getpid(): 0})


async def test_pings_that_a_worker_does_not_answer_are_counted_until_it_does() -> None:
    async with benched() as bench:
        reader, writer = await asyncio.open_unix_connection(bench.path)
        await reader.readline()
        assert [bench.server.ping() for _ in range(4)] == [{os.getpid(): count} for count in range(4)]
        assert (await reader.readline()).strip() == b'{"type":"ping"}'  # one is enough
        writer.write(b'{"type":"pong"}\n')
        await until(lambda: bench.server.ping() == {os.getpid(): 0})
        writer.close()
        await until(lambda: not bench.server.ping())


# Quarantine


def _note(found: list[tuple[str, bytes]], model: str, fingerprint: bytes) -> None:
    found.append((model, fingerprint))


async def test_what_one_worker_found_the_others_are_told() -> None:
    async with benched() as bench:
        told: list[list[tuple[str, bytes]]] = [[], [], []]
        links = []
        for found in told:
            link = SupervisorLink(nothing_in_flight, partial(_note, found))
            links.append(link)
            await bench.follow(link)
        links[0].report_quarantined("m", b"\x00\xff")
        links[2].report_quarantined("n", b"")
        await until(lambda: [len(found) for found in told] == [1, 2, 1])
        assert told == [[("n", b"")], [("m", b"\x00\xff"), ("n", b"")], [("m", b"\x00\xff")]]


# Draining


async def test_what_one_worker_is_asked_to_cancel_the_others_cancel_and_count() -> None:
    async with benched() as bench:
        asked: list[tuple[int, str]] = []

        def cancels(worker: int) -> Callable[[str], Awaitable[int]]:
            async def cancel(request_id: str) -> int:
                asked.append((worker, request_id))
                return worker

            return cancel

        links = [SupervisorLink(nothing_in_flight, on_cancel=cancels(worker)) for worker in range(3)]
        assert await links[0].cancel_elsewhere("early") == 0
        for link in links:
            await bench.follow(link)
        counts = await asyncio.gather(links[0].cancel_elsewhere("mine"), links[2].cancel_elsewhere("key:other"))
        assert list(counts) == [1 + 2, 0 + 1]
        assert sorted(asked) == [(0, "key:other"), (1, "key:other"), (1, "mine"), (2, "mine")]


@pytest.mark.parametrize("ends", [False, True], ids=["says nothing", "ends"])
async def test_a_worker_that_does_not_say_what_it_cancelled_is_not_waited_for(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "CANCEL_TIMEOUT_S", 30 if ends else 0.05)

    async with benched() as bench:
        link, _ = await bench.worker()
        reader, writer = await asyncio.open_unix_connection(bench.path)
        await reader.readline()  # the table
        counted = asyncio.ensure_future(link.cancel_elsewhere("mine"))
        await reader.readline()  # what it shall cancel
        if ends:
            writer.close()
        assert await asyncio.wait_for(counted, 10) == 0
        writer.close()


async def test_draining_waits_for_every_worker_and_sums_what_they_say() -> None:
    async with benched() as bench:
        gate = asyncio.Event()
        orders = []

        async def slow(order: Drain) -> Drained:
            orders.append(order)
            await gate.wait()
            return Drained(3, 1)

        async def quick(order: Drain) -> Drained:
            return Drained(2, 0)

        await bench.worker(slow)
        await bench.worker(quick)
        draining = asyncio.create_task(bench.server.drain("a", 9, ["a-1"]))
        await until(lambda: bool(orders))
        assert not draining.done()
        gate.set()
        assert await draining == Drained(5, 1)
        assert (orders[0].model, orders[0].timeout_s, orders[0].replicas) == ("a", 9, ["a-1"])


async def test_the_table_comes_before_the_order_to_drain() -> None:
    async with benched() as bench:
        seen: list[str] = []

        async def note(order: Drain) -> Drained:
            seen.append(f"drain {order.model}")
            return Drained()

        link = SupervisorLink(note)

        async def follow() -> None:
            async for found in link.tables(bench.path):
                seen.append(" ".join(route.name for route in found.deployments))

        task = asyncio.create_task(follow())
        await until(lambda: bool(seen))
        bench.server.publish(table("a"))
        await bench.server.drain("a", 9)
        assert seen == ["", "a", "drain a"]
        await bench.server.close()
        await task


async def test_a_worker_that_ends_while_it_drains_has_nothing_in_flight() -> None:
    async with benched() as bench:
        begun = asyncio.Event()

        async def never(order: Drain) -> Drained:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        _, following = await bench.worker(never)
        draining = asyncio.create_task(bench.server.drain("a", 9))
        await begun.wait()
        following.cancel()
        assert await draining == Drained()


async def test_a_worker_that_never_says_that_it_has_drained_is_waited_for_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("headwater_server.control.control_server.DRAIN_GRACE_S", 0.05)

    async with benched() as bench:

        async def never(order: Drain) -> Drained:
            await asyncio.Event().wait()
            raise AssertionError

        await bench.worker(never)
        assert await bench.server.drain("a", 0.01) == Drained()
        assert "a: 1 gateway workers did not report in time that they have drained" in caplog.text


async def test_without_workers_nothing_is_in_flight() -> None:
    async with benched() as bench:
        assert await bench.server.drain("a", 9) == Drained()


# Gateways on other machines


class Far:
    """A supervisor's end for gateways on other machines."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        """The number of workers after each change of it."""
        self.server = ControlServer(on_workers=lambda: self.counts.append(self.server.workers))
        self.port = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, first: bytes, **options: Any) -> asyncio.StreamReader:
        """Open a connection, and send this."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        self._writers.append(writer)
        writer.write(first)
        return reader

    async def gateway(self, name: str) -> asyncio.StreamReader:
        """A gateway that has its first table."""
        reader = await self.connect(encode_line(Hello("secret", 3, name)))
        await reader.readline()
        return reader

    def say(self, message: msgspec.Struct) -> None:
        """Have the last gateway say something."""
        self._writers[-1].write(encode_line(message))

    async def leave(self) -> None:
        """End the last gateway's connection."""
        workers = self.server.workers
        self._writers[-1].close()
        await until(lambda: self.server.workers < workers)

    def drain(self, timeout_s: float = 60) -> asyncio.Task[Drained]:
        """Begin a drain."""
        return asyncio.create_task(self.server.drain("a", timeout_s))

    async def close(self) -> None:
        await self.server.close()
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def opened(tls: PeerTls | None = None, *, is_successor: bool = False) -> AsyncIterator[Far]:
    far = Far()
    start = far.server.start_for_gateways
    far.port = await start("127.0.0.1", 0, "secret", tls, is_successor=is_successor)
    far.server.publish(table("a"))
    try:
        yield far
    finally:
        await far.close()


async def heard(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_gateway_stands_for_all_its_workers() -> None:
    async with opened() as far:
        readers = [await far.connect(encode_line(Hello("secret", workers))) for workers in (3, 2)]
        for reader in readers:
            assert content(DOWNWARD.decode(await reader.readline())) == table("a")
        assert far.server.workers == 5
        assert far.server.ping() == {}  # they have no process here
        far._writers[0].close()
        await until(lambda: far.server.workers == 2)
        assert sorted(far.counts) in ([2, 2, 5], [2, 3, 5])


@pytest.mark.parametrize(
    "first",
    [
        encode_line(Hello("secre", 3)),
        encode_line(Hello("", 3)),
        encode_line(Hello("s\xe9cret", 3)),
        encode_line(Command(1, "unload", "a")),
        b"{}\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\n",
        b"\n",
    ],
)
async def test_who_does_not_know_the_token_is_told_nothing(first: bytes) -> None:
    async with opened() as far:
        assert await heard(await far.connect(first)) == b""
        assert (far.server.workers, far.counts) == (0, [])


async def test_who_sends_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "HELLO_TIMEOUT_S", 0.05)

    async with opened() as far:
        assert await heard(await far.connect(b'{"type":"hello"')) == b""
        assert far.counts == []


@pytest.mark.parametrize("size", [200_000, 2_000_000])
@pytest.mark.parametrize("first", [b"", encode_line(Hello("secret", 3))])
async def test_a_message_without_an_end_is_read_up_to_a_bound(
    first: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "HELLO_TIMEOUT_S", 600)
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 64 * 1024)

    async with opened() as far:
        told = await heard(await far.connect(first + b"x" * size))
        assert told.count(b"\n") <= len(first.splitlines())  # the table, for a gateway
        await until(lambda: far.server.workers == 0)


async def test_a_second_hello_ends_a_gateway(caplog: pytest.LogCaptureFixture) -> None:
    async with opened() as far:
        hello = encode_line(Hello("secret", 3))
        assert (await heard(await far.connect(hello + hello))).count(b"\n") == 1  # the table
        assert far.counts == [3, 0]
    assert "invalid message from a gateway worker: hello again" in caplog.text


async def test_a_gateway_from_which_nothing_comes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as far:
        reader = await far.gateway("g")
        far.server.ping()
        assert (await reader.readline()).strip() == b'{"type":"ping"}'
        far.say(Pong())
        again = asyncio.create_task(reader.readline())
        await until(lambda: bool(far.server.ping()) or again.done())
        assert far.server.workers == 3
        monkeypatch.setattr(control_server, "GATEWAY_GONE_S", 0)
        far.server.ping()
        await heard(reader)
        await until(lambda: far.server.is_deserted)


# Gateways that come again


def order(line: bytes) -> Drain:
    found = DOWNWARD.decode(line)
    assert isinstance(found, Drain)
    return found


@pytest.mark.parametrize("has_left", [False, True])
async def test_a_gateway_that_comes_again_is_asked_again_what_it_has_in_flight(has_left: bool) -> None:
    async with opened() as far:
        reader = await far.gateway("g")
        drain = far.drain()
        first = order(await reader.readline())
        if has_left:
            await far.leave()
        again = await far.gateway("g")  # at first beside the old connection, whose end has not come yet
        assert await heard(reader) == b""
        second = order(await again.readline())
        assert (second.model, second.timeout_s < first.timeout_s, far.server.workers) == ("a", True, 3)
        assert not drain.done()
        far.say(Drained(2, 1, second.id))
        assert await drain == Drained(2, 1)


async def test_a_drain_waits_for_a_gateway_that_is_away() -> None:
    async with opened() as far:
        await far.gateway("g")
        await far.leave()
        assert not far.server.is_deserted
        drain = far.drain()
        found = order(await (await far.gateway("g")).readline())
        assert not drain.done()
        far.say(Drained(1, 0, found.id))
        assert await drain == Drained(1, 0)


async def test_a_gateway_that_stays_away_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "GATEWAY_GONE_S", 0.2)

    async with opened() as far:
        await far.gateway("g")
        await far.leave()
        began_s = asyncio.get_running_loop().time()
        assert await far.drain() == Drained()
        assert asyncio.get_running_loop().time() - began_s < 10
        assert far.server.is_deserted


async def test_a_gateway_that_says_goodbye_is_not_waited_for() -> None:
    async with opened() as far:
        reader = await far.gateway("g")
        drain = far.drain()
        order(await reader.readline())
        far.say(Goodbye())
        assert await drain == Drained()
        assert far.server.is_deserted
        far._writers[-1].close()
        await until(lambda: far.counts[-1] == 0)
        assert far.server.is_deserted


@pytest.mark.slow
async def test_a_supervisors_successor_waits_for_the_gateways_that_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "GATEWAY_GONE_S", 1.0)

    async with opened(is_successor=True) as far:
        drain = far.drain()
        found = order(await (await far.gateway("g")).readline())
        assert not drain.done()
        far.say(Drained(1, 0, found.id))
        assert await drain == Drained(1, 0)


async def test_a_supervisors_successor_is_not_deserted_while_gateways_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(is_successor=True) as far:
        assert not far.server.is_deserted
        await far.gateway("g")
        far.say(Goodbye())
        await until(lambda: far.server.workers == 0)
        assert not far.server.is_deserted
    monkeypatch.setattr(control_server, "GATEWAY_GONE_S", 0)
    async with opened(is_successor=True) as far:
        await until(lambda: far.server.is_deserted)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
@pytest.mark.parametrize("who", ["peer", "other-name", "stranger", "nobody", "plain"])
async def test_only_peers_of_the_cluster_may_say_hello(
    who: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    signer = authority(tmp_path)
    server = PeerTls(issue(signer, tmp_path / "server"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(signer / "ca.crt")
    if who not in ("nobody", "plain"):
        name = "DNS:other" if who == "other-name" else "DNS:headwater"
        folder = issue(authority(tmp_path, who) if who == "stranger" else signer, tmp_path / "client", name=name)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")

    async with opened(server) as far:
        options = {} if who == "plain" else {"ssl": context, "server_hostname": "headwater"}
        try:
            reader = await far.connect(encode_line(Hello("secret", 3)), **options)
            found = await reader.readline() if who == "peer" else await heard(reader)
        except (OSError, ssl.SSLError):
            found = b""
        assert bool(found) is (who == "peer")
        assert far.server.workers == (3 if who == "peer" else 0)
    assert ("a gateway whose certificate has another name was refused" in caplog.text) is (who == "other-name")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
async def test_new_connections_have_the_renewed_certificate(tmp_path: Path) -> None:
    signer = authority(tmp_path)
    server, client = (PeerTls(issue(signer, tmp_path / name)) for name in ("server", "client"))

    async with opened(server) as far:
        shown = []
        for _ in range(2):
            context = client.client_context()
            reader = await far.connect(encode_line(Hello("secret")), ssl=context, server_hostname=client.server_name)
            await reader.readline()
            tls = far._writers[-1].get_extra_info("ssl_object")
            shown.append(tls.getpeercert(binary_form=True))
            issue(signer, tmp_path / "server")
            server.renew()
        assert shown[0] != shown[1]
        assert far.server.workers == 2
