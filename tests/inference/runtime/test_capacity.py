"""How many rows fit at once, as learnt from calls that ran out of memory."""

from __future__ import annotations

import pytest

from headwater.runtime.capacity import HOLDS_S, Capacity


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its only element is the time."""
    now = [1000.0]
    monkeypatch.setattr("headwater.runtime.capacity.time.monotonic", lambda: now[0])
    return now


def test_a_limit_holds_for_rows_of_that_size_and_larger_ones_of_that_model() -> None:
    known = Capacity()
    known.learn("a", 32, 8, row_bytes=1000)
    assert [known.most("a", size) for size in (100, 511, 512, 1000, 1_000_000)] == [None, None, 8, 8, 8]
    assert known.most("b", 1000) is None


def test_of_several_limits_the_least_counts_and_none_rises() -> None:
    known = Capacity()
    known.learn("a", 32, 8, row_bytes=1000)
    known.learn("a", 8, 2, row_bytes=5000)
    known.learn("a", 8, 4, row_bytes=6000)
    assert [known.most("a", size) for size in (1000, 5000)] == [8, 2]


def test_the_operator_hears_of_each_change_and_of_the_end(clock: list[float]) -> None:
    heard: list[tuple[str, int]] = []
    known = Capacity(lambda text, rows: heard.append((text, rows)))
    known.learn("a", 32, 8)
    known.learn("b", 16, 4)
    known.learn("a", 32, 8)
    assert heard == [
        ("a: out of memory with 32 rows at once; computes at most 8 for 300 s", 8),
        ("b: out of memory with 16 rows at once; computes at most 4 for 300 s", 4),
    ]
    clock[0] += HOLDS_S
    assert known.most("a") is None
    assert heard[2:] == [("computes whole batches again, to see whether memory suffices now", 0)]


def test_the_operator_hears_the_least_limit_that_is_left_when_some_end(clock: list[float]) -> None:
    heard: list[tuple[str, int]] = []
    known = Capacity(lambda text, rows: heard.append((text, rows)))
    known.learn("a", 16, 4)
    clock[0] += 1
    known.learn("b", 32, 8)
    del heard[:]
    clock[0] += HOLDS_S - 1
    assert [known.most("b"), known.most("a"), known.most("b")] == [8, None, 8]
    assert heard == [("computes some larger batches again, to see whether memory suffices now", 8)]


def test_after_a_while_more_is_tried_again(clock: list[float]) -> None:
    known = Capacity()
    known.learn("a", 32, 8)
    clock[0] += HOLDS_S - 1
    assert known.most("a") == 8
    clock[0] += 1
    assert known.most("a") is None
