"""Replicas that are lost with requests: who is computed again, where, with whom, and who is refused."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.wire.frame import Piece
from headwater.wire.report import CallNote, RowReport, Status
from headwater_server.codecs.tensors import RawTensor
from headwater_server.control.messages import ReplicaLoss
from headwater_server.control.routing import ReplicaRoute, RoutingTable
from headwater_server.dispatch.dispatcher import ModelDispatcher
from headwater_server.errors import (
    CallableFailed,
    DeadlineExceeded,
    OutOfMemory,
    Quarantined,
    QueueFull,
    RateLimited,
    ReplicaLost,
    ReplicaUnreachable,
    SharedMemoryFull,
)
from headwater_server.gateway.models import Models
from tests.app.dispatch.stand_in import (
    NUMBERS,
    STREAMING,
    Bench,
    Call,
    FrameBench,
    expected_heads,
    head_numbers,
    numbers,
    pass_time,
    settle,
)
from tests.counted import count_from_zero, counts_of

GONE = "the replica ended"


def unanswered(bench: Bench) -> list[Call]:
    return [call for call in bench.calls if not call.answered.done()]


def lose(bench: Bench, id: str) -> None:
    """As when its process ends: every call that it has."""
    for call in bench.replicas[id].calls:
        if not call.answered.done():
            call.answered.set_exception(ReplicaLost(GONE))


def leave(bench: Bench | FrameBench, id: str) -> None:
    """As when the supervisor has taken note of a replica's end."""
    replicas = tuple(one for one in bench.route.replicas if one.id != id)
    bench.route = msgspec.structs.replace(bench.route, replicas=replicas)
    bench.dispatcher.update(bench.route)


def replace(bench: Bench, *ids: str, **route: Any) -> None:
    """As when the supervisor has taken note: these replicas are there now."""
    bench.route = msgspec.structs.replace(
        bench.route, replicas=tuple(ReplicaRoute(id, "unix:", "") for id in ids), **route
    )
    bench.dispatcher.update(bench.route)


async def test_each_request_of_a_lost_batch_is_computed_alone_by_another_replica() -> None:
    count_from_zero()
    bench = Bench(replicas=2, max_in_flight=2)
    tasks = [bench.send(1), bench.send(2, 3)]
    await settle()
    assert [call.values for call in bench.replicas["m-0"].calls] == [[1, 2, 3]]
    lose(bench, "m-0")
    await settle()
    left = bench.replicas["m-1"]
    assert [call.values for call in left.calls] == [[1]]
    assert left.calls[0].note == CallNote(alone=True)
    left.calls[0].answer()
    await settle()
    assert [call.values for call in left.calls] == [[1], [2, 3]]
    left.calls[1].answer()
    assert [numbers(await task) for task in tasks] == [[2], [4, 6]]
    assert counts_of("m").total("headwater_retries") == 2
    assert counts_of("m").total("headwater_failures") == 0


async def test_requests_that_do_not_fit_into_shared_memory_together_are_computed_alone() -> None:
    bench = Bench(replicas=1)
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    (together,) = bench.calls
    together.answered.set_exception(SharedMemoryFull("/dev/shm is full"))
    await settle()
    assert bench.calls[-1].values == [1]
    bench.calls[-1].answered.set_exception(SharedMemoryFull("/dev/shm is full"))
    await settle()
    assert bench.calls[-1].values == [2]
    bench.calls[-1].answer()
    with pytest.raises(SharedMemoryFull, match="/dev/shm is full"):
        await tasks[0]
    assert numbers(await tasks[1]) == [4]
    assert len(bench.calls) == 3


