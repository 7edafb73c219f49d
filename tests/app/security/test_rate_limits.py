"""The limits of a key, over several workers."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from headwater_server.errors import RateLimited
from headwater_server.security.keys import Key
from headwater_server.security.rate_limits import KeyLimits, LimitFiles

DIGEST = "0" * 64


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def a_key(**limits: Any) -> Key:
    return Key("a", DIGEST, ("infer",), **limits)


def workers(folder: Path, clock: Clock, count: int = 2, **limits: Any) -> list[KeyLimits]:
    """The same key's limits in several workers."""
    return [KeyLimits(a_key(**limits), folder / "key", index, count, clock) for index in range(count)]


def refusal(limits: KeyLimits) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        limits.enter()
    return caught.value


def test_a_second_takes_its_requests_whichever_worker_has_them(tmp_path: Path, clock: Clock) -> None:
    one, two = workers(tmp_path, clock, requests_per_second=4)
    for limits in (one, two, one, one):
        limits.enter()
    error = refusal(two)
    assert error.retry_after_s == 1
    assert "4 requests a second (requests_per_second)" in error.message
    clock.now_s += 0.25
    two.enter()
    refusal(one)
    clock.now_s += 100
    for _ in range(4):
        one.enter()
    refusal(one)


def test_over_any_time_no_more_than_the_rate_and_one_second_pass(tmp_path: Path, clock: Clock) -> None:
    (limits,) = workers(tmp_path, clock, 1, requests_per_second=10)
    passed = 0
    for _ in range(1000):
        try:
            limits.enter()
            passed += 1
        except RateLimited:
            pass
        clock.now_s += 0.01
    assert 100 <= passed <= 110


def test_less_than_one_a_second_says_how_long_to_wait(tmp_path: Path, clock: Clock) -> None:
    (limits,) = workers(tmp_path, clock, 1, requests_per_second=0.1)
    limits.enter()
    assert refusal(limits).retry_after_s == 10
    clock.now_s += 7.5
    assert refusal(limits).retry_after_s == 3
    clock.now_s += 2.5
    limits.enter()


def test_so_many_at_once_whichever_worker_has_them(tmp_path: Path, clock: Clock) -> None:
    one, two = workers(tmp_path, clock, concurrent=2)
    one.enter()
    two.enter()
    for limits in (one, two):
        assert "at most 2 requests at once (concurrent)" in refusal(limits).message
    one.leave()
    two.enter()
    refusal(one)


def test_what_is_refused_takes_nothing(tmp_path: Path, clock: Clock) -> None:
    (limits,) = workers(tmp_path, clock, 1, requests_per_second=2, concurrent=1)
    limits.enter()
    for _ in range(10):
        refusal(limits)
    limits.leave()
    limits.enter()  # the second of the two of this second


def test_what_a_worker_had_under_way_ends_with_it(tmp_path: Path, clock: Clock) -> None:
    one, two = workers(tmp_path, clock, concurrent=2)
    one.enter()
    two.enter()
    again = KeyLimits(a_key(concurrent=2), tmp_path / "key", 0, 2, clock)  # in the place of the first
    again.enter()
    refusal(two)


def test_tokens_are_paid_afterwards_and_an_overdraft_is_made_good(tmp_path: Path, clock: Clock) -> None:
    one, two = workers(tmp_path, clock, tokens_per_minute=60)
    one.check_tokens()
    one.spend_tokens(59)
    two.check_tokens()
    two.spend_tokens(11)
    with pytest.raises(RateLimited, match="60 tokens a minute") as caught:
        one.check_tokens()
    assert caught.value.retry_after_s == 10
    one.enter()  # other requests go on
    clock.now_s += 10.5
    two.check_tokens()


def test_without_a_limit_of_tokens_none_are_counted(tmp_path: Path, clock: Clock) -> None:
    (limits,) = workers(tmp_path, clock, 1, concurrent=1)
    limits.spend_tokens(1_000_000)
    limits.check_tokens()


def test_a_worker_that_is_stopped_in_the_middle_holds_nobody_up(tmp_path: Path, clock: Clock) -> None:
    (limits,) = workers(tmp_path, clock, 1, concurrent=1)
    handle = os.open(tmp_path / "key", os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        limits.enter()
        refusal(limits)
    finally:
        os.close(handle)


def test_a_key_that_comes_back_finds_what_it_has_under_way(tmp_path: Path) -> None:
    files = LimitFiles(tmp_path / "limits", 0, 1)
    assert files.of(Key("b", "1" * 64, ("infer",))) is None
    before = files.of(a_key(concurrent=1))
    assert before is not None
    before.enter()
    after = files.of(a_key(concurrent=2))
    assert after is before
    after.enter()
    refusal(after)


def test_the_files_are_for_this_user_only(tmp_path: Path) -> None:
    held = LimitFiles(tmp_path / "limits", 0, 1).of(a_key(concurrent=1))
    assert held is not None
    (file,) = (tmp_path / "limits").iterdir()
    assert (tmp_path / "limits").stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600
