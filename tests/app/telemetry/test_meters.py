"""What a dispatcher counts of requests, calls and heads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headwater.signature import HeadSpec
from headwater.wire.report import RowReport, Status
from headwater_server.dispatch.collector import Collector
from headwater_server.dispatch.policy import GatherClock
from headwater_server.errors import CallableFailed, DeadlineExceeded
from headwater_server.telemetry.instruments import Histogram
from headwater_server.telemetry.recorder import recorder, use
from headwater_server.telemetry.store import SeriesKey, Store
from tests.app.dispatch.stand_in import Bench, settle

HEADS = {"topic": HeadSpec("topic", ("t",), on_error="omit"), "mood": HeadSpec("mood", ("m",), on_error="omit")}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    use(Store())
    yield
    use(Store())


def counted(name: str, *labels: str) -> list[int]:
    return recorder().store.snapshot().records.get(SeriesKey(name, labels), [])


def phase(name: str) -> tuple[int, int]:
    """How many requests had it, and how long in all."""
    numbers = counted("headwater_request_phase_seconds", "m", name)
    return sum(numbers[:-1]), numbers[-1]


class TestPhases:
    async def test_who_waits_for_a_free_replica_is_in_the_queue(self) -> None:
        bench = Bench(max_in_flight=1)
        first = bench.send(1.0)
        await settle()
        second = bench.send(2.0)
        await settle()
        bench.calls[0].answer()
        await first
        await settle()
        bench.calls[1].answer()
        await second
        assert phase("batch_wait") == (2, 0)
        assert phase("queue")[0] == 2
        assert phase("queue")[1] > 0

    async def test_who_waits_for_company_with_a_replica_at_hand_is_in_batch_wait(self) -> None:
        bench = Bench(max_in_flight=2)
        first = bench.send(1.0)
        await settle()
        second = bench.send(2.0)
        await settle()
        assert len(bench.calls) == 1
        bench.calls[0].answer()
        await first
        await settle()
        bench.calls[1].answer()
        await second
        count, took_ns = phase("batch_wait")
        assert count == 2
        assert took_ns > 0
        assert phase("queue")[1] > 0  # of the turn of the event loop in which requests gather

    async def test_what_failed_has_none(self) -> None:
        bench = Bench()
        task = bench.send(1.0)
        await settle()
        bench.calls[0].answer([RowReport(Status.RAISED, "no")])
        with pytest.raises(CallableFailed):
            await task
        assert phase("queue") == phase("compute") == (0, 0)
        assert counted("headwater_rows", "m") == [0]
        assert counted("headwater_batch_rows", "m")[0] == 1  # the replica had it, all the same

    async def test_requests_that_share_a_batch_are_counted_together(self) -> None:
        asked: list[object] = []

        def call_soon(write: Callable[[], None]) -> None:
            asked.append(asyncio.get_running_loop().call_soon(write))

        use(Store(call_soon=call_soon))
        bench = Bench(max_in_flight=1)
        tasks = [bench.send(1.0), bench.send(2.0, 3.0)]
        await settle()
        bench.calls[0].answer()
        for task in tasks:
            await task
        assert len(asked) == 2  # for the call, and a turn later for its requests
        for name in ("queue", "batch_wait", "compute", "transport"):
            assert phase(name)[0] == 2
        assert phase("compute")[1] == 2 * sum(counted("headwater_compute_seconds", "m"))
        assert counted("headwater_rows", "m") == [3]
        assert counted("headwater_batch_rows", "m")[-1] == 3

    async def test_calls_that_triton_merged_computed_once(self) -> None:
        bench = Bench(max_in_flight=2)
        tasks = [bench.send(*[1.0] * 4), bench.send(*[1.0] * 4)]
        await settle()
        bench.calls[0].answer()
        bench.calls[1].answer(is_merged=True)
        for task in tasks:
            await task
        assert counted("headwater_compute_seconds", "m") == [5000]
        assert counted("headwater_batch_capacity_rows", "m") == [8]
        assert counted("headwater_batch_rows", "m")[-1] == 8


class TestHeads:
    """Each head that a request wants is counted once."""

    def results(self) -> dict[tuple[str, ...], int]:
        records = recorder().store.snapshot().records
        return {key.labels[1:]: one[0] for key, one in records.items() if key.name == "headwater_head_results"}

    async def check(self, act: Any, expected: dict[tuple[str, ...], int]) -> None:
        collector = Collector(HEADS, is_stream=False, meter=recorder().deployment("m"))
        act(collector)
        collector.close()
        if collector.future.done() and not collector.future.cancelled():
            collector.future.exception()
        assert self.results() == expected

    async def test_results(self) -> None:
        def act(collector: Collector) -> None:
            collector.decide("topic", {})
            collector.decide("topic", {})
            collector.decide("mood", error=CallableFailed("no"))

        await self.check(act, {("topic", "ok"): 1, ("mood", "failed"): 1})
        assert sum(counted("headwater_head_seconds", "m", "topic")[:-1]) == 1

    async def test_a_request_that_fails_takes_the_rest_with_it(self) -> None:
        def act(collector: Collector) -> None:
            collector.decide("topic", {})
            collector.fail(DeadlineExceeded("late"))

        await self.check(act, {("topic", "ok"): 1, ("mood", "timeout"): 1})

    async def test_what_nobody_waits_for_is_cancelled(self) -> None:
        await self.check(
            lambda collector: collector.decide("topic", {}), {("topic", "ok"): 1, ("mood", "cancelled"): 1}
        )

    async def test_a_cancelled_wait_is_too(self) -> None:
        def act(collector: Collector) -> None:
            collector.future.cancel()  # as a cancelled task does to what it awaits

        await self.check(act, {("topic", "cancelled"): 1, ("mood", "cancelled"): 1})


def test_the_gather_clock_runs_only_while_rows_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000
    monkeypatch.setattr("time.perf_counter_ns", lambda: now)
    clock = GatherClock()
    now = 2000
    assert clock.read_ns() == 0
    clock.run()
    now = 2300
    clock.run()
    assert clock.read_ns() == 300
    now = 2500
    clock.stop()
    now = 9000
    clock.stop()
    assert clock.read_ns() == 500
    clock.run()
    now = 9001
    assert clock.read_ns() == 501


def test_numbers_that_come_together_count_each() -> None:
    store = Store()
    histogram = Histogram(store, "headwater_inter_token_seconds", "m")
    histogram.observe_times(3_000_000, 4)
    numbers = store.snapshot().records[SeriesKey("headwater_inter_token_seconds", ("m",))]
    assert sum(numbers[:-1]) == 4
    assert numbers[-1] == 12_000_000
