"""Batching and the way back of what is answered in frames, against a replica that the test answers for."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.signature import HeadSpec, TensorSpec
from headwater.wire.frame import Frame, FrameTensor, Piece, StepCount, encode_frame
from headwater.wire.report import CallNote, Status
from headwater.wire.shared_memory import MappedCall
from headwater_server.codecs.tensors import HeadAnswer, InferRequest, RawTensor
from headwater_server.control.routing import State
from headwater_server.dispatch.collector import PIECES_LIMIT, PIECES_LIMIT_BYTES
from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    Cancelled,
    DeadlineExceeded,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from tests.app.dispatch.stand_in import (
    HEADS,
    ONCE,
    PIPELINE,
    STREAMING,
    FrameBench,
    FrameCall,
    FrameReader,
    expected_heads,
    head_numbers,
    pass_time,
    pipeline,
    settle,
    stop_time,
)
from tests.counted import count_from_zero, counts_of, requests_of

# Heads and rows


async def test_rows_of_several_requests_share_a_call_and_each_says_which_heads_it_wants() -> None:
    bench = FrameBench()
    tasks = [bench.send(1, heads="a"), bench.send(2, 3, heads="bc"), bench.send(4)]
    await settle()
    (call,) = bench.calls
    assert call.note.heads == [(0b001, 1), (0b110, 2), (0b111, 1)]
    call.answer("a", "b", "c")
    assert [head_numbers(await task) for task in tasks] == [
        expected_heads([1], "a"),
        expected_heads([2, 3], "bc"),
        expected_heads([4], "abc"),
    ]


async def test_only_the_whole_is_wanted_where_every_head_must_answer_and_nobody_listens_before() -> None:
    bench = FrameBench(max_in_flight=10)
    asked: list[tuple[Callable[[], object], bool]] = [
        (lambda: bench.send(1, heads="ab"), True),
        (lambda: bench.send(1, heads="abc"), False),  # c may be left out, and a and b still be an answer
        (lambda: bench.stream(1, heads="ab"), False),  # each head is an event
        (lambda: [bench.send(1, heads="ab"), bench.send(2, heads="ab")], True),
        (lambda: [bench.send(1, heads="a"), bench.send(2, heads="ab")], False),  # one needs only a
    ]
    kept = []
    for ask, whole in asked:
        kept.append(ask())
        await settle()
        call = bench.calls[-1]
        assert (call.note.patience_s > 0) is whole
        call.answer(*call.wanted)
        call.end()
        await settle()


async def test_patience_ends_well_before_the_first_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_time(monkeypatch)
    hasty = HeadSpec("b", ("out_b",), 3.0)
    bench = FrameBench(pipeline(b=hasty), max_in_flight=10, timeout_s=8)
    sent = []
    for heads, limit_s, fields in (("a", 8, {}), ("ab", 3, {}), ("ab", 2, {"timeout_us": 2_000_000})):
        sent.append(bench.send(1, heads=heads, **fields))
        await settle()
        call = bench.calls[-1]
        assert call.note.patience_s == pytest.approx(limit_s / 2)
        call.answer(*call.wanted)
        call.end()
        await settle()


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 10), st.sets(st.sampled_from(HEADS), min_size=1)), min_size=1, max_size=6
    ),
    max_in_flight=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
async def test_every_request_gets_its_own_rows_of_its_heads(
    requests: list[tuple[int, set[str]]], max_in_flight: int, seed: int
) -> None:
    chance = random.Random(seed)

    count_from_zero()
    bench = FrameBench(max_in_flight=max_in_flight)
    count = itertools.count(1)
    sent = []
    for rows, wanted in requests:
        values = [float(next(count)) for _ in range(rows)]
        heads = "".join(head for head in HEADS if head in wanted)
        sent.append((bench.send(*values, heads=heads), values, heads))
        if chance.random() < 0.5:
            await settle()
    left: dict[str, list[Piece]] = {}
    while not all(task.done() for task, _, _ in sent):
        await settle()
        for call in bench.calls:
            if call.name not in left:
                left[call.name] = [call.piece(head) for head in call.wanted]
                chance.shuffle(left[call.name])
        call = chance.choice([call for call in bench.calls if not call.is_left])
        pieces = left[call.name]
        frame = [pieces.pop() for _ in range(chance.randint(0, len(pieces)))]
        call.say(*frame)
        if not pieces:
            call.end()
        await settle()
    for task, values, heads in sent:
        answer = task.result()
        assert head_numbers(answer) == expected_heads(values, heads)
        assert answer.omitted == []
    assert bench.dispatcher.in_flight == 0
    assert requests_of("m")[:2] == (len(requests), sum(rows for rows, _ in requests))


async def test_a_request_larger_than_a_batch_is_joined_by_head() -> None:
    bench = FrameBench(replicas=3)
    values = list(range(10))
    task = bench.send(*values, heads="ac")
    await settle()
    first, second, third = bench.calls
    assert [call.values.tolist() for call in bench.calls] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    third.answer("a")
    second.answer("c", "a")
    first.answer("a")
    third.answer("c")
    await settle()
    assert not task.done()
    first.answer("c")
    answer = await task
    assert head_numbers(answer) == expected_heads(values, "ac")
    assert answer.outputs["out_a"].shape == (10, 1)


async def test_an_answer_leaves_before_the_slow_head_of_another_request_in_its_batch() -> None:
    bench = FrameBench()
    quick, slow = bench.send(1, heads="a"), bench.send(2, heads="ab")
    await settle()
    (call,) = bench.calls
    call.answer("a")
    assert head_numbers(await quick) == expected_heads([1], "a")
    assert not slow.done()
    call.answer("b")
    assert head_numbers(await slow) == expected_heads([2], "ab")


async def test_heads_that_are_too_late_before_the_call_are_not_asked_for() -> None:
    hasty = HeadSpec("c", ("out_c",), 0.005, "omit")
    bench = FrameBench(pipeline(c=hasty), max_in_flight=1)
    blocker = bench.send(0, heads="a")
    await settle()
    task = bench.send(1, heads="ac")
    with pytest.raises(DeadlineExceeded, match=r"^head `c`: its timeout_s of 0\.005 s passed while it waited"):
        await bench.send(2, heads="c")
    bench.calls[0].answer("a")
    bench.calls[0].end()
    await blocker
    await settle()
    call = bench.calls[1]
    assert call.note.heads == [(0b001, 1)]
    call.answer("a")
    answer = await task
    assert head_numbers(answer) == expected_heads([1], "a")
    assert [(one.head, one.status) for one in answer.omitted] == [("c", "timeout")]


async def test_a_request_without_rows_is_answered_without_a_call() -> None:
    bench = FrameBench()
    answer = await bench.send(heads="ab")
    assert [(name, tensor.shape) for name, tensor in answer.outputs.items()] == [("out_a", (0, 1)), ("out_b", (0, 1))]
    reader = bench.stream(heads="ab")
    await reader.task
    assert [(piece.head, list(piece.outputs)) for piece in reader.pieces] == [("a", ["out_a"]), ("b", ["out_b"])]
    assert bench.calls == []


# Failures


async def test_rows_that_fail_leave_their_neighbours_and_other_heads_alone() -> None:
    bench = FrameBench()
    tasks = [bench.send(1, heads="ac"), bench.send(2, 3, heads="ac"), bench.send(4, heads="a")]
    await settle()
    (call,) = bench.calls
    call.say(call.piece("c", {2: (Status.RAISED, "ValueError: no")}), call.piece("a"))
    assert head_numbers(await tasks[0]) == expected_heads([1], "ac")
    answer = await tasks[1]
    assert head_numbers(answer) == expected_heads([2, 3], "a")
    (omitted,) = answer.omitted
    assert (omitted.head, omitted.status, str(omitted.error)) == ("c", "failed", "row 1: ValueError: no")
    assert head_numbers(await tasks[2]) == expected_heads([4], "a")


async def test_rows_that_are_the_clients_fault_are_a_bad_request() -> None:
    bench = FrameBench()
    task = bench.send(1)
    await settle()
    (call,) = bench.calls
    call.say(call.piece("a", {0: (Status.BAD_INPUT, "x: wrong")}))
    with pytest.raises(BadRequest, match=r"^x: wrong$") as caught:
        await task
    assert caught.value.field == "inputs"


@pytest.mark.parametrize("wrong", ["piece", "tensor"])
async def test_a_head_with_a_wrong_number_of_rows_has_failed_and_others_have_not(wrong: str) -> None:
    bench = FrameBench()
    tasks = [bench.send(1, heads="ac"), bench.send(2, heads="c"), bench.send(3, heads="a")]
    await settle()
    (call,) = bench.calls
    piece = call.piece("c")
    if wrong == "piece":
        piece.rows = 3
    else:
        piece.tensors[0].shape = (3, 1)
    call.say(piece)
    call.answer("a")
    answer = await tasks[0]
    assert head_numbers(answer) == expected_heads([1], "a")
    assert [str(one.error) for one in answer.omitted] == ["head `c`: expected 2 rows, got 3"]
    with pytest.raises(CallableFailed, match=r"^head `c`: expected 2 rows, got 3$"):
        await tasks[1]
    assert head_numbers(await tasks[2]) == expected_heads([3], "a")


async def test_a_head_that_the_replica_leaves_out_has_failed() -> None:
    bench = FrameBench()
    lenient, strict = bench.send(1, heads="ac"), bench.send(2, heads="ab")
    await settle()
    (call,) = bench.calls
    call.answer("a")
    call.end()
    answer = await lenient
    assert [str(one.error) for one in answer.omitted] == ["head `c`: the replica ended its answer without it"]
    with pytest.raises(CallableFailed, match=r"^head `b`: the replica ended its answer without it$"):
        await strict


async def test_heads_that_were_answered_before_the_replica_was_lost_stay_answered() -> None:
    bench = FrameBench()
    lenient, strict, done = bench.send(1, heads="ac"), bench.send(2, heads="ab"), bench.send(3, heads="a")
    stream = bench.stream(4)
    await settle()
    (call,) = bench.calls
    call.answer("a")
    call.end(ReplicaLost("gone"))
    answer = await lenient
    assert head_numbers(answer) == expected_heads([1], "a")
    assert [(one.head, one.status, str(one.error)) for one in answer.omitted] == [("c", "unavailable", "gone")]
    with pytest.raises(ReplicaLost):
        await strict
    assert head_numbers(await done) == expected_heads([3], "a")
    await stream.task
    assert stream.statuses == [("a", "ok"), ("b", "unavailable"), ("c", "unavailable")]


async def test_a_request_whose_every_head_was_lost_fails() -> None:
    bench = FrameBench()
    task = bench.send(1, heads="c")
    await settle()
    bench.calls[0].end(ReplicaLost("gone"))
    with pytest.raises(ReplicaLost):
        await task


async def test_losing_the_replica_of_one_part_leaves_what_other_parts_await_alone() -> None:
    bench = FrameBench(ONCE, replicas=2)
    values = [1, 2, 3, 4, 5]
    task = bench.send(*values, heads="ac")
    await settle()
    first, second = bench.calls
    first.answer("a")
    first.end(ReplicaLost("gone"))
    await settle()
    assert not task.done()
    second.answer("c", "a")
    answer = await task
    assert head_numbers(answer) == expected_heads(values, "a")
    assert [one.head for one in answer.omitted] == ["c"]


async def test_a_replica_that_cannot_continue_gets_no_more_calls() -> None:
    bench = FrameBench(ONCE, replicas=2)
    broken, left = bench.replicas.values()
    task = bench.send(1, heads="a")
    await settle()
    (call,) = broken.calls
    call.say(call.piece("a", {0: (Status.BROKEN, "ReplicaError: no license")}))
    call.end()
    with pytest.raises(ReplicaLost, match="the replica can't continue: ReplicaError: no license"):
        await task
    for value in range(3):
        task = bench.send(value, heads="a")
        await settle()
        left.calls[-1].answer("a")
        left.calls[-1].end()
        assert head_numbers(await task) == expected_heads([value], "a")
    assert len(broken.calls) == 1


async def test_bytes_that_are_no_frame_fail_what_is_left_of_the_call() -> None:
    bench = FrameBench()
    task = bench.send(1, heads="ac")
    await settle()
    (call,) = bench.calls
    call.answer("a")
    call.answers.put_nowait(b"\0")
    answer = await task
    assert [str(one.error) for one in answer.omitted] == ["internal error: ValueError"]
    assert call.is_left
    bench.send(2, heads="a")
    await settle()
    assert len(bench.calls) == 2


async def test_rows_that_a_replica_never_had_go_to_another() -> None:
    bench = FrameBench(replicas=2)
    gone, left = bench.replicas.values()
    task = bench.send(1, 2)
    await settle()
    gone.calls[0].end(ReplicaUnreachable("gone"))
    await settle()
    left.calls[0].answer("a", "b", "c")
    assert head_numbers(await task) == expected_heads([1, 2], "abc")


async def test_rows_that_a_replica_never_had_fail_if_the_table_has_no_other() -> None:
    bench = FrameBench()
    task = bench.send(1)
    await settle()
    bench.calls[0].end(ReplicaUnreachable("gone"))
    bench.dispatcher.update(msgspec.structs.replace(bench.route, replicas=(), state=State.UNAVAILABLE, reason="killed"))
    with pytest.raises(Unavailable, match="UNAVAILABLE: killed"):
        await task


async def test_what_waits_fails_when_the_last_replica_is_taken_away() -> None:
    bench = FrameBench(max_in_flight=1)
    running = bench.send(0, heads="a")
    await settle()
    waiting = bench.send(1, heads="ac")
    stream = bench.stream(2, heads="ac")
    await settle()
    bench.dispatcher.update(msgspec.structs.replace(bench.route, replicas=(), state=State.UNAVAILABLE, reason="killed"))
    with pytest.raises(ReplicaLost):
        await running
    with pytest.raises(Unavailable, match="UNAVAILABLE: killed"):
        await waiting
    await stream.task
    assert stream.statuses == [("a", "unavailable"), ("c", "unavailable")]


# Streams


async def test_a_stream_goes_alone_and_several_at_the_same_time() -> None:
    bench = FrameBench(STREAMING, max_in_flight=2)
    for value in range(3):
        bench.stream(value)
    await settle()
    assert [call.values.tolist() for call in bench.calls] == [[0], [1]]
    assert len({call.note.stream for call in bench.calls} - {""}) == 2
    bench.calls[0].end()
    await settle()
    assert bench.calls[2].values.tolist() == [2]


async def test_a_stream_does_not_wait_for_company() -> None:
    bench = FrameBench(STREAMING, max_queue_delay_ms=60_000)
    bench.stream(1)
    await settle()
    assert len(bench.calls) == 1


async def test_a_streams_pieces_arrive_one_by_one_and_its_end_is_none() -> None:
    bench = FrameBench(STREAMING)
    reader = bench.stream(1, heads="ab")
    await settle()
    (call,) = bench.calls
    for count in range(1, 4):
        call.say(call.piece("a", is_last=False), call.piece("b", is_last=False))
        await settle()
        assert reader.statuses == [("a", "ok"), ("b", "ok")] * count
    call.say(Piece("a", 1, 0), Piece("b", 1, 0))
    await reader.task
    assert len(reader.pieces) == 6
    assert bench.replicas["m-0"].cancelled == []


async def test_a_head_of_a_stream_that_fails_ends_and_the_others_go_on() -> None:
    bench = FrameBench(STREAMING)
    reader = bench.stream(1, heads="ab")
    await settle()
    (call,) = bench.calls
    call.say(call.piece("a", {0: (Status.RAISED, "no")}), call.piece("b", is_last=False))
    call.say(call.piece("a"), call.piece("b", is_last=False))
    call.say(Piece("b", 1, 0))
    await reader.task
    assert reader.statuses == [("a", "failed"), ("b", "ok"), ("b", "ok")]


async def test_a_stream_is_cancelled_when_its_client_leaves_and_keeps_its_place_until_the_replica_has_ended_it() -> (
    None
):
    bench = FrameBench(STREAMING, max_in_flight=1)
    reader = bench.stream(1)
    await settle()
    (call,) = bench.calls
    call.say(call.piece("a", is_last=False))
    await settle()
    waiting = bench.stream(2)
    reader.task.cancel()
    await settle()
    assert bench.replicas["m-0"].cancelled == [call.note.stream] == [call.name]
    assert len(bench.calls) == 1
    call.say(call.piece("a", is_last=False))
    call.end()
    await settle()
    assert bench.calls[1].values.tolist() == [2]
    waiting.task.cancel()


async def test_a_stream_whose_client_leaves_while_it_waits_is_not_computed() -> None:
    bench = FrameBench(STREAMING, max_in_flight=1)
    bench.stream(1)
    await settle()
    gone = bench.stream(2)
    await settle()
    gone.task.cancel()
    await settle()
    assert bench.dispatcher.queued_rows == 0
    bench.calls[0].end()
    await settle()
    assert len(bench.calls) == 1


async def test_a_replica_is_told_for_how_long_anyone_waits_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_time(monkeypatch)
    bench = FrameBench(pipeline(a=HeadSpec("a", ("out_a",), 0.5)), timeout_s=20, max_in_flight=1)
    bench.send(1)
    await settle()
    tasks = [bench.send(2, heads="a", timeout_us=100_000), bench.send(3, heads="ab", timeout_us=2_000_000)]
    await settle()
    bench.calls[0].answer("a", "b", "c")
    await settle()
    first, second = (call.note.left_s for call in bench.calls)
    assert first == pytest.approx({"a": 0.5, "b": 20, "c": 20})
    assert second == pytest.approx({"a": 0.5, "b": 2})
    for task in tasks:
        task.cancel()
    stream = FrameBench(STREAMING)
    reader = stream.stream(1)
    await settle()
    assert stream.calls[0].note.left_s == {}
    reader.task.cancel()


async def test_streams_are_cancelled_by_their_request_s_id_whether_they_run_or_wait() -> None:
    count_from_zero()
    bench = FrameBench(STREAMING, max_in_flight=1)
    running, waiting = bench.stream(1, cancel_id="mine"), bench.stream(2, cancel_id="mine")
    other = bench.stream(3, cancel_id="other")
    await settle()
    (call,) = bench.calls
    call.say(call.piece("a", is_last=False))
    await settle()
    assert bench.dispatcher.cancel("nobody's") == 0
    assert bench.dispatcher.cancel("mine") == 2
    assert bench.dispatcher.cancel("mine") == 0
    for reader in (running, waiting):
        with pytest.raises(Cancelled, match="the request was cancelled"):
            await reader.task
    assert running.statuses == [("a", "ok")]
    assert bench.replicas["m-0"].cancelled == [call.name]
    call.end()
    await settle()
    assert bench.calls[1].values.tolist() == [3]
    assert counts_of("m").total("headwater_failures") == 0
    other.task.cancel()


async def test_a_stream_whose_heads_are_all_too_late_is_cancelled() -> None:
    bench = FrameBench(pipeline(streams=True, a=HeadSpec("a", ("out_a",), 0.05)))
    reader = bench.stream(1, heads="a")
    await reader.task
    assert reader.statuses == [("a", "timeout")]
    assert bench.replicas["m-0"].cancelled == [bench.calls[0].name]


async def test_a_stream_that_goes_silent_fails_and_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = FrameBench(STREAMING, timeout_s=10)
    reader = bench.stream(1, heads="a")
    await settle()
    (call,) = bench.calls
    call.say(call.piece("a", is_last=False))
    await settle()
    pass_time(monkeypatch, 10)
    with pytest.raises(DeadlineExceeded, match="the stream sent no output for 10 s"):
        await reader.task
    assert bench.replicas["m-0"].cancelled == [call.name]


async def test_a_stream_that_has_begun_holds_its_inputs_no_more() -> None:
    bench = FrameBench(STREAMING)
    request = bench.request(1, heads="a")
    reader = FrameReader(bench.dispatcher, request)
    await settle()
    (call,) = bench.calls
    assert list(request.inputs) == ["x"]
    call.say(call.piece("a", is_last=False))
    await settle()
    assert request.inputs == {}
    call.say(call.piece("a", is_last=False))
    call.say(call.piece("a"))
    await reader.task
    assert len(reader.pieces) == 3


async def unread(
    bench: FrameBench, count: int, frame: bytes | None = None
) -> tuple[FrameCall, AsyncGenerator[HeadAnswer, None]]:
    """A stream whose model says so many pieces, or such frames, and whose reader has taken one of them."""
    pieces = cast("AsyncGenerator[HeadAnswer, None]", bench.dispatcher.stream(bench.request(1, heads="a")))
    first = asyncio.ensure_future(anext(pieces))
    await settle()
    (call,) = bench.calls
    for _ in range(count):
        if frame is None:
            call.say(call.piece("a", is_last=False))
        else:
            call.answers.put_nowait(frame)
    await first
    await settle()
    return call, pieces


@pytest.mark.slow
async def test_a_stream_that_is_not_read_is_held_up_and_its_silence_is_not_the_replica_s() -> None:
    bench = FrameBench(STREAMING, timeout_s=1)
    call, pieces = await unread(bench, 3 * PIECES_LIMIT)
    left = call.answers.qsize()
    assert 0 < left < 3 * PIECES_LIMIT  # what isn't taken
    await asyncio.sleep(2.1)  # more than two deadlines
    assert call.answers.qsize() == left
    for _ in range(3 * PIECES_LIMIT - 1):
        assert head_numbers(await anext(pieces)) == expected_heads([1], "a")
    assert not bench.replicas["m-0"].cancelled
    with pytest.raises(DeadlineExceeded, match="sent no output"):  # which counts again
        await anext(pieces)
    assert bench.replicas["m-0"].cancelled == [call.name]


async def test_large_results_of_a_stream_wait_one_at_a_time() -> None:
    bench = FrameBench(STREAMING)
    raw = bytes(PIECES_LIMIT_BYTES + 1)
    head = Piece("a", 1, 0, [], [FrameTensor("out_a", "UINT8", (1, len(raw)), len(raw))], is_last=False)
    large = encode_frame(Frame([head], []), [raw]).tobytes()
    call, pieces = await unread(bench, 10, large)
    for left in range(8, 3, -1):
        await settle()
        assert call.answers.qsize() == left
        await anext(pieces)
    await pieces.aclose()


async def test_a_stream_that_ends_while_it_is_held_up_is_cancelled_at_once() -> None:
    bench = FrameBench(STREAMING)
    call, pieces = await unread(bench, PIECES_LIMIT + 1)
    assert not call.is_left
    (fail,) = bench.dispatcher.under_way(None)
    fail(Unavailable("it is unloaded"))
    await settle()
    assert bench.replicas["m-0"].cancelled == [call.name]  # though the model says nothing more
    assert call.is_left
    await pieces.aclose()


async def test_a_stream_that_is_left_while_it_is_held_up_is_cancelled() -> None:
    bench = FrameBench(STREAMING)
    call, pieces = await unread(bench, 2 * PIECES_LIMIT)
    await pieces.aclose()
    await settle()
    assert bench.replicas["m-0"].cancelled == [call.name]
    assert call.is_left


async def test_a_replica_that_was_lost_but_stands_in_the_table_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.dispatch.pool.LOST_RETRY_S", 0.01)

    bench = FrameBench(STREAMING)
    reader = bench.stream(1, heads="a")
    await settle()
    lost = bench.replicas["m-0"]
    bench.calls[0].end(ReplicaLost("gone"))
    await reader.task
    assert reader.statuses == [("a", "unavailable")]
    again = bench.stream(1, heads="a")
    while bench.replicas["m-0"] is lost or not bench.replicas["m-0"].calls:  # noqa: ASYNC110
        await asyncio.sleep(0)
    (call,) = bench.replicas["m-0"].calls
    call.say(Piece("a", 1, 0))
    call.end()
    await again.task


async def test_a_stream_of_more_rows_than_a_batch_is_refused() -> None:
    bench = FrameBench(STREAMING)
    reader = bench.stream(*range(5))
    with pytest.raises(BadRequest, match="at most 4 rows"):
        await reader.task


async def test_the_heads_of_a_pipeline_that_does_not_stream_arrive_each_as_it_is_ready() -> None:
    bench = FrameBench()
    reader, whole = bench.stream(1, heads="ab"), bench.send(2, heads="b")
    await settle()
    (call,) = bench.calls
    call.answer("b")
    await settle()
    assert reader.statuses == [("b", "ok")]
    assert head_numbers(await whole) == expected_heads([2], "b")
    call.answer("a")
    await reader.task
    assert [head_numbers(piece) for piece in reader.pieces] == [expected_heads([1], "b"), expected_heads([1], "a")]
    assert bench.replicas["m-0"].cancelled == []


# Replicas come and go; what is counted


async def test_a_replicas_stream_is_opened_before_the_first_request() -> None:
    signature = msgspec.structs.replace(
        PIPELINE,
        inputs=(
            TensorSpec("x", "FP32", (-1, 2)),
            TensorSpec("t", "BYTES", (1,)),
            TensorSpec("h", "BF16", (3,)),
            TensorSpec("o", "FP32", (1,), optional=True),
            TensorSpec("i", "FP32", (3, 1024, 1024)),
        ),
    )
    bench = FrameBench(signature)
    (nothing,) = bench.replicas["m-0"].opened
    assert nothing.inputs == [
        ("x", "FP32", [1, 1, 2], [bytes(8)]),
        ("t", "BYTES", [1, 1], [bytes(4)]),
        ("h", "UINT16", [1, 3], [bytes(6)]),
        ("i", "FP32", [1, 1, 1, 1], [bytes(4)]),  # every acknowledgement has them
    ]
    note = nothing.note
    assert note.cancel
    assert msgspec.structs.replace(note, cancel="") == CallNote()
    bench.dispatcher.update(bench.route)
    assert len(bench.replicas["m-0"].opened) == 1


async def test_closing_ends_what_is_under_way_and_what_waits() -> None:
    bench = FrameBench(max_in_flight=1)
    running = bench.send(1, heads="ac")
    await settle()
    waiting = bench.send(2, heads="ac")
    await settle()
    bench.dispatcher.close()
    for task in (running, waiting):
        with pytest.raises(ReplicaLost):
            await task
    with pytest.raises(Unavailable):
        await bench.send(3)


async def test_statistics_count_what_each_step_did() -> None:
    count_from_zero()
    bench = FrameBench()
    task = bench.send(1, heads="ab")
    await settle()
    (call,) = bench.calls
    call.say(call.piece("a"), counts=[StepCount("trunk", 1, 0, 100), StepCount("a", 1, 2, 20)])
    call.say(call.piece("b"), counts=[StepCount("b", 1, 0, 3), StepCount("trunk", 0, 1, 50)])
    call.end()
    await task
    await settle()
    counts = counts_of("m")
    assert dict(counts.statistics("headwater_steps")) == {
        "trunk": [1, 1, 150_000],
        "a": [1, 2, 20_000],
        "b": [1, 0, 3_000],
    }
    assert requests_of("m") == (1, 1, 1, 0)
    assert counts.sum("headwater_request_phase_seconds", "compute") == (1, 173_000)
    assert counts.statistics("headwater_batches") == [("1", [1, 173_000])]


async def test_a_request_in_several_calls_is_counted_once() -> None:
    count_from_zero()
    bench = FrameBench(max_in_flight=2)
    task = bench.send(*range(8), heads="a")
    await settle()
    for call in bench.calls:
        call.answer("a")
    await task
    for call in bench.calls:
        call.end()
    await settle()
    assert requests_of("m") == (1, 8, 2, 0)


async def test_a_stream_whose_client_leaves_as_its_call_begins_is_not_computed() -> None:
    bench = FrameBench(STREAMING)
    reader = bench.stream(1)
    await asyncio.sleep(0)
    reader.task.cancel()  # it learns of that behind the dispatch, and before the call
    await settle()
    assert reader.task.cancelled()
    assert bench.calls == []
    assert bench.dispatcher.in_flight == 0


async def test_a_call_is_over_once_all_is_said_and_not_when_a_request_has_enough() -> None:
    bench = FrameBench(max_in_flight=1)
    hasty = bench.send(1, heads="a", timeout_us=1000)
    await settle()
    with pytest.raises(DeadlineExceeded):
        await hasty
    second = bench.send(2, heads="ab")
    await settle()
    assert len(bench.calls) == 1  # the replica still computes
    bench.calls[0].answer("a")
    await settle()
    bench.calls[1].answer("a")
    third = bench.send(3, heads="b")
    await settle()
    assert len(bench.calls) == 2
    bench.calls[1].answer("b")
    assert head_numbers(await second) == expected_heads([2], "ab")
    await settle()
    bench.calls[2].answer("b")  # none of them has ended
    assert head_numbers(await third) == expected_heads([3], "b")


# Large inputs


def wide(bench: FrameBench, length: int = 20_000) -> InferRequest:
    """One row that wants head `a`."""
    request = bench.request(1, heads="a")
    x = np.arange(length, dtype=np.float32)
    return msgspec.structs.replace(request, inputs={"x": RawTensor("FP32", (1, length), x.tobytes())})


def says(call: FrameCall, *failures: tuple[int, int, str], is_last: bool = True) -> None:
    """Head `a` answers the one row with 7, or so."""
    tensors = [] if failures else [FrameTensor("out_a", "FP32", (1, 1), 4)]
    piece = Piece("a", 1, 7, list(failures), tensors, is_last)
    data = [] if failures else [np.float32(7).tobytes()]
    call.answers.put_nowait(encode_frame(Frame([piece], []), data).tobytes())


def lent(call: FrameCall) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The input, as the replica finds it in the memory that the worker shares."""
    assert call.note.shared is not None
    return MappedCall(call.note.shared).input(WIDE.inputs[0])