async def test_a_request_that_is_computed_alone_for_shared_memory_stays_alone_if_its_replica_never_had_it() -> None:
    bench = Bench(replicas=2, max_in_flight=1)
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    bench.calls[0].answered.set_exception(SharedMemoryFull("/dev/shm is full"))
    await settle()
    (alone,) = unanswered(bench)
    assert alone.values == [1]
    tasks += [bench.send(3)]
    await settle()
    tasks += [bench.send(value) for value in (4, 5)]  # they wait
    await settle()
    alone.answered.set_exception(ReplicaUnreachable(GONE))
    await settle()
    computed = []
    while calls := unanswered(bench):
        computed += [call.values for call in calls]
        for call in calls:
            call.answer()
        await settle()
    assert computed == [[3], [2], [1], [4, 5]]
    assert [numbers(await task) for task in tasks] == [[2], [4], [6], [8], [10]]


async def test_what_waits_for_shared_memory_is_not_told_that_a_replica_ended_with_it() -> None:
    bench = Bench()
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    bench.calls[0].answered.set_exception(SharedMemoryFull("/dev/shm is full"))
    await settle()
    lose(bench, "m-0")
    with pytest.raises(ReplicaLost, match=GONE):
        await tasks[0]
    with pytest.raises(ReplicaLost, match="model `m`: no replica is left that could compute the request"):
        await tasks[1]


async def test_others_have_every_second_turn_where_lost_requests_are_computed() -> None:
    bench = Bench(replicas=2, max_in_flight=2)
    tasks = [bench.send(value) for value in (1, 2)]
    await settle()
    tasks += [bench.send(3)]
    await settle()
    left = bench.replicas["m-1"]
    assert [call.values for call in left.calls] == [[3]]
    tasks += [bench.send(value) for value in (4, 5)]
    await settle()
    lose(bench, "m-0")
    await settle()
    assert len(left.calls) == 1  # what it has comes first
    for expected in ([1], [4, 5], [2]):
        left.calls[-1].answer()
        await settle()
        assert left.calls[-1].values == expected
    left.calls[-1].answer()
    assert [numbers(await task) for task in tasks] == [[2], [4], [6], [8], [10]]
    # And afterwards it is as before.
    more = [bench.send(1)]
    await settle()
    more += [bench.send(*range(4))]
    await settle()
    assert [call.rows for call in left.calls[-2:]] == [1, 4]
    for call in unanswered(bench):
        call.answer()
    await asyncio.gather(*more)


async def test_lost_requests_do_not_wait_for_a_busy_replica_where_one_is_idle() -> None:
    bench = Bench(replicas=3, max_in_flight=2)
    tasks = []
    for values in ((1,), (2,), (3, 4)):
        tasks.append(bench.send(*values))
        await settle()
    lose(bench, "m-0")
    await settle()
    assert bench.dispatcher.queued_rows == 1  # both others are busy
    bench.replicas["m-2"].calls[0].answer()
    await settle()
    assert [call.values for call in bench.replicas["m-2"].calls] == [[3, 4], [1]]
    for call in unanswered(bench):
        call.answer()
    assert [numbers(await task) for task in tasks] == [[2], [4], [6, 8]]


async def test_only_the_lost_part_of_a_large_request_is_computed_again() -> None:
    count_from_zero()
    bench = Bench(replicas=2, max_in_flight=1)
    task = bench.send(*range(8))
    await settle()
    assert [len(replica.calls) for replica in bench.replicas.values()] == [1, 1]
    bench.replicas["m-1"].calls[0].answer()
    lose(bench, "m-0")
    await settle()
    bench.replicas["m-1"].calls[1].answer()
    assert numbers(await task) == [value * 2 for value in range(8)]
    assert counts_of("m").total("headwater_retries") == 1


async def test_without_another_replica_it_is_an_error_at_once() -> None:
    bench = Bench()
    task = bench.send(1)
    await settle()
    lose(bench, "m-0")
    with pytest.raises(ReplicaLost, match=GONE):
        await task


async def test_what_waits_to_be_computed_again_fails_with_the_last_replica() -> None:
    bench = Bench(replicas=2)
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    lose(bench, "m-0")
    await settle()
    lose(bench, "m-1")
    await settle()
    leave(bench, "m-1")
    with pytest.raises(ReplicaLost, match="took two replicas down"):
        await tasks[0]
    with pytest.raises(ReplicaLost, match=GONE):
        await tasks[1]


