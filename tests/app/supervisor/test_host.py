"""How long to wait before a process is started again."""

from __future__ import annotations

from app.supervisor.host import Backoff


def test_it_doubles_up_to_a_bound_and_begins_anew_after_a_process_that_lived_long() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [backoff.after(61), backoff.after(1)] == [0.5, 1]