WIDE = msgspec.structs.replace(PIPELINE, inputs=(TensorSpec("x", "FP32", (-1,)),))


async def test_a_large_input_is_left_in_shared_memory_which_serves_the_next_call() -> None:
    bench = FrameBench(WIDE)
    paths = []
    for _ in range(2):
        task = asyncio.create_task(bench.dispatcher.infer(wide(bench)))
        await settle()
        call = bench.calls[-1]
        assert call.shape == [1, 1]
        assert lent(call).tolist() == [list(range(20_000))]
        assert call.note.shared is not None
        paths.append(call.note.shared.path)
        says(call)
        call.end()
        assert head_numbers(await task) == {"a": [7]}
        await settle()
        gc.collect()  # the finished task's frames
    assert paths[0] == paths[1]


async def test_large_inputs_go_inline_to_a_replica_that_cannot_open_the_workers_memory() -> None:
    bench = FrameBench(WIDE)
    first = asyncio.create_task(bench.dispatcher.infer(wide(bench)))
    await settle()
    assert bench.calls[0].note.shared is not None
    says(bench.calls[0], (0, int(Status.UNSHARED), "PermissionError: no"))
    await settle()
    second = asyncio.create_task(bench.dispatcher.infer(wide(bench)))
    for number, task in enumerate((first, second), start=1):
        await settle()
        call = bench.calls[number]
        assert call.note.shared is None
        assert call.values.tolist() == list(range(20_000))
        says(call)
        call.end()
        assert head_numbers(await task) == {"a": [7]}


async def test_large_inputs_of_streams_go_inline() -> None:
    bench = FrameBench(msgspec.structs.replace(WIDE, streams=True))
    FrameReader(bench.dispatcher, wide(bench))
    await settle()
    (call,) = bench.calls
    assert call.note.shared is None
    assert call.values.tolist() == list(range(20_000))
    call.end()
