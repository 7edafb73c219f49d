"""No single request of a key pauses another key's stream, delays health, or leaves the server larger."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hostile.table import HOSTILE, TOGETHER, Hostile, Together
from tests.hostile.watch import MEMORY_BYTES, Target, measure, send_all, serve_target

ATTEMPTS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with serve_target(tmp_path_factory.mktemp("hostile")) as target:
        yield target


@pytest.mark.parametrize(("hostile", "size"), [(each, size) for each in HOSTILE for size in each.sizes], ids=str)
def test_a_hostile_request_harms_only_itself(target: Target, hostile: Hostile, size: int) -> None:
    harm = measure(target, hostile, size, attempts=ATTEMPTS)
    assert not harm.faults


@pytest.mark.parametrize("together", TOGETHER, ids=str)
def test_many_large_bodies_at_once_leave_the_server_no_larger(target: Target, together: Together) -> None:
    before = target.memory_bytes()
    processes = target.processes()
    statuses = send_all(target, together.request(), together.count, missing=together.missing)
    assert statuses <= together.statuses
    assert target.grown_bytes(before) <= MEMORY_BYTES
    assert target.processes() == processes
