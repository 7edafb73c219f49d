"""The connections to one deployment's replicas."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, cast

import pytest

from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import DeploymentRoute, ReplicaRoute, State
from headwater_server.dispatch.pool import FEW, Replica, ReplicaPool


class Client:
    """As much of a client as a pool needs."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Bench:
    """A pool whose clients are the test's own."""

    def __init__(self) -> None:
        self.opened: list[Replica] = []
        self.back = asyncio.Event()
        self.reports: list[ReplicaLoss] = []
        self.pool = ReplicaPool("m", self._open, self.back.set, on_lost=self.reports.append)

    def _open(self, route: ReplicaRoute) -> Replica:
        self.opened.append(Replica(route, cast(Any, Client())))
        return self.opened[-1]

    def update(self, ready: str, retiring: str = "", grpc: str = "") -> None:
        def routes(ids: str) -> tuple[ReplicaRoute, ...]:
            return tuple(ReplicaRoute(id, "unix:", "", grpc_address="unix:some" if id in grpc else "") for id in ids)

        self.pool.update(DeploymentRoute("m", State.READY, replicas=routes(ready), retiring=routes(retiring)))

    def eligible(self) -> str:
        return "".join(one.route.id for one in self.pool.eligible())

    def closed(self) -> str:
        return "".join(one.route.id for one in self.opened if cast(Client, one.client).is_closed)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


async def test_it_connects_to_what_is_new_and_closes_what_is_gone(bench: Bench) -> None:
    bench.update("ab")
    bench.update("bc")
    assert [one.route.id for one in bench.opened] == ["a", "b", "c"]
    assert (bench.eligible(), bench.closed()) == ("bc", "a")
    assert bench.opened[0].is_lost  # who still refers to it gives it nothing
    assert bench.pool.held(["a", "c"]) == [bench.opened[2]]
    bench.pool.close()
    assert (bench.eligible(), bench.closed()) == ("", "abc")


async def test_a_replica_that_is_lost_again_without_an_answer_is_reported_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater_server.dispatch.pool.LOST_RETRY_S", 0.001)

    bench.update("ab", grpc="b")
    for _ in range(2):
        for id in "ab":
            bench.back.clear()
            bench.pool.lose(bench.pool.connected[id])
            await bench.back.wait()
    assert [(one.replica, one.times) for one in bench.reports] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


async def test_what_retires_keeps_its_connection_and_gets_nothing_new(bench: Bench) -> None:
    bench.update("a")
    bench.update("b", retiring="a")
    assert (bench.eligible(), bench.closed(), len(bench.pool.held("ab"))) == ("b", "", 2)
    bench.update("b")
    assert bench.closed() == "a"


async def test_what_is_out_of_reach_keeps_its_connection_and_is_eligible_once_it_is_back(bench: Bench) -> None:
    bench.update("ab")
    bench.update("b", retiring="a")
    assert (bench.eligible(), bench.closed()) == ("b", "")
    bench.update("ba")
    assert (sorted(bench.eligible()), bench.closed(), len(bench.opened)) == (["a", "b"], "", 2)


@pytest.mark.parametrize(("grpc", "closed"), [("", ""), ("a", "a")])
async def test_what_was_lost_while_it_was_out_of_reach_is_tried_again_once_it_is_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, grpc: str, closed: str
) -> None:
    monkeypatch.setattr("headwater_server.dispatch.pool.LOST_RETRY_S", 0.001)

    bench.update("ab", grpc=grpc)
    bench.update("b", retiring="a", grpc=grpc)
    bench.pool.lose(bench.opened[0])
    bench.pool.lose(bench.opened[1])  # its turn comes after the other's
    await bench.back.wait()
    assert bench.eligible() == "b"
    bench.back.clear()
    bench.update("ba", grpc=grpc)
    await bench.back.wait()
    assert (sorted(bench.eligible()), bench.closed()) == (["a", "b"], closed)


async def test_of_many_replicas_some_are_drawn_and_only_eligible_ones() -> None:
    loaded = Counter[str]()
    pool = ReplicaPool("m", lambda route: Replica(route, cast(Any, Client())), chance=random.Random(1).random)
    routes = tuple(ReplicaRoute(str(number), "", "") for number in range(100))
    pool.update(DeploymentRoute("m", State.READY, replicas=routes[:50], retiring=routes[50:]))
    pool.lose(pool.connected["0"])
    for _ in range(1000):
        found = pool.candidates()
        assert len(found) == FEW
        loaded.update(one.route.id for one in found)
    assert sorted(map(int, loaded)) == list(range(1, 50))
    assert max(loaded.values()) < 2 * 1000 * FEW / 49
    pool.update(DeploymentRoute("m", State.READY, replicas=routes[:FEW]))
    assert {one.route.id for one in pool.candidates()} == {str(number) for number in range(1, FEW)}


@pytest.mark.parametrize(("grpc", "closed"), [("", ""), ("a", "a")])
async def test_what_was_lost_but_stays_in_the_table_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, grpc: str, closed: str
) -> None:
    """Over gRPC by a new connection, as all calls share one."""
    monkeypatch.setattr("headwater_server.dispatch.pool.LOST_RETRY_S", 0.001)

    bench.update("a", grpc=grpc)
    bench.pool.lose(bench.opened[0])
    assert bench.eligible() == ""
    await bench.back.wait()
    assert (bench.eligible(), bench.closed()) == ("a", closed)


@pytest.mark.parametrize("retiring", ["", "a"])
async def test_what_was_lost_and_is_replaced_is_not_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, retiring: str
) -> None:
    monkeypatch.setattr("headwater_server.dispatch.pool.LOST_RETRY_S", 0.001)

    bench.update("a")
    bench.pool.lose(bench.opened[0])
    bench.update("b", retiring=retiring)
    bench.pool.lose(bench.opened[1])  # its turn comes after the other's
    await bench.back.wait()
    assert bench.eligible() == "b"