async def test_a_model_that_is_not_idempotent_is_not_asked_twice() -> None:
    bench = Bench(msgspec.structs.replace(NUMBERS, idempotent=False), replicas=2)
    task = bench.send(1)
    await settle()
    lose(bench, "m-0")
    with pytest.raises(ReplicaLost):
        await task
    assert bench.replicas["m-1"].calls == []


async def test_a_deadline_goes_on_while_a_lost_request_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(replicas=2, max_in_flight=1)
    task = bench.send(1, timeout_us=10_000_000)
    await settle()
    bench.send(2)
    await settle()
    lose(bench, "m-0")
    await settle()
    pass_time(monkeypatch, 10)
    with pytest.raises(DeadlineExceeded, match="waited in the queue"):
        await task
    bench.replicas["m-1"].calls[0].answer()
    await settle()
    assert len(bench.calls) == 2
    assert bench.dispatcher.queued_rows == 0


async def test_a_lost_request_that_its_replica_never_had_a_second_time_is_not_charged() -> None:
    bench = Bench(replicas=3)
    task = bench.send(1)
    await settle()
    lose(bench, "m-0")
    await settle()
    bench.replicas["m-1"].calls[0].answered.set_exception(ReplicaUnreachable(GONE))
    await settle()
    bench.replicas["m-2"].calls[0].answer()
    assert numbers(await task) == [2]


async def test_a_request_that_took_two_replicas_down_is_refused_until_a_reload() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1)
    await settle()
    lose(bench, "m-0")
    await settle()
    lose(bench, "m-1")
    await settle()
    leave(bench, "m-1")
    with pytest.raises(ReplicaLost, match="not tried again"):
        await task
    assert len(bench.quarantined) == 1
    replace(bench, "m-2", "m-3")
    with pytest.raises(Quarantined, match=r"took two replicas down, and is refused for another \d+ s") as caught:
        await bench.send(1)
    assert caught.value.status == 422
    other = bench.send(2)
    await settle()
    bench.replicas["m-2"].calls[0].answer()
    assert numbers(await other) == [4]

    replace(bench, "m-4", generation=1)
    again = bench.send(1)
    await settle()
    bench.replicas["m-4"].calls[0].answer()
    assert numbers(await again) == [2]


@pytest.mark.slow
async def test_a_request_is_not_told_that_it_took_replicas_down_which_are_still_there() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1)
    await settle()
    for id in ("m-0", "m-1"):  # both were out of order before
        lose(bench, id)
        await settle()
    with pytest.raises(ReplicaLost, match="two replicas could not answer the request"):
        await task
    again = bench.send(1)
    await settle()
    unanswered(bench)[0].answer()
    assert numbers(await again) == [2]


async def test_a_lost_replica_is_reported_with_the_keys_whose_requests_it_had() -> None:
    bench = Bench(replicas=2, max_in_flight=2)
    tasks = [bench.send(1, owner="a")]
    await settle()
    tasks.append(bench.send(2, owner="b"))
    await settle()
    bench.replicas["m-1"].calls[0].answered.set_exception(ReplicaUnreachable(GONE))
    await settle()
    lose(bench, "m-0")
    await settle()
    assert [(one.replica, one.keys) for one in bench.losses[:2]] == [("m-1", []), ("m-0", ["a"])]
    for task in tasks:
        task.cancel()

    bench = Bench(replicas=2)
    task = bench.send(1, owner="a")
    await settle()
    for id in ("m-0", "m-1"):
        lose(bench, id)
        await settle()
    leave(bench, "m-1")
    with pytest.raises(ReplicaLost, match="took two replicas down"):
        await task
    assert bench.losses == [
        ReplicaLoss("m", "m-0", ["a"]),
        ReplicaLoss("m", "m-1", ["a"]),
        ReplicaLoss("m", "m-1", convicted="a", earlier="m-0"),
    ]


