"""A reload that allows smaller batches than before, while rows wait that were cut for larger ones."""

from __future__ import annotations

import msgspec
import numpy as np

from headwater_server.control.routing import ReplicaRoute
from headwater_server.errors import BadRequest, ReplicaLost, ReplicaUnreachable
from tests.app.dispatch.stand_in import (
    NUMBERS,
    STREAMING,
    Bench,
    FrameBench,
    expected_heads,
    head_numbers,
    numbers,
    settle,
)


def allow(bench: Bench | FrameBench, rows: int) -> None:
    """As after a reload with this ``max_batch_size``."""
    signature = bench.dispatcher.signature
    assert signature is not None
    smaller = msgspec.structs.replace(signature, max_batch_size=rows)
    bench.dispatcher.update(msgspec.structs.replace(bench.route, signature=smaller))


async def answer_all(bench: Bench) -> None:
    """Answer until nothing is under way any more."""
    for _ in range(50):
        for call in bench.calls:
            if not call.answered.done():
                call.answer()
        await settle()
    assert (bench.dispatcher.in_flight, bench.dispatcher.queued_rows) == (0, 0)


async def test_rows_that_wait_are_cut_for_the_batches_of_the_new_replicas() -> None:
    bench = Bench(max_in_flight=1)
    first = bench.send(1, 2)
    await settle()
    waiting = [bench.send(10, 11, 12, 13), bench.send(20, 21, 22, 23, 24, 25), bench.send(30)]
    await settle()
    assert [call.rows for call in bench.calls] == [2]
    route = msgspec.structs.replace(
        bench.route,
        signature=msgspec.structs.replace(NUMBERS, max_batch_size=3),
        replicas=(ReplicaRoute("m-9", "unix:", ""),),
        retiring=bench.route.replicas,
    )
    bench.dispatcher.update(route)
    assert bench.dispatcher.queued_rows == 4 + 6 + 1
    replica = bench.replicas["m-9"]
    answered = 0
    while not all(task.done() for task in waiting):
        await settle()
        for call in replica.calls[answered:]:
            assert call.rows <= 3
            call.answer()
        answered = len(replica.calls)
    for task, values in zip(waiting, ([10, 11, 12, 13], [20, 21, 22, 23, 24, 25], [30]), strict=True):
        y = task.result()["y"]
        assert y.shape == (len(values), 1)
        assert np.frombuffer(y.data, np.float32).tolist() == [2.0 * value for value in values]
    bench.calls[0].answer()
    assert (await first)["y"].shape == (2, 1)
    assert bench.dispatcher.queued_rows == 0


async def test_a_request_of_which_a_part_is_under_way_is_put_together_again() -> None:
    bench = Bench(max_in_flight=1)
    task = bench.send(1, 2, 3, 4, 5, 6, 7, 8, 9)  # 4, 4 and 1
    await settle()
    assert [call.values for call in bench.calls] == [[1, 2, 3, 4]]
    route = msgspec.structs.replace(bench.route, signature=msgspec.structs.replace(NUMBERS, max_batch_size=2))
    bench.dispatcher.update(route)
    answered = 0
    while not task.done():
        for call in bench.calls[answered:]:
            call.answer()
        answered = len(bench.calls)
        await settle()
    assert all(call.rows <= 2 for call in bench.calls[1:])
    assert np.frombuffer(task.result()["y"].data, np.float32).tolist() == [2.0 * value for value in range(1, 10)]


async def test_a_part_that_is_lost_is_the_one_that_is_computed_again() -> None:
    bench = Bench(replicas=2, max_in_flight=1)
    bench.send(-1)
    await settle()
    task = bench.send(1, 2, 3, 4, 5, 6, 7, 8, 9)  # 4, 4 and 1, the first of them under way
    await settle()
    allow(bench, 2)  # what waits: 1, 2 and 2
    bench.calls[0].answer()
    await settle()
    last = bench.calls[1]
    assert last.values == [9]
    last.answered.set_exception(ReplicaLost("gone"))
    await settle()
    await answer_all(bench)
    assert numbers(task.result()) == [2.0 * value for value in range(1, 10)]
    assert sum(call.values == [9] for call in bench.calls) == 2


async def test_a_batch_that_its_replica_never_had_is_cut_before_it_goes_to_another() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1, 2, 3, 4)
    await settle()
    allow(bench, 3)
    bench.calls[0].answered.set_exception(ReplicaUnreachable("gone"))
    await settle()
    assert [call.values for call in bench.calls[1:]] == [[1, 2, 3]]
    await answer_all(bench)
    assert numbers(task.result()) == [2, 4, 6, 8]


async def test_a_lost_batch_is_cut_before_it_is_computed_again() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1, 2, 3, 4)
    await settle()
    bench.calls[0].answered.set_exception(ReplicaLost("gone"))
    allow(bench, 3)
    await settle()
    left = bench.replicas["m-1"]
    assert [call.values for call in left.calls] == [[1, 2, 3]]
    left.calls[0].answer()
    await settle()
    assert [call.values for call in left.calls] == [[1, 2, 3], [4]]
    assert all(call.note.alone for call in left.calls)
    await answer_all(bench)
    assert numbers(task.result()) == [2, 4, 6, 8]


async def test_heads_that_have_answered_are_kept_when_the_others_are_cut() -> None:
    bench = FrameBench(replicas=2)
    task = bench.send(1, 2, 3, 4)
    await settle()
    bench.calls[0].answer("a")
    await settle()
    bench.calls[0].end(ReplicaLost("gone"))
    allow(bench, 3)
    await settle()
    for index in range(2):
        call = bench.replicas["m-1"].calls[index]
        assert call.wanted == ["b", "c"]
        call.answer("b", "c")
        call.end()
        await settle()
    assert head_numbers(await task) == expected_heads([1, 2, 3, 4], "abc")


async def test_a_stream_that_waits_with_more_rows_than_fit_is_refused() -> None:
    bench = FrameBench(STREAMING, max_in_flight=1)
    first = bench.stream(0)
    await settle()
    waiting = bench.stream(1, 2, 3, 4)
    await settle()
    allow(bench, 3)
    await waiting.task
    assert {type(piece.error) for piece in waiting.pieces} == {BadRequest}
    assert bench.dispatcher.queued_rows == 0
    first.task.cancel()
    bench.calls[0].end()
    await settle()
    assert len(bench.calls) == 1
