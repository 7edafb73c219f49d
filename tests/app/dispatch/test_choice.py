"""Which replica gets the next call, against looking at all of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater_server.control.routing import ReplicaRoute
from headwater_server.dispatch.choice import REPORT_FRESH_S, Choice
from headwater_server.dispatch.pool import FEW, ReplicaCalls


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test sets."""

    now_s = 1.0

    def time(self) -> float:
        return self.now_s


class Bench:
    """A choice among replicas that nothing connects to."""

    def __init__(self, count: int, max_in_flight: int = 1, instances: int = 1, seed: int = 0) -> None:
        self.loop = Loop()
        self.replicas: dict[str, ReplicaCalls] = {}
        self.choice = made(self.replicas, seed, self.loop)
        self.choice.bound(max_in_flight, instances)
        for number in range(count):
            self.open(str(number))

    def open(self, id: str) -> None:
        self.replicas[id] = ReplicaCalls(ReplicaRoute(id, "", ""), cast(Any, None))
        self.choice.note(self.replicas[id])

    def close(self, id: str) -> None:
        replica = self.replicas.pop(id)
        replica.is_lost = True
        self.choice.note(replica)

    def start(self, replica: ReplicaCalls, rows: int = 1) -> None:
        replica.calls += 1
        replica.rows += rows
        self.choice.note(replica)

    def end(self, replica: ReplicaCalls, others: int = 0) -> None:
        replica.rows -= replica.rows // replica.calls
        replica.calls -= 1
        replica.others, replica.heard_s = others, self.loop.now_s
        self.choice.note(replica)


def made(replicas: dict[str, ReplicaCalls], seed: int, loop: Loop) -> Choice:
    async def make() -> Choice:
        return Choice(replicas, random.Random(seed).random)

    choice = loop.run_until_complete(make())
    loop.close()
    return choice


class Machine(RuleBasedStateMachine):
    """Whatever happens to replicas, the choice is one that looking at all of them could have made."""

    @initialize(
        count=st.integers(0, 3 * FEW), max_in_flight=st.integers(1, 3), instances=st.integers(1, 3), seed=st.integers()
    )
    def begin(self, count: int, max_in_flight: int, instances: int, seed: int) -> None:
        self.max_in_flight, self.instances = max_in_flight, min(instances, max_in_flight)
        self.bench = Bench(count, self.max_in_flight, self.instances, seed)
        self.opened = count
        self.without: ReplicaCalls | None = None

    def some(self, data: st.DataObject) -> ReplicaCalls:
        return data.draw(st.sampled_from(list(self.bench.replicas.values())))

    @rule()
    def opens(self) -> None:
        self.bench.open(str(self.opened))
        self.opened += 1

    @precondition(lambda self: self.bench.replicas)
    @rule(data=st.data())
    def closes(self, data: st.DataObject) -> None:
        self.bench.close(self.some(data).route.id)

    @precondition(lambda self: self.bench.replicas)
    @rule(data=st.data(), is_lost=st.booleans(), is_retiring=st.booleans())
    def changes(self, data: st.DataObject, is_lost: bool, is_retiring: bool) -> None:
        replica = self.some(data)
        replica.is_lost, replica.is_retiring = is_lost, is_retiring
        self.bench.choice.note(replica)

    @rule(rows=st.integers(1, 4), count=st.integers(1, 3 * FEW))
    def calls(self, rows: int, count: int) -> None:
        for _ in range(count):
            replica = self.bench.choice.best(self.without)
            if replica is not None:
                self.bench.start(replica, rows)

    @precondition(lambda self: any(one.calls for one in self.bench.replicas.values()))
    @rule(data=st.data(), others=st.integers(0, 3))
    def answers(self, data: st.DataObject, others: int) -> None:
        self.bench.end(data.draw(st.sampled_from([one for one in self.bench.replicas.values() if one.calls])), others)

    @precondition(lambda self: self.bench.replicas)
    @rule(data=st.data(), is_any=st.booleans())
    def sets_aside(self, data: st.DataObject, is_any: bool) -> None:
        self.without = self.some(data) if is_any else None

    @rule(max_in_flight=st.integers(1, 3), instances=st.integers(1, 3))
    def bounds(self, max_in_flight: int, instances: int) -> None:
        self.max_in_flight, self.instances = max_in_flight, min(instances, max_in_flight)
        self.bench.choice.bound(self.max_in_flight, self.instances)

    @invariant()
    def it_is_one_of_the_possible_ones(self) -> None:
        if not hasattr(self, "bench"):
            return
        eligible = [one for one in self.bench.replicas.values() if one.is_eligible]
        possible = [one for one in eligible if one.calls < self.max_in_flight and one is not self.without]
        best = self.bench.choice.best(self.without)
        assert best in possible if possible else best is None
        if best is not None and len(self.bench.replicas) <= FEW:
            assert self.bench.choice.weight(best) == min(map(self.bench.choice.weight, possible))
        elif best is not None:
            assert (best.calls == 0) == any(one.calls == 0 for one in possible)
        if best is not None:
            assert (best.calls < self.instances) == any(one.calls < self.instances for one in possible)
        least = self.bench.choice.least()
        assert least in eligible if eligible else least is None
        if least is not None:
            assert (least.calls == 0) == any(one.calls == 0 for one in eligible)


TestMachine = pytest.mark.slow(Machine.TestCase)
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("count", [1, 2, FEW])
def test_of_few_replicas_the_one_with_the_fewest_rows_is_chosen(count: int) -> None:
    bench = Bench(count, max_in_flight=1000)
    for rows in range(count, 0, -1):
        bench.start(cast(ReplicaCalls, bench.choice.best()), rows)
    best = bench.choice.best()
    assert best is not None
    assert best.rows == 1


def test_calls_spread_over_many_busy_replicas_almost_as_well_as_by_looking_at_all() -> None:
    """With the lighter of two at random the most is the mean and some log2(log2(1000)) = 3; with one at random, 11."""
    bench = Bench(1000, max_in_flight=1000)
    for _ in range(11_000):
        replica = bench.choice.best()
        assert replica is not None
        bench.start(replica)
    assert max(one.rows for one in bench.replicas.values()) <= 11 + 4


def test_every_idle_replica_has_its_turn() -> None:
    bench = Bench(100)
    found = Counter[str]()
    for _ in range(2000):
        replica = bench.choice.best()
        assert replica is not None
        found[replica.route.id] += 1
    assert len(found) == 100
    assert max(found.values()) < 60


def test_replicas_that_reported_no_rows_of_others_come_first() -> None:
    bench = Bench(20)
    for replica in bench.replicas.values():
        bench.start(replica)
        bench.end(replica, others=0 if replica.route.id == "7" else 3)
    best = bench.choice.best()
    assert best is bench.replicas["7"]
    bench.start(best)
    best = bench.choice.best()
    assert best is not None
    assert not best.calls


@pytest.mark.parametrize("count", [2, FEW + 2])
def test_rows_of_others_count_for_a_while(count: int) -> None:
    bench = Bench(count, max_in_flight=9)
    for replica in bench.replicas.values():
        bench.start(replica, 2)
        bench.start(replica, 2)
        bench.end(replica, others=5)
    light = bench.replicas["1"]
    light.others = 0
    assert bench.choice.weight(light) == (True, 2)
    assert bench.choice.weight(bench.replicas["0"]) == (True, 7)
    assert light in [bench.choice.best() for _ in range(100)]
    bench.loop.now_s += REPORT_FRESH_S
    assert bench.choice.weight(bench.replicas["0"]) == (True, 2)