async def test_the_supervisor_may_notice_first_that_a_replica_has_ended() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1, owner="a")
    await settle()
    leave(bench, "m-0")
    assert bench.losses == [ReplicaLoss("m", "m-0", ["a"])]
    lose(bench, "m-0")
    await settle()
    bench.replicas["m-1"].calls[0].answer()
    assert numbers(await task) == [2]
    leave(bench, "m-1")
    assert len(bench.losses) == 1


async def test_a_key_whose_requests_ended_too_many_replicas_is_refused_with_the_reason() -> None:
    bench = Bench(barred={"a": time.time() + 100}, max_crashes=7)
    with pytest.raises(RateLimited, match=r"requests of `a` ended 7 replicas of model `m` within 300 s") as refused:
        await bench.send(1, owner="a")
    assert refused.value.status == 429
    assert 90 < (refused.value.retry_after_s or 0) <= 100
    task = bench.send(1, owner="b")
    await settle()
    bench.calls[0].answer()
    assert numbers(await task) == [2]


async def test_what_another_worker_found_is_refused_here() -> None:
    first, second = Bench(replicas=2), Bench()
    task = first.send(1)
    await settle()
    lose(first, "m-0")
    await settle()
    lose(first, "m-1")
    await settle()
    leave(first, "m-1")
    with pytest.raises(ReplicaLost):
        await task
    second.dispatcher.quarantine(*first.quarantined)
    with pytest.raises(Quarantined):
        await second.send(1)


async def test_a_worker_tells_and_is_told_by_its_models() -> None:
    benches = [Bench(replicas=2), Bench()]
    told: list[tuple[str, bytes]] = []
    workers = []
    for bench in benches:
        models = Models(bench.connect)
        models.on_quarantined = lambda name, fingerprint: told.append((name, fingerprint))
        models.update(RoutingTable((bench.route,)))
        dispatcher = models.get("m").dispatcher
        assert isinstance(dispatcher, ModelDispatcher)
        bench.dispatcher.close()
        bench.dispatcher = dispatcher
        workers.append(models)
    task = benches[0].send(1)
    await settle()
    for id in ("m-0", "m-1"):
        lose(benches[0], id)
        await settle()
        leave(benches[0], id)
    with pytest.raises(ReplicaLost):
        await task
    (found,) = told
    workers[1].quarantine(*found)
    workers[1].quarantine("unknown", b"")
    with pytest.raises(Quarantined):
        await benches[1].send(1)


async def test_a_client_that_sends_it_again_takes_the_second_replica_down_and_no_third() -> None:
    bench = Bench()
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    lose(bench, "m-0")
    for task in tasks:
        with pytest.raises(ReplicaLost, match=GONE):
            await task
    replace(bench, "m-1")
    tasks = [bench.send(2), bench.send(1), bench.send(3)]
    await settle()
    left = bench.replicas["m-1"]
    assert [call.values for call in left.calls] == [[2]]  # suspected: alone
    left.calls[0].answer()
    await settle()
    assert left.calls[-1].values == [3]  # others' turn
    left.calls[-1].answer()
    await settle()
    assert left.calls[-1].values == [1]
    lose(bench, "m-1")
    await settle()
    leave(bench, "m-1")
    assert [numbers(await task) for task in (tasks[0], tasks[2])] == [[4], [6]]
    with pytest.raises(ReplicaLost, match="took two replicas down"):
        await tasks[1]
    replace(bench, "m-2")
    with pytest.raises(Quarantined):
        await bench.send(1)
    # The neighbour is free of suspicion.
    tasks = [bench.send(2), bench.send(4)]
    await settle()
    assert bench.replicas["m-2"].calls[0].values == [2, 4]


