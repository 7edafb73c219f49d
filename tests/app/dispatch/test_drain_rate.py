"""How fast a queue drains."""

from __future__ import annotations

import pytest

from headwater_server.dispatch.admission import DrainRate


def test_it_is_unknown_until_rows_left_behind_which_others_waited() -> None:
    rate = DrainRate()
    assert rate.seconds_for(10) is None
    rate.note(4, 1.0, others_wait=True)
    assert rate.seconds_for(10) is None
    rate.note(4, 1.5, others_wait=True)
    assert rate.seconds_for(16) == pytest.approx(2)


def test_all_replicas_count() -> None:
    rate = DrainRate()
    for second in range(10):
        for _ in range(3):  # at once
            rate.note(8, float(second), others_wait=True)
    assert rate.seconds_for(240) == pytest.approx(10, rel=0.15)


def test_time_without_a_queue_does_not_count() -> None:
    rate = DrainRate()
    rate.note(1, 0.0, others_wait=True)
    rate.note(1, 0.1, others_wait=False)
    rate.note(1, 100.0, others_wait=True)
    rate.note(1, 100.1, others_wait=True)
    assert rate.seconds_for(10) == pytest.approx(1)


def test_neither_does_time_after_what_waited_was_cancelled() -> None:
    rate = DrainRate()
    rate.note(1, 0.0, others_wait=True)
    rate.note(1, 0.1, others_wait=True)
    rate.note_empty()
    rate.note(1, 100.0, others_wait=True)
    assert rate.seconds_for(10) == pytest.approx(1)


def test_what_is_now_outweighs_what_was() -> None:
    rate = DrainRate()
    for tick in range(100):
        rate.note(10, tick * 0.1, others_wait=True)
    for tick in range(100):
        rate.note(1, 10 + tick * 0.3, others_wait=True)
    assert rate.seconds_for(10) == pytest.approx(3, rel=0.2)
