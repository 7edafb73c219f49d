"""Batching and the way back, against a replica that the test answers for."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from headwater.datatypes import pack_bytes, unpack_bytes
from headwater.signature import Signature, TensorSpec
from headwater.wire.report import CallNote, RowReport, Status
from headwater_server.codecs.tensors import RawTensor
from headwater_server.control.routing import State
from headwater_server.dispatch.admission import QueueBudget
from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    DeadlineExceeded,
    QueueFull,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from tests.app.dispatch.stand_in import NUMBERS, Bench, Call, numbers, settle
from tests.counted import count_from_zero, counts_of, requests_of

TEXTS = Signature(
    name="m", inputs=(TensorSpec("t", "BYTES", (1,)),), outputs=(TensorSpec("t", "BYTES", (1,)),), max_batch_size=4
)


async def test_a_request_to_an_idle_replica_leaves_at_once() -> None:
    bench = Bench()
    task = bench.send(1)
    await settle()
    assert bench.calls[0].values == [1]
    bench.calls[0].answer()
    assert numbers(await task) == [2]


async def test_requests_that_arrive_together_go_together() -> None:
    bench = Bench()
    tasks = [bench.send(1), bench.send(2, 3)]
    await settle()
    assert [call.values for call in bench.calls] == [[1, 2, 3]]
    bench.calls[0].answer()
    assert [numbers(await task) for task in tasks] == [[2], [4, 6]]


async def test_rows_gather_while_the_replica_is_busy() -> None:
    bench = Bench(max_in_flight=1)
    bench.send(0)
    await settle()
    tasks = [bench.send(value) for value in (1, 2, 3)]
    await settle()
    assert len(bench.calls) == 1
    bench.calls[0].answer()
    await settle()
    assert bench.calls[1].values == [1, 2, 3]
    bench.calls[1].answer()
    assert [numbers(await task) for task in tasks] == [[2], [4], [6]]


async def test_calls_that_triton_merged_count_as_one() -> None:
    count_from_zero()
    bench = Bench(max_in_flight=2, replicas=2)
    tasks = [bench.send(1)]
    await settle()
    tasks.append(bench.send(2))
    await settle()
    for call, is_merged in zip(bench.calls, (False, True), strict=True):
        call.answer(is_merged=is_merged)
    assert [numbers(await task) for task in tasks] == [[2], [4]]
    assert requests_of("m") == (2, 2, 1, 0)
    assert counts_of("m").statistics("headwater_batches") == [("1", [1, 5000])]


async def test_a_replica_that_reported_rows_of_other_workers_comes_after_others() -> None:
    bench = Bench(replicas=2)
    first, second = bench.replicas.values()
    tasks = [bench.send(1)]
    await settle()
    first.calls[0].answer(held_rows=4)
    await tasks[0]
    tasks.append(bench.send(2))
    await settle()
    assert [len(one.calls) for one in (first, second)] == [1, 1]
    second.calls[0].answer(held_rows=1)  # its own
    await tasks[1]
    tasks.append(bench.send(3))
    await settle()
    assert [len(one.calls) for one in (first, second)] == [1, 2]


async def test_rows_of_this_workers_own_calls_are_not_those_of_others() -> None:
    bench = Bench(msgspec.structs.replace(NUMBERS, max_batch_size=2), max_in_flight=3)
    (replica,) = bench.connected
    tasks = [bench.send(1)]
    await settle()
    tasks += [bench.send(2, 3), bench.send(4, 5)]
    await settle()
    for call in bench.calls:  # merged by Triton; the first answers to arrive make room, but were there
        call.answer(held_rows=5)
        await settle()
        assert replica.others == 0
    await asyncio.gather(*tasks)


async def test_a_model_of_coroutines_gets_a_call_for_each_request_up_to_its_bound() -> None:
    bench = Bench(msgspec.structs.replace(NUMBERS, overlaps=True), max_in_flight=3)
    answers = []
    for number in range(5):
        answers.append(bench.send(number))
        await settle()
    assert [call.rows for call in bench.calls] == [1, 1, 1]
    assert bench.dispatcher.moment().computing == 3
    bench.calls[1].answer()
    await settle()
    assert [call.rows for call in bench.calls] == [1, 1, 1, 2]
    for call in (bench.calls[0], *bench.calls[2:]):
        call.answer()
    await asyncio.gather(*answers)


async def test_a_busy_replica_gets_another_call_when_a_batch_is_full() -> None:
    bench = Bench(max_in_flight=2)
    bench.send(0)
    await settle()
    for value in range(3):
        bench.send(value)
    await settle()
    assert len(bench.calls) == 1
    bench.send(9)
    await settle()
    assert [call.rows for call in bench.calls] == [1, 4]


@pytest.mark.parametrize(
    ("full", "has", "least"), [(64, 1, 16), (64, 20, 20), (64, 64, 64), (32, 1, 8), (16, 1, 8), (8, 1, 8), (4, 1, 4)]
)
async def test_a_busy_replica_gets_as_many_rows_as_it_has_and_no_few_ones(full: int, has: int, least: int) -> None:
    bench = Bench(msgspec.structs.replace(NUMBERS, max_batch_size=full), max_in_flight=2)
    for value in range(has):
        bench.send(value)
    await settle()
    for value in range(least - 1):
        bench.send(value)
    await settle()
    assert [call.rows for call in bench.calls] == [has]
    bench.send(0)
    await settle()
    assert [call.rows for call in bench.calls] == [has, least]


async def test_rows_wait_for_company_as_long_as_the_delay_says() -> None:
    bench = Bench(max_queue_delay_ms=60_000)
    tasks = [bench.send(value) for value in range(3)]
    await settle()
    assert bench.calls == []
    tasks.append(bench.send(3))
    await settle()
    assert [call.rows for call in bench.calls] == [4]


async def test_a_delay_ends_by_itself() -> None:
    bench = Bench(max_queue_delay_ms=5)
    task = bench.send(1)
    await asyncio.wait_for(bench.replicas["m-0"].called.wait(), 10)
    bench.calls[0].answer()
    assert numbers(await task) == [2]


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
@pytest.mark.parametrize("delay_ms", [0.3, 1, 2, 2.4, 5])
async def test_delays_end_on_the_event_loop_that_serves_too(delay_ms: float) -> None:
    # uvloop counts timers in whole milliseconds, and gives a handle of another class for those that round to none.
    bench = Bench(max_queue_delay_ms=delay_ms)
    replica = bench.replicas["m-0"]
    for value in range(30):
        task = bench.send(value)
        await asyncio.wait_for(replica.called.wait(), 10)
        replica.called.clear()
        replica.calls[-1].answer()
        assert numbers(await task) == [value * 2]


async def test_a_large_request_is_split_and_its_parts_joined_in_order() -> None:
    bench = Bench(max_in_flight=8)
    task = bench.send(*range(10))
    await settle()
    assert [call.rows for call in bench.calls] == [4, 4]
    for call in reversed(bench.calls):
        call.answer()
    await settle()
    bench.calls[-1].answer()
    outputs = await task
    assert numbers(outputs) == [value * 2 for value in range(10)]
    assert outputs["y"].shape == (10, 1)


async def test_the_replica_with_fewest_outstanding_rows_is_next() -> None:
    bench = Bench(replicas=2, max_in_flight=4)
    bench.send(1, 2)
    await settle()
    bench.send(3)
    await settle()
    assert [[call.rows for call in replica.calls] for replica in bench.replicas.values()] == [[2], [1]]


async def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    bench = Bench(max_queue_size=3, max_in_flight=1)
    bench.send(0)
    await settle()
    bench.send(1, 2, 3)
    await settle()
    with pytest.raises(QueueFull) as caught:
        await bench.send(4)
    assert (caught.value.retry_after_s or 0) >= 1
    assert "3 of 3 rows wait" in caught.value.message


async def test_a_request_larger_than_the_queue_is_wrong_not_early() -> None:
    with pytest.raises(BadRequest, match="at most 3 rows"):
        await Bench(max_queue_size=3).send(*range(4))


async def test_rows_whose_deadline_passed_in_the_queue_are_not_computed() -> None:
    bench = Bench(max_in_flight=1)
    bench.send(0)
    await settle()
    late = bench.send(1, timeout_us=1000)
    kept = bench.send(2)
    with pytest.raises(DeadlineExceeded, match="waited in the queue"):
        await late
    assert bench.dispatcher.queued_rows == 1
    bench.calls[0].answer()
    await settle()
    assert bench.calls[1].values == [2]
    bench.calls[1].answer()
    assert numbers(await kept) == [4]


async def test_a_deadline_that_passes_during_the_call_answers_too() -> None:
    bench = Bench(timeout_s=0.005)
    with pytest.raises(DeadlineExceeded, match="while it was computed"):
        await bench.send(1)


async def test_rows_of_a_client_that_went_away_are_not_computed() -> None:
    bench = Bench(max_in_flight=1)
    bench.send(0)
    await settle()
    gone = bench.send(*range(6))
    await settle()
    gone.cancel()
    await settle()
    assert bench.dispatcher.queued_rows == 0
    bench.calls[0].answer()
    await settle()
    assert len(bench.calls) == 1


async def test_rows_that_fail_leave_their_neighbours_alone() -> None:
    bench = Bench()
    tasks = [bench.send(1), bench.send(2), bench.send(3, 4)]
    await settle()
    bench.calls[0].answer(
        [
            RowReport(Status.OK),
            RowReport(Status.RAISED, "ValueError: no"),
            RowReport(Status.OK),
            RowReport(Status.BAD_INPUT, "x: wrong"),
        ]
    )
    assert numbers(await tasks[0]) == [2]
    with pytest.raises(CallableFailed, match=r"^ValueError: no$"):
        await tasks[1]
    with pytest.raises(BadRequest, match=r"^row 1: x: wrong$"):
        await tasks[2]


async def test_a_replica_that_is_taken_away_fails_its_calls_and_what_waits() -> None:
    bench = Bench(max_in_flight=1)
    running = bench.send(0)
    await settle()
    waiting = bench.send(1)
    await settle()
    route = msgspec.structs.replace(bench.route, replicas=(), state=State.UNAVAILABLE, reason="killed")
    bench.dispatcher.update(route)
    with pytest.raises(ReplicaLost):
        await running
    with pytest.raises(Unavailable, match="UNAVAILABLE: killed"):
        await waiting
    with pytest.raises(Unavailable) as caught:
        await bench.send(2)
    assert caught.value.retry_after_s


async def test_what_waits_goes_to_the_replica_that_is_left() -> None:
    bench = Bench(replicas=2, max_in_flight=1)
    tasks = [bench.send(value) for value in (0,)]
    await settle()
    tasks.append(bench.send(1))
    await settle()
    tasks.append(bench.send(2))
    await settle()
    bench.dispatcher.update(msgspec.structs.replace(bench.route, replicas=bench.route.replicas[1:]))
    left = bench.replicas["m-1"]
    for value in (1, 0, 2):  # what was lost comes before what waits, but not before what is under way
        await settle()
        assert left.calls[-1].values == [value]
        left.calls[-1].answer()
    assert [numbers(await task) for task in tasks] == [[0], [2], [4]]


async def test_what_waits_is_answered_while_the_server_drains() -> None:
    bench = Bench(max_in_flight=1)
    tasks = [bench.send(*range(4)) for _ in range(3)]
    await settle()
    bench.dispatcher.is_draining = True
    for index in range(3):
        bench.calls[index].answer()
        await settle()
    assert [numbers(await task) for task in tasks] == [[0, 2, 4, 6]] * 3
    with pytest.raises(Unavailable, match="stopping"):
        await bench.send(1)


async def test_a_replica_that_was_lost_gets_no_more_calls() -> None:
    bench = Bench(replicas=2, max_in_flight=4)
    lost, left = bench.replicas.values()
    first = bench.send(1)
    await settle()
    lost.calls[0].answered.set_exception(ReplicaLost("gone"))
    await settle()
    left.calls[0].answer()
    assert numbers(await first) == [2]
    for value in range(5):
        task = bench.send(value)
        await settle()
        left.calls[-1].answer()
        assert numbers(await task) == [value * 2]
    assert len(lost.calls) == 1


async def test_rows_that_a_replica_never_had_go_to_another() -> None:
    bench = Bench(replicas=2, max_in_flight=4)
    gone, left = bench.replicas.values()
    task = bench.send(1, 2)
    await settle()
    gone.calls[0].answered.set_exception(ReplicaUnreachable("gone"))
    await settle()
    left.calls[0].answer()
    assert numbers(await task) == [2, 4]


async def test_rows_whose_only_replica_is_unreachable_wait_until_the_table_says_so() -> None:
    bench = Bench()
    task = bench.send(1)
    await settle()
    bench.calls[0].answered.set_exception(ReplicaUnreachable("gone"))
    await settle()
    assert not task.done()
    bench.dispatcher.update(msgspec.structs.replace(bench.route, replicas=(), state=State.UNAVAILABLE))
    with pytest.raises(Unavailable):
        await task


async def test_a_request_keeps_the_signature_it_was_checked_against() -> None:
    bench = Bench(max_in_flight=1)
    bench.send(0)
    await settle()
    task = bench.send(1)
    await settle()
    renamed = msgspec.structs.replace(NUMBERS, inputs=(TensorSpec("z", "FP32", (-1,)),))
    bench.dispatcher.update(msgspec.structs.replace(bench.route, signature=renamed))
    bench.calls[0].answer()
    await settle()
    assert bench.calls[1].head["inputs"][0]["name"] == "x"
    bench.calls[1].answer()
    assert numbers(await task) == [2]


async def test_an_unchanged_signature_stays_the_same_object() -> None:
    bench = Bench()
    copy = msgspec.json.decode(msgspec.json.encode(NUMBERS), type=Signature)
    bench.dispatcher.update(msgspec.structs.replace(bench.route, signature=copy))
    assert bench.dispatcher.signature is NUMBERS


async def test_parameters_per_batch_keep_requests_apart_and_those_per_row_follow_their_rows() -> None:
    bench = Bench(max_in_flight=9)
    bench.send(1, batch={"f": 1.0}, row={"o": 1})
    bench.send(2, 3, batch={"f": 1.0}, row={"o": 2})
    await settle()
    bench.send(4, batch={"f": 2.0}, row={"o": 3})
    await settle()
    assert bench.calls[0].note == CallNote(parameters={"f": 1.0}, rows={"o": [1, 2, 2]})
    bench.calls[0].answer()
    await settle()
    assert bench.calls[1].note == CallNote(parameters={"f": 2.0}, rows={"o": [3]})


async def test_texts_are_cut_where_their_rows_end() -> None:
    bench = Bench(TEXTS)
    tasks = [
        bench.send_tensor("t", RawTensor("BYTES", (len(texts), 1), pack_bytes(texts)))
        for texts in ([b"a"], [b"", b"long text"], [b"\xff\x00"])
    ]
    await settle()
    call = bench.calls[0]
    call.give({"t": RawTensor("BYTES", (4, 1), call.data)})
    answers = [await task for task in tasks]
    assert [bytes(answer["t"].data) for answer in answers] == [
        pack_bytes([b"a"]),
        pack_bytes([b"", b"long text"]),
        pack_bytes([b"\xff\x00"]),
    ]


async def test_rows_without_elements_travel_as_placeholders_and_come_back_empty() -> None:
    bench = Bench()
    task = bench.send_tensor("x", RawTensor("FP32", (2, 0), b""))
    await settle()
    call = bench.calls[0]
    assert call.shape == [2, 1]
    assert call.note.shapes == {"x": [2, 0]}
    call.answer([RowReport(Status.OK, '{"shapes":{"y":[2,0]}}')] * 2)
    assert (await task)["y"] == RawTensor("FP32", (2, 0), b"")


async def test_a_request_without_rows_is_answered_without_a_call() -> None:
    bench = Bench()
    outputs = await bench.send_tensor("x", RawTensor("FP32", (0, 7), b""))
    assert outputs["y"] == RawTensor("FP32", (0, 0), b"")
    assert bench.calls == []


async def test_statistics_count_requests_rows_and_calls() -> None:
    count_from_zero()
    bench = Bench()
    tasks = [bench.send(1), bench.send(2, 3)]
    await settle()
    bench.calls[0].answer()
    await asyncio.gather(*tasks)
    assert requests_of("m") == (2, 3, 1, 0)


# Rows of similar length


def lengths(call: Call) -> list[int]:
    return [len(row) for row in unpack_bytes(call.data)]


def echo(call: Call) -> None:
    call.give({"t": RawTensor("BYTES", tuple(call.shape), call.data)})


def send_texts(bench: Bench, *sizes: int, **fields: Any) -> asyncio.Task[dict[str, RawTensor]]:
    """A request with texts of these lengths."""
    data = pack_bytes([b"a" * size for size in sizes])
    return bench.send_tensor("t", RawTensor("BYTES", (len(sizes), 1), data), **fields)


async def test_rows_of_similar_length_go_together_if_padding_is_bounded() -> None:
    bench = Bench(TEXTS, max_in_flight=1, max_padding=0.25)
    send_texts(bench, 1)
    await settle()
    for size in (100, 2000, 104, 1900, 101, 99, 103):
        send_texts(bench, size)
    await settle()
    found: list[list[int]] = []
    while len(bench.calls) > len(found):
        call = bench.calls[-1]
        found.append(lengths(call))
        assert call.note.alone  # what the gateway keeps apart Triton must not merge
        echo(call)
        await settle()
    assert found == [[1], [100, 104, 101, 99], [2000, 1900], [103]]


async def test_of_a_request_with_several_rows_the_longest_counts() -> None:
    bench = Bench(TEXTS, max_in_flight=1, max_padding=0.25)
    send_texts(bench, 1)
    await settle()
    for sizes in ((3, 100), (3,), (100,), (1000, 5, 4, 4, 2)):  # the last is of two batches
        send_texts(bench, *sizes)
    await settle()
    found: list[list[int]] = []
    while len(bench.calls) > len(found):
        call = bench.calls[-1]
        found.append(lengths(call))
        echo(call)
        await settle()
    assert found == [[1], [3, 100, 100], [3, 2], [1000, 5, 4, 4]]


async def test_otherwise_rows_go_in_order_whatever_their_length() -> None:
    bench = Bench(TEXTS, max_in_flight=1)
    send_texts(bench, 1)
    await settle()
    for size in (100, 2000, 104, 1900, 101):
        send_texts(bench, size)
    await settle()
    echo(bench.calls[0])
    await settle()
    assert lengths(bench.calls[1]) == [100, 2000, 104, 1900]
    assert not bench.calls[1].note.alone


async def test_a_bound_of_padding_that_changes_counts_for_what_comes() -> None:
    bench = Bench(TEXTS, max_in_flight=1)
    send_texts(bench, 1)
    await settle()
    for size in (100, 2000):
        send_texts(bench, size)
    await settle()
    bench.dispatcher.update(msgspec.structs.replace(bench.route, max_padding=0.25))
    for size in (100, 2000):
        send_texts(bench, size)
    await settle()
    for number in range(3):
        echo(bench.calls[number])
        await settle()
    assert [lengths(call) for call in bench.calls] == [[1], [100, 2000], [100], [2000]]


# Admission


async def test_a_less_urgent_request_gives_way_with_all_its_parts() -> None:
    count_from_zero()
    bench = Bench(max_queue_size=8, max_in_flight=1)
    bench.send(0)
    await settle()
    patient = bench.send(*range(8), priority=10)
    await settle()
    urgent = bench.send(9, priority=1)
    with pytest.raises(QueueFull, match="took the place") as caught:
        await patient
    assert caught.value.retry_after_s == 1
    assert (counts_of("m").total("headwater_failures"), bench.dispatcher.queued_rows) == (1, 1)
    bench.calls[0].answer()
    await settle()
    bench.calls[1].answer()
    assert numbers(await urgent) == [18]


async def test_weights_of_the_deployment_order_what_waits_also_when_they_change() -> None:
    bench = Bench(max_in_flight=1, max_queue_size=100, priority_weights={1: 3, 10: 1})
    bench.send(0)
    await settle()
    for value in range(1, 17):
        bench.send(value, priority=1)
        bench.send(-value, priority=10)
    await settle()
    for _ in range(2):
        bench.calls[-1].answer()
        await settle()
    assert sorted(value < 0 for value in bench.calls[-1].values) == [False, False, False, True]
    bench.dispatcher.update(msgspec.structs.replace(bench.route, priority_weights={1: 1, 10: 3}))
    for _ in range(2):
        bench.calls[-1].answer()
        await settle()
    assert sorted(value < 0 for value in bench.calls[-1].values) == [False, True, True, True]


async def test_the_bound_of_all_deployments_is_shared() -> None:
    budget = QueueBudget(max_rows=4)
    greedy, quiet = (Bench(max_in_flight=1, budget=budget) for _ in range(2))
    computing = greedy.send(0)
    quiet.send(0)
    await settle()
    waiting = [greedy.send(value) for value in range(4)]
    await settle()
    assert budget.waiting.rows == 4
    with pytest.raises(QueueFull, match=r"server\.max_queue_size"):
        await greedy.send(5)
    quiet.send(1, 2)
    for task in waiting[2:]:
        with pytest.raises(QueueFull, match="took the place"):
            await task
    greedy.dispatcher.close()
    assert budget.waiting.rows == 2
    await asyncio.gather(computing, *waiting[:2], return_exceptions=True)


async def test_the_time_until_rows_may_come_again_is_that_of_all_replicas() -> None:
    loop = asyncio.get_running_loop()
    bench = Bench(replicas=2, max_in_flight=1, max_queue_size=400)
    now_s = loop.time()
    loop.time = lambda: now_s  # type: ignore[method-assign]
    bench.send(*range(400))
    await settle()
    bench.send(*range(8))
    await settle()
    for _ in range(5):  # two calls of four rows each half second
        now_s += 0.5
        for call in bench.calls:
            if not call.answered.done():
                call.answer()
        await settle()
    waiting = bench.dispatcher.queued_rows
    assert waiting == 360
    bench.send(*range(40))
    with pytest.raises(QueueFull) as caught:
        await bench.send(1)
    assert 22 <= (caught.value.retry_after_s or 0) <= 400 / 16


async def test_a_deadline_counts_waiting_and_computing_together() -> None:
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    loop.time = lambda: now_s  # type: ignore[method-assign]
    bench = Bench(max_in_flight=1, timeout_s=10)
    tasks = [bench.send(0)]
    await settle()
    tasks.append(bench.send(1))
    await settle()
    now_s += 6
    bench.calls[0].answer()
    await settle()
    assert numbers(await tasks[0]) == [0]
    assert len(bench.calls) == 2
    now_s += 3.9
    await settle()
    assert not tasks[1].done()
    now_s += 0.2
    with pytest.raises(DeadlineExceeded, match="of 10 s passed while it was computed"):
        await tasks[1]


async def test_large_tensors_go_inline_to_a_replica_that_cannot_open_the_workers_memory() -> None:
    bench = Bench()
    x = RawTensor("FP32", (1, 20_000), np.arange(20_000, dtype=np.float32).tobytes())
    first = bench.send_tensor("x", x)
    await settle()
    assert bench.calls[0].note.shared is not None
    assert bench.calls[0].shape == [1, 1]
    bench.calls[0].answer([RowReport(Status.UNSHARED, "PermissionError: no")])
    await settle()
    second = bench.send_tensor("x", x)
    assert bench.calls[1].note.shared is None
    assert bench.calls[1].data == x.data
    bench.calls[1].answer()
    assert np.frombuffer((await first)["y"].data, np.float32)[-1] == 2 * 19_999
    await settle()
    assert bench.calls[2].note.shared is None
    bench.calls[2].answer()
    await second
