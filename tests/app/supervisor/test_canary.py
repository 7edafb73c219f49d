"""When a version loses its share of the requests by itself."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater_server.config.sections import RollbackRule, Traffic
from headwater_server.control.load import Tally
from headwater_server.supervisor.canary import WINDOW_S, Canaries, Comparison
from headwater_server.supervisor.states import VersionsState
from headwater_server.telemetry.catalogue import ALL_SERIES, VERSION_TIMES
from tests.app.supervisor.stand_in import Supervisor

BOUNDS_MS = np.array(ALL_SERIES[VERSION_TIMES].bounds) / 1e6
BUCKETS = len(BOUNDS_MS) + 1
MS_1, MS_2, MS_8 = (bisect_left(BOUNDS_MS, ms) for ms in (1, 2, 8))
"""Buckets whose upper bounds are so many milliseconds."""


def comparison(**rule: Any) -> Comparison:
    given = RollbackRule.model_validate({"min_requests": 100, **rule})
    return Comparison(Traffic.model_validate({"1": 0.9, "2": 0.1, "default": "1"}), given)


def tally(ok: int, failed: int = 0, *, slow: int = 0, bucket: int = MS_1, slow_bucket: int = MS_8) -> Tally:
    times = [0] * BUCKETS
    times[bucket] += ok - slow
    times[slow_bucket] += slow
    return Tally("", ok + failed, failed, times)


NOTHING = {"1": tally(0), "2": tally(0)}


def verdict(default: Tally, version: Tally, **rule: Any) -> tuple[str, str] | None:
    """After a second with this much."""
    compared = comparison(**rule)
    assert compared.verdict(100.0, NOTHING) is None
    return compared.verdict(101.0, {"1": default, "2": version})


def test_a_version_whose_requests_fail_more_often_than_so_many_times_the_default_s() -> None:
    assert verdict(tally(990, 10), tally(97, 3)) == ("2", "3 % of its requests failed, 1 % of the default's")
    assert verdict(tally(990, 10), tally(98, 2)) is None
    assert verdict(tally(990, 10), tally(97, 3), errors=4) is None


def test_parts_are_told_in_plain_digits() -> None:
    assert verdict(tally(1000), tally(0, 100)) == ("2", "100 % of its requests failed, 0 % of the default's")
    assert verdict(tally(1000), tally(359, 15)) == ("2", "4.01 % of its requests failed, 0 % of the default's")


def test_a_part_below_one_in_min_requests_counts_as_that() -> None:
    assert verdict(tally(1000), tally(98, 2)) is None
    assert verdict(tally(1000), tally(97, 3)) is not None


@pytest.mark.parametrize(("slow_bucket", "is_worse"), [(MS_2 + 1, True), (MS_8, True), (MS_2, False), (MS_1, False)])
def test_a_version_that_is_surely_so_many_times_slower(slow_bucket: int, is_worse: bool) -> None:
    found = verdict(tally(1000), tally(200, slow=40, slow_bucket=slow_bucket))
    assert (found is not None) is is_worse
    if slow_bucket == MS_8:
        assert found == ("2", "its p99 is over 7.34 ms, that of the default at most 1 ms")


@pytest.mark.parametrize(("requests", "most"), [(100, 10), (1000, 32), (10_000, 188)])
def test_a_few_slow_requests_more_than_one_in_a_hundred_are_chance(requests: int, most: int) -> None:
    default = tally(10_000)
    assert verdict(default, tally(requests, slow=most)) is None
    assert verdict(default, tally(requests, slow=most + 1)) is not None


TIMES: Final[dict[str, Callable[[np.random.Generator, int], npt.NDArray[np.float64]]]] = {
    "constant": lambda random, count: np.full(count, 7.3),
    "uniform": lambda random, count: random.uniform(5, 15, count),
    "narrow": lambda random, count: 3 * random.gamma(4, 1, count),
    "exponential": lambda random, count: random.exponential(10, count),
    "lognormal": lambda random, count: 10 * random.lognormal(0, 1, count),
    "pareto": lambda random, count: 5 * (1 + random.pareto(3, count)),
    "with a slow part below the percentile": lambda random, count: np.where(random.random(count) < 0.007, 200.0, 5.0),
    "with a slow part beyond it": lambda random, count: np.where(random.random(count) < 0.05, 200.0, 5.0),
}
"""Latencies of requests in milliseconds, by what they look like."""
MANY: Final = 30_000
"""Enough requests of each version for all of these."""


def slowed(kind: str, seed: int, slowdown: float, factor: float, count: int = MANY) -> tuple[str, str] | None:
    """The verdict on a version that is so many times as slow as the default."""
    random = np.random.default_rng(seed)

    def answered(times_ms: npt.NDArray[np.float64]) -> Tally:
        buckets = np.bincount(np.searchsorted(BOUNDS_MS, times_ms), minlength=BUCKETS)
        return Tally("", len(times_ms), 0, buckets.tolist())

    draw = functools.partial(TIMES[kind], random)
    return verdict(answered(draw(count)), answered(slowdown * draw(count)), p99=factor)


SEEDS, FACTORS = st.integers(0, 2**32 - 1), st.floats(1, 10)


@pytest.mark.parametrize("kind", TIMES)
@settings(max_examples=25, deadline=None)
@given(SEEDS, FACTORS)
def test_one_half_slower_than_the_rule_allows_is_noticed_with_enough_requests(
    kind: str, seed: int, factor: float
) -> None:
    assert slowed(kind, seed, 1.5 * factor, factor) is not None


@pytest.mark.slow
@pytest.mark.parametrize("kind", TIMES)
@settings(max_examples=50, deadline=None)
@given(SEEDS, FACTORS, st.sampled_from([150, 1000, MANY]), st.booleans())
def test_one_just_as_slow_as_the_rule_allows_or_not_slower_at_all_stays(
    kind: str, seed: int, factor: float, count: int, is_slower: bool
) -> None:
    assert slowed(kind, seed, factor if is_slower else 1.0, factor, count) is None


@given(st.integers(0, 99), st.integers(0, 10_000), st.booleans())
def test_without_enough_requests_of_both_nothing_is_decided(few: int, failed: int, is_default: bool) -> None:
    many = tally(0, failed)
    one, other = (tally(few), many) if is_default else (many, tally(0, few))
    assert verdict(one, other) is None


@given(
    st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_versions_that_fail_alike_and_are_alike_fast_stay(news: list[tuple[float, int, int]], bucket: int) -> None:
    compared, now_s, one, other = comparison(), 0.0, tally(0), tally(0)
    for wait_s, more, less in news:
        now_s += wait_s
        one, other = one + tally(more, bucket=bucket), other + tally(less, bucket=bucket)
        assert compared.verdict(now_s, {"1": one, "2": other}) is None


@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=60), st.integers(0, 5000))
def test_a_regression_is_found_within_the_window_whatever_was_before(waits: list[float], before: int) -> None:
    """From then on every request to the version fails, 25 a second; the default has 225 a second."""
    compared, now_s = comparison(), 0.0
    one, other = tally(9 * before), tally(before)
    compared.verdict(now_s, {"1": one, "2": other})
    began_s = now_s
    while (found := compared.verdict(now_s, {"1": one, "2": other})) is None:
        assert now_s - began_s < WINDOW_S
        wait_s = waits[int(now_s) % len(waits)]
        now_s += wait_s
        one, other = one + tally(int(225 * wait_s)), other + tally(0, int(25 * wait_s))
    assert found[0] == "2"


def test_what_was_before_the_window_does_not_count() -> None:
    compared = comparison()
    compared.verdict(0.0, NOTHING)
    bad = {"1": tally(50), "2": tally(0, 99)}
    assert compared.verdict(1.0, bad) is None  # too few of both
    later = {"1": bad["1"] + tally(500), "2": bad["2"] + tally(150)}
    assert compared.verdict(WINDOW_S + 1.5, later) is None


async def test_a_version_that_fails_loses_its_share_and_the_state_says_why() -> None:
    traffic = {"1": 0.9, "2": 0.1, "rollback": {"min_requests": 100}}
    supervisor = Supervisor({"c": {"model": "m:C", "versions": {"1": {}, "2": {}}, "traffic": traffic}})
    await supervisor.start()
    tallies: dict[str, Tally] = {}
    canaries = Canaries(supervisor.deployments, lambda: tallies, supervisor.lifecycle.is_busy, supervisor)
    canaries.tick()
    tallies.update({"c.1": tally(1000), "c.2": tally(0, 100)})
    canaries.tick()
    state = supervisor.composites["c"]
    assert isinstance(state, VersionsState)
    assert state.config.shared_traffic.shares == {"1": 1.0, "2": 0.0}
    assert state.rolled_back == (
        "version `2` lost its share by itself: 100 % of its requests failed, 0 % of the default's (it had 10 %)"
    )
    assert state.reason.startswith(state.rolled_back)
    canaries.tick()
    assert not state.is_watched
