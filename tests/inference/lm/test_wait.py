"""When a wait is over, with a clock that the test holds."""

from __future__ import annotations

from headwater.lm.step_watch import Wait


def test_one_that_looks_when_told_ends_it_at_its_time() -> None:
    wait = Wait(100)
    assert wait.next_look(6) == 103
    assert not wait.is_over(103, 6)
    assert wait.next_look(6) == 106
    assert not wait.is_over(105.9, 6)
    assert wait.is_over(106, 6)


def test_one_that_was_paused_waits_for_half_the_time_more() -> None:
    wait = Wait(100)
    assert not wait.is_over(1000, 6)
    assert wait.next_look(6) == 1003
    assert not wait.is_over(1002.9, 6)
    assert wait.is_over(1003, 6)


def test_what_comes_begins_it_anew() -> None:
    wait = Wait(100)
    assert not wait.is_over(1000, 6)
    wait.restart(1001)
    assert wait.next_look(6) == 1004
    assert not wait.is_over(1008, 6)
    assert wait.is_over(1011, 6)