async def test_so_many_suspects_may_wait() -> None:
    bench = Bench(max_queue_size=2)
    task = bench.send(1)
    await settle()
    lose(bench, "m-0")
    with pytest.raises(ReplicaLost):
        await task
    replace(bench, "m-1")
    waiting = [bench.send(1) for _ in range(3)]
    await settle()
    waiting += [bench.send(1) for _ in range(2)]
    await settle()
    refused = [task for task in waiting if task.done()]
    assert len(refused) == 2
    for task in refused:
        with pytest.raises(QueueFull):
            await task
    assert bench.dispatcher.queued_rows == 2


async def test_rows_whose_device_failed_are_computed_by_another_replica() -> None:
    bench = Bench(replicas=2)
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    bench.replicas["m-0"].calls[0].answer([RowReport(Status.BROKEN, "assert")] * 2)
    await settle()
    left = bench.replicas["m-1"]
    left.calls[0].answer()
    assert numbers(await tasks[0]) == [2]
    await settle()
    left.calls[1].answer([RowReport(Status.BROKEN, "assert")])
    await settle()
    leave(bench, "m-1")
    with pytest.raises(ReplicaLost, match="took two replicas down"):
        await tasks[1]


async def test_a_failed_device_whose_batch_has_the_wrong_shape_gets_no_more_calls() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1)
    await settle()
    (call,) = bench.replicas["m-0"].calls
    call.give({"y": RawTensor("FP32", (3, 1), bytes(12))}, [RowReport(Status.BROKEN, "assert")])
    await settle()
    bench.replicas["m-1"].calls[0].answer()
    assert numbers(await task) == [2]
    task = bench.send(3)
    await settle()
    bench.replicas["m-1"].calls[1].answer()
    assert numbers(await task) == [6]


async def test_rows_that_do_not_fit_in_memory_have_an_error_of_their_own_and_are_not_retried() -> None:
    bench = Bench(replicas=2)
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    fault = RowReport(Status.OUT_OF_MEMORY, "out of memory on cuda:0 with 1 row alone")
    bench.replicas["m-0"].calls[0].answer([fault, RowReport(Status.OK)])
    with pytest.raises(OutOfMemory, match="out of memory on cuda:0 with 1 row alone") as raised:
        await tasks[0]
    assert (raised.value.status, raised.value.code) == (500, "out_of_memory")
    assert numbers(await tasks[1]) == [4]
    assert bench.replicas["m-1"].calls == []


async def test_a_failure_of_the_callable_clears_of_suspicion() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1)
    await settle()
    lose(bench, "m-0")
    await settle()
    bench.replicas["m-1"].calls[0].answer([RowReport(Status.RAISED, "ValueError")])
    with pytest.raises(CallableFailed):
        await task
    tasks = [bench.send(1), bench.send(2)]
    await settle()
    assert bench.replicas["m-1"].calls[-1].values == [1, 2]
    bench.replicas["m-1"].calls[-1].answer()
    await asyncio.gather(*tasks)


async def test_a_replica_that_is_taken_from_the_table_before_its_calls_end_is_as_lost() -> None:
    bench = Bench()
    task = bench.send(1)
    await settle()
    replace(bench)
    with pytest.raises(ReplicaLost):
        await task
    replace(bench, "m-1")
    task = bench.send(1)
    await settle()
    assert bench.calls[-1].note.alone
    bench.calls[-1].answer()
    assert numbers(await task) == [2]


