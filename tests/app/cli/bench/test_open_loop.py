"""Open loop: requests have their times, and latency counts from those."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time

import pytest

from headwater_server.cli.bench.job import Job, Load, RequestSet
from headwater_server.cli.bench.open_loop import PreciseTimer, arrival_times, open_loop
from headwater_server.cli.bench.outcomes import Outcomes
from headwater_server.cli.bench.request_bodies import Body
from headwater_server.cli.bench.sample_reader import Fault
from tests.load_target import Answer, Asked, LoadTarget, load_target
from tests.running import wait_for


def run(url: str, rate_per_s: float, seconds: float, *, timeout_s: float = 30.0, **options: object) -> Outcomes:
    target = RequestSet(url, "m", (Body(b"{}"),), timeout_s=timeout_s)
    job = Job(target, Load(rate_per_s=rate_per_s), seconds, 0, **options)  # type: ignore[arg-type]
    return asyncio.run(open_loop(job))


def test_constant_arrivals_are_at_equal_distances() -> None:
    assert list(itertools.islice(arrival_times(10, "constant", 0), 4)) == [0, 0.1, 0.2, 0.3]


def test_poisson_arrivals_are_independent_with_the_wanted_mean() -> None:
    times = list(itertools.islice(arrival_times(100, "poisson", 1), 20_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert min(gaps) > 0
    # Of an exponential distribution mean and deviation are equal; the bounds are six standard errors.
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.045)
    assert statistics.pstdev(gaps) == pytest.approx(0.01, rel=0.06)
    assert times == list(itertools.islice(arrival_times(100, "poisson", 1), 20_000))
    assert times != list(itertools.islice(arrival_times(100, "poisson", 2), 20_000))


def test_every_request_whose_time_comes_is_sent_and_counted() -> None:
    with load_target(lambda asked: Answer(delay_s=0.05)) as target:
        outcomes = run(target.url, 200, 0.5, arrivals="constant")
        asked = target.asked["POST /v2/models/m/infer"]
    assert outcomes.requests == asked == 100
    assert not outcomes.errors
    assert outcomes.waited == 0
    assert len(outcomes.behind_s) == len(outcomes.lateness_s) == 100
    assert min(outcomes.latencies_s) >= 0.05
    # The last answer came after the sending ended: a rate is of the whole time.
    assert outcomes.elapsed_s > 0.5
    assert outcomes.requests_per_s == pytest.approx(100 / outcomes.elapsed_s)


@pytest.mark.slow
def test_a_stall_is_charged_to_all_that_should_have_come_meanwhile() -> None:
    began_s: list[float] = []

    def stall(asked: Asked) -> Answer:
        """From the first request on nothing is answered for a second."""
        began_s.append(time.perf_counter())
        return Answer(delay_s=max(0.0, began_s[0] + 1.0 - time.perf_counter()))

    with load_target(stall) as target:
        outcomes = run(target.url, 100, 1.0, arrivals="constant", max_connections=1)
    # A closed loop would have seen one slow request. Here request i waits 1 s - i / 100 s, though it was sent late.
    assert outcomes.requests == 100
    assert not outcomes.errors
    assert outcomes.waited >= 90
    for place, latency_s in enumerate(sorted(outcomes.latencies_s, reverse=True)[:90]):
        assert latency_s >= 0.995 - place / 100
    assert max(outcomes.lateness_s) >= 0.9
    assert sum(late_s > 0.4 for late_s in outcomes.lateness_s) >= 50


def test_more_connections_let_them_go_in_time() -> None:
    with load_target(lambda asked: Answer(delay_s=0.3)) as target:
        outcomes = run(target.url, 100, 0.3, arrivals="constant", max_connections=100)
    assert outcomes.waited == 0
    assert outcomes.requests == 30


def test_what_waits_too_long_for_a_connection_has_failed() -> None:
    with load_target(lambda asked: Answer(says_nothing=True)) as target:
        outcomes = run(target.url, 50, 0.5, arrivals="constant", max_connections=2, timeout_s=0.3)
    assert outcomes.requests == 25
    assert outcomes.answers == 0
    assert set(outcomes.errors) <= {
        Fault("timeout", None, "no connection was free in time"),
        Fault("timeout", None, "no whole answer in time"),
    }


def test_a_server_that_is_not_there_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.cli.bench.closed_loop.GONE_AFTER_S", 0.3)
    with load_target(lambda asked: Answer()) as target:
        target.stop()
        outcomes = run(target.url, 50, 60)
    assert outcomes.ended.startswith("no connection could be made")
    assert {fault.kind for fault in outcomes.errors} == {"connect"}


def test_a_stopped_run_has_what_was_measured_until_then() -> None:
    async def stopped(target: LoadTarget) -> Outcomes:
        stop = asyncio.Event()
        job = Job(RequestSet(target.url, "m", (Body(b"{}"),)), Load(rate_per_s=100), 60, 0)
        running = asyncio.create_task(open_loop(job, stop))
        await asyncio.to_thread(wait_for, lambda: target.asked.get("POST /v2/models/m/infer", 0) >= 10)
        stop.set()
        return await running

    with load_target(lambda asked: Answer(delay_s=0.01)) as target:
        outcomes = asyncio.run(stopped(target))
    assert outcomes.answers > 0
    assert not outcomes.errors
    assert 0 < outcomes.elapsed_s < 60


def test_a_timer_rings_at_its_last_time_and_never_before() -> None:
    async def rung() -> list[float]:
        rings: list[float] = []
        done = asyncio.Event()

        def ring() -> None:
            rings.append(time.perf_counter())
            done.set()

        timer = PreciseTimer(ring)
        try:
            timer.set(time.perf_counter() + 30)
            wanted = time.perf_counter() + 0.05
            timer.set(wanted)
            await asyncio.wait_for(done.wait(), 10)
            timer.set(0)  # long ago
            done.clear()
            await asyncio.wait_for(done.wait(), 10)
        finally:
            timer.close()
        return [wanted, *rings]

    wanted, first, second = asyncio.run(rung())
    assert wanted <= first <= second
