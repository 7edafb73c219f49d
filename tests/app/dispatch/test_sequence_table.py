"""The table of open sequences, and the turns of a sequence's requests, over several workers."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headwater_server.dispatch import sequence_table
from headwater_server.dispatch.sequence_table import SequenceRequest, SequenceTable
from headwater_server.errors import BadRequest, DeadlineExceeded, QueueFull

A = "models-1"


def request_of(id: int | str = 7) -> SequenceRequest:
    return SequenceRequest("m", id, is_start=False, is_end=False, has_state=True)


def test_too_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_table, "BUCKETS", 1)
    now = 0.0
    table = SequenceTable(clock=lambda: now)
    for id in range(1, sequence_table.WAYS + 1):
        table.begin("d", request_of(id), A)
    with pytest.raises(QueueFull, match="too many sequences"):
        table.begin("d", request_of(99), A)
    table.begin("d", request_of(1), A)  # it has its place
    now = sequence_table.IDLE_S + 1
    table.step("d", request_of(2), A)
    for id in range(100, 100 + sequence_table.WAYS - 1):
        table.begin("d", request_of(id), A)
    table.step("d", request_of(2), A)


def test_a_hundred_thousand_sequences() -> None:
    table = SequenceTable()
    for id in range(1, 100_001):
        table.begin("d", request_of(id), A)
    assert all(table.replica_of("d", request_of(id), {A: None}) == A for id in range(1, 100_001, 997))


@pytest.mark.parametrize("pids", [(1, 1), (1, os.getpid())], ids=["one worker", "two workers"])
async def test_requests_of_a_sequence_wait_for_each_other(tmp_path: Path, pids: tuple[int, int]) -> None:
    workers = [SequenceTable(tmp_path / "sequences", pid=pid) for pid in pids]
    first = request_of()
    async with workers[0].turn("d", first, 10):
        workers[0].begin("d", first, A)
    inside = 0

    async def ask(worker: SequenceTable) -> None:
        nonlocal inside
        async with worker.turn("d", request_of(), 10):
            inside += 1
            await asyncio.sleep(0)
            assert inside == 1
            inside -= 1

    await asyncio.gather(*(ask(workers[number % len(set(pids))]) for number in range(20)))


async def test_a_worker_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    ended, other = (SequenceTable(tmp_path / "sequences", pid=pid) for pid in (2**30, os.getpid()))
    ended.begin("d", request_of(), A)
    async with other.turn("d", request_of(), 10):
        pass


async def test_a_turn_has_a_deadline() -> None:
    table = SequenceTable()
    table.begin("d", request_of(), A)
    async with table.turn("d", request_of(), 10):
        with pytest.raises(DeadlineExceeded, match=r"0\.01 s passed while an earlier request of sequence 7"):
            async with table.turn("d", request_of(), 0.01):
                pass


async def test_a_turn_of_another_worker_has_a_deadline(tmp_path: Path) -> None:
    workers = [SequenceTable(tmp_path / "sequences", pid=pid) for pid in (1, os.getpid())]
    workers[0].begin("d", request_of(), A)
    async with workers[0].turn("d", request_of(), 10):
        with pytest.raises(DeadlineExceeded):
            async with workers[1].turn("d", request_of(), 0.01):
                pass


async def test_requests_that_begin_a_sequence_wait_for_each_other(tmp_path: Path) -> None:
    workers = [SequenceTable(tmp_path / "sequences", pid=pid) for pid in (1, os.getpid())]
    start = request_of()._replace(is_start=True)
    async with workers[0].turn("d", start, 10):
        with pytest.raises(DeadlineExceeded):
            async with workers[1].turn("d", start, 0.01):
                pass
        workers[0].begin("d", start, A)
    async with workers[1].turn("d", start, 10):
        pass


async def test_a_sequence_that_did_not_begin_is_not_known() -> None:
    table = SequenceTable()
    start = request_of()._replace(is_start=True)
    async with table.turn("d", start, 10):
        pass
    async with table.turn("d", start, 10):
        table.begin("d", start, A)
        table.take_back("d", start, 1)
    with pytest.raises(BadRequest, match="must specify the START flag"):
        table.step("d", request_of(), A)