async def test_an_end_of_the_server_makes_nobody_suspect() -> None:
    bench = Bench(replicas=2)
    task = bench.send(1)
    await settle()
    bench.dispatcher.close()
    with pytest.raises(ReplicaLost):
        await task
    assert bench.replicas["m-1"].calls == []
    assert len(bench.dispatcher._quarantine) == 0  # private: a closed dispatcher takes no request that it could suspect


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.lists(st.sampled_from(["answer", "lose", "come"]), max_size=40),
    st.integers(1, 3),
    st.randoms(use_true_random=False),
)
async def test_every_request_ends_once_and_is_computed_twice_at_most(
    sizes: list[int], events: list[str], replicas: int, chance: Any
) -> None:
    bench = Bench(replicas=replicas, max_in_flight=2)
    alive = [f"m-{index}" for index in range(replicas)]
    came = replicas
    value = 0
    sent = []
    for size in sizes:
        values = [float(value + row) for row in range(size)]
        value += size
        sent.append((bench.send(*values), values))
    await settle()
    for event in [*events, "come", *["answer"] * 200]:
        open_calls = [call for id in alive for call in bench.replicas[id].calls if not call.answered.done()]
        if event == "answer" and open_calls:
            chance.choice(open_calls).answer()
        elif event == "lose" and alive:
            id = chance.choice(alive)
            alive.remove(id)
            lose(bench, id)
            await settle()
            leave(bench, id)
            replace(bench, *alive)
        elif event == "come":
            alive.append(f"m-{came}")
            came += 1
            replace(bench, *alive)
        await settle()
    for task, values in sent:
        assert task.done()
        if task.exception() is None:
            assert numbers(task.result()) == [one * 2 for one in values]
    for number in range(value):
        assert sum(number in call.values for call in bench.calls) <= 2
    assert bench.dispatcher.in_flight == 0
    assert bench.dispatcher.queued_rows == 0
    assert [one for one in bench.connected if one.calls or one.rows or one.batches] == []


async def test_a_lost_request_does_not_wait_for_others_that_went_elsewhere() -> None:
    bench = Bench(replicas=3, max_in_flight=2)
    tasks = [bench.send(0)]
    await settle()
    lost = [bench.send(1), bench.send(2)]
    await settle()
    lose(bench, "m-1")
    await settle()
    aside = bench.replicas["m-2"]
    assert [call.values for call in aside.calls] == [[1]]
    # Others' turn comes as one of them does, and another replica is idle too.
    aside.calls[0].answer()
    bench.replicas["m-0"].calls[0].answer()
    tasks.append(bench.send(3))
    await settle()
    assert [call.values for call in unanswered(bench)] == [[3], [2]]
    for call in unanswered(bench):
        call.answer()
    assert [numbers(await task) for task in [*tasks, *lost]] == [[0], [6], [2], [4]]


async def test_what_nobody_waits_for_is_not_kept_to_be_computed_again() -> None:
    bench = Bench(replicas=2)
    tasks = [bench.send(value) for value in range(4)]
    await settle()
    lose(bench, "m-0")
    await settle()
    for task in tasks[1:3]:
        task.cancel()
    await settle()
    # private: `queued_rows` leaves out what is kept of requests that have ended
    assert len(bench.dispatcher._retries._waiting) == 1
    for value in (0, 3):
        assert bench.calls[-1].values == [value]
        bench.calls[-1].answer()
        await settle()
    assert not bench.dispatcher._retries  # private: a replica that stays set aside is in no count


async def test_a_replica_that_is_taken_from_the_table_gets_no_lost_request() -> None:
    bench = Bench(replicas=3, max_queue_delay_ms=60_000)
    lost = [bench.send(1, 2), bench.send(3, 4)]
    await settle()
    lose(bench, "m-0")
    await settle()
    other = bench.send(5)
    await settle()
    bench.replicas["m-1"].calls[0].answer()  # now it is others' turn, who wait for company
    await settle()
    assert unanswered(bench) == []
    replace(bench, "m-2")
    await settle()
    assert [call.values for call in bench.replicas["m-2"].calls] == [[3, 4]]
    bench.calls[-1].answer()
    assert [numbers(await task) for task in lost] == [[2, 4], [6, 8]]
    other.cancel()
    await settle()
    assert bench.dispatcher.queued_rows == 0


# Pipelines and streams


def lose_frames(bench: FrameBench, id: str) -> None:
    for call in bench.replicas[id].calls:
        if not call.is_left:
            call.end(ReplicaLost(GONE))


async def test_heads_that_have_answered_are_kept_and_the_others_computed_by_another_replica() -> None:
    bench = FrameBench(replicas=2)
    task = bench.send(1, 2)
    await settle()
    first = bench.replicas["m-0"].calls[0]
    first.answer("a")
    await settle()
    lose_frames(bench, "m-0")
    await settle()
    second = bench.replicas["m-1"].calls[0]
    assert second.wanted == ["b", "c"]
    second.answer("b", "c")
    second.end()
    answer = await task
    assert head_numbers(answer) == expected_heads([1, 2], "abc")
    assert answer.omitted == []


async def test_a_reader_of_heads_sees_each_of_them_once() -> None:
    bench = FrameBench(replicas=2)
    reader = bench.stream(1)
    await settle()
    bench.replicas["m-0"].calls[0].answer("b")
    await settle()
    lose_frames(bench, "m-0")
    await settle()
    second = bench.replicas["m-1"].calls[0]
    second.answer("a", "c")
    second.end()
    await reader.task
    assert reader.statuses == [("b", "ok"), ("a", "ok"), ("c", "ok")]


async def test_heads_that_take_two_replicas_down_end_and_the_others_answer() -> None:
    bench = FrameBench(replicas=2)
    task = bench.send(1)
    await settle()
    bench.replicas["m-0"].calls[0].answer("a", "b")
    await settle()
    for id in ("m-0", "m-1"):
        lose_frames(bench, id)
        await settle()
        leave(bench, id)
    answer = await task
    assert head_numbers(answer) == expected_heads([1], "ab")
    assert [(one.head, one.status) for one in answer.omitted] == [("c", "unavailable")]
    # What was asked for besides is no reason to refuse the rest.
    other = ReplicaRoute("m-2", "unix:", "", "unix:grpc")
    bench.dispatcher.update(msgspec.structs.replace(bench.route, replicas=(other,)))
    with pytest.raises(Quarantined):
        await bench.send(1)
    task = bench.send(1, heads="ab")
    await settle()
    bench.replicas["m-2"].calls[0].answer("a", "b")
    bench.replicas["m-2"].calls[0].end()
    assert head_numbers(await task) == expected_heads([1], "ab")


@pytest.mark.parametrize("rows", [1, 2])
async def test_heads_whose_device_failed_are_computed_by_another_replica_whatever_their_shape(rows: int) -> None:
    bench = FrameBench(replicas=2)
    task = bench.send(1)
    await settle()
    first = bench.replicas["m-0"].calls[0]
    broken = Piece("b", rows, 7, [(0, int(Status.BROKEN), "assert")])
    first.say(first.piece("a"), broken)
    await settle()
    second = bench.replicas["m-1"].calls[0]
    assert second.wanted == ["b", "c"]
    second.answer("b", "c")
    second.end()
    assert head_numbers(await task) == expected_heads([1], "abc")


async def test_a_stream_of_results_does_not_begin_anew() -> None:
    bench = FrameBench(STREAMING, replicas=2)
    reader = bench.stream(1)
    await settle()
    first = bench.replicas["m-0"].calls[0]
    first.say(first.piece("a", is_last=False))
    await settle()
    lose_frames(bench, "m-0")
    await settle()
    assert reader.statuses[0] == ("a", "ok")
    assert {status for _, status in reader.statuses[1:]} <= {"unavailable"}
    assert bench.replicas["m-1"].calls == []
    await asyncio.gather(reader.task, return_exceptions=True)


async def test_a_tensor_of_a_suspect_is_the_one_that_came() -> None:
    bench = Bench(replicas=2)
    data = memoryview(np.array([1, 2], np.float32).tobytes())
    task = bench.send_tensor("x", RawTensor("FP32", (2, 1), data))
    await settle()
    lose(bench, "m-0")
    await settle()
    bench.replicas["m-1"].calls[0].answer()
    assert numbers(await task) == [2, 4]
