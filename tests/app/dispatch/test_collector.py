"""How the pieces of a request's answer come together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Literal

import pytest

from headwater.signature import HeadSpec, Signature, TensorSpec
from headwater_server.codecs.tensors import Answer, HeadAnswer, InferRequest, Outputs, RawTensor
from headwater_server.dispatch.collector import PIECES_LIMIT, WHOLE, Collector, wanted_heads
from headwater_server.errors import CallableFailed, DeadlineExceeded, QueueFull, ReplicaLost

OnError = Literal["fail", "omit"]


def heads(**on_error: OnError) -> dict[str, HeadSpec]:
    return {name: HeadSpec(name, (f"out_{name}",), None, rule) for name, rule in on_error.items()}


def outputs(head: str, value: int = 0) -> Outputs:
    return {f"out_{head}": RawTensor("UINT8", (1, 1), bytes([value]))}


def whole(**on_error: OnError) -> Collector:
    return Collector(heads(**on_error), is_stream=False)


def stream(**on_error: OnError) -> Collector:
    return Collector(heads(**on_error), is_stream=True)


async def pieces_of(collector: Collector) -> AsyncIterator[HeadAnswer]:
    while (piece := await collector.next_piece()) is not None:
        yield piece


async def read(collector: Collector) -> list[HeadAnswer]:
    return [piece async for piece in pieces_of(collector)]


async def test_the_answer_has_every_head() -> None:
    collector = whole(a="fail", b="fail")
    collector.decide("b", outputs("b", 2))
    assert not collector.is_done
    collector.decide("a", outputs("a", 1))
    answer = await collector.whole()
    assert answer.outputs == {**outputs("a", 1), **outputs("b", 2)}
    assert answer.omitted == []


async def test_a_head_that_must_not_fail_fails_the_request_at_once() -> None:
    collector = whole(a="fail", b="fail")
    collector.decide("a", error=CallableFailed("no"))
    with pytest.raises(CallableFailed, match=r"^no$"):
        await collector.whole()


async def test_a_head_that_may_fail_is_left_out_and_named() -> None:
    collector = whole(a="fail", b="omit")
    collector.decide("b", error=DeadlineExceeded("late"))
    collector.decide("a", outputs("a"))
    answer = await collector.whole()
    assert answer.outputs == outputs("a")
    assert [(one.head, one.status) for one in answer.omitted] == [("b", "timeout")]


async def test_if_every_head_fails_the_request_has_the_error_of_the_first() -> None:
    collector = whole(a="omit", b="omit")
    collector.decide("b", error=CallableFailed("first"))
    assert not collector.is_done
    collector.decide("a", error=DeadlineExceeded("second"))
    with pytest.raises(CallableFailed, match=r"^first$"):
        await collector.whole()


async def test_of_a_model_without_heads_a_failure_is_the_requests() -> None:
    for is_stream in (False, True):
        collector = Collector({WHOLE: HeadSpec(WHOLE, ())}, is_stream=is_stream)
        collector.decide(WHOLE, error=CallableFailed("no"))
        with pytest.raises(CallableFailed, match=r"^no$"):
            await (read(collector) if is_stream else collector.whole())


async def test_what_comes_after_a_heads_last_result_is_ignored() -> None:
    collector = whole(a="omit", b="fail")
    collector.decide("a", outputs("a", 1))
    collector.decide("a", error=CallableFailed("late"))
    collector.decide("a", outputs("a", 2))
    collector.decide("b", outputs("b"))
    collector.decide("b", error=CallableFailed("late"))
    assert await collector.whole() == Answer({**outputs("a", 1), **outputs("b")}, [])


async def test_what_comes_after_the_requests_failure_is_ignored() -> None:
    collector = stream(a="fail")
    collector.fail(ReplicaLost("gone"))
    collector.fail(CallableFailed("late"))
    collector.add("a", outputs("a"))
    collector.decide("a", outputs("a"))
    with pytest.raises(ReplicaLost):
        await read(collector)


async def test_heads_that_nobody_asked_for_are_ignored() -> None:
    collector = whole(a="fail")
    collector.decide("b", error=CallableFailed("who?"))
    collector.decide("a", outputs("a"))
    assert (await collector.whole()).outputs == outputs("a")


async def test_a_stream_gives_pieces_in_the_order_in_which_they_came() -> None:
    collector = stream(a="fail", b="fail")
    collector.add("b", outputs("b", 1))
    collector.add("a", outputs("a", 2))
    collector.add("b", outputs("b", 3))
    collector.decide("a", outputs("a", 4))
    collector.decide("b", outputs("b", 5))
    got = [(piece.head, *(bytes(one.data) for one in piece.outputs.values())) for piece in await read(collector)]
    assert got == [("b", b"\1"), ("a", b"\2"), ("b", b"\3"), ("a", b"\4"), ("b", b"\5")]


async def test_a_stream_gives_each_piece_before_the_next_is_there() -> None:
    collector = stream(a="fail")
    pieces = pieces_of(collector)
    for value in range(3):
        waiting = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0)
        assert not waiting.done()
        collector.add("a", outputs("a", value))
        assert (await waiting).outputs == outputs("a", value)
    collector.decide("a")
    with pytest.raises(StopAsyncIteration):
        await anext(pieces)


async def test_in_a_stream_a_head_that_fails_is_a_piece_and_not_the_end() -> None:
    collector = stream(a="fail", b="omit")
    collector.decide("a", error=CallableFailed("no"))
    assert not collector.is_done
    collector.decide("b", outputs("b"))
    assert [(piece.head, piece.status) for piece in await read(collector)] == [("a", "failed"), ("b", "ok")]


async def test_a_stream_whose_every_head_failed_has_their_pieces_and_ends() -> None:
    collector = stream(a="fail", b="omit")
    collector.decide("a", error=ReplicaLost("gone"))
    collector.decide("b", error=QueueFull("full"))
    assert [piece.status for piece in await read(collector)] == ["unavailable", "unavailable"]


async def test_the_end_of_a_heads_pieces_is_none_itself() -> None:
    collector = stream(a="fail")
    collector.add("a", outputs("a"))
    collector.decide("a")
    assert len(await read(collector)) == 1


async def test_pieces_that_came_before_the_failure_are_still_given() -> None:
    collector = stream(a="fail")
    collector.add("a", outputs("a"))
    collector.fail(ReplicaLost("gone"))
    pieces = pieces_of(collector)
    assert (await anext(pieces)).head == "a"
    with pytest.raises(ReplicaLost):
        await anext(pieces)


def full() -> Collector:
    """A stream that has as many pieces as may wait for its reader."""
    collector = stream(a="fail")
    for _ in range(PIECES_LIMIT):
        assert not collector.is_full()
        collector.add("a", outputs("a"))
    assert collector.is_full()
    return collector


async def test_a_stream_that_nobody_reads_has_no_room_until_its_reader_goes_on() -> None:
    collector = full()
    waiting = asyncio.create_task(collector.wait_for_capacity())
    await asyncio.sleep(0)
    assert not waiting.done()
    pieces = pieces_of(collector)
    await anext(pieces)
    await waiting
    for _ in range(PIECES_LIMIT - 1):  # none is lost
        await anext(pieces)
    assert not collector.is_done


@pytest.mark.parametrize(
    "end",
    [Collector.close, lambda one: one.fail(ReplicaLost("gone")), lambda one: one.decide("a", outputs("a"))],
    ids=["left", "failed", "said"],
)
async def test_a_stream_that_is_over_holds_nobody_up(end: Callable[[Collector], None]) -> None:
    collector = full()
    waiting = asyncio.create_task(collector.wait_for_capacity())
    await asyncio.sleep(0)
    end(collector)
    await asyncio.wait_for(waiting, 10)
    if not collector.future.cancelled():
        collector.future.exception()


async def test_a_stream_that_is_read_may_be_of_any_length() -> None:
    collector = stream(a="fail")
    pieces = pieces_of(collector)
    for _ in range(2 * PIECES_LIMIT):
        collector.add("a", outputs("a"))
        await anext(pieces)
    assert not collector.is_done


async def test_a_failure_that_nobody_waits_for_is_no_warning() -> None:
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
    collector = stream(a="fail")
    collector.fail(ReplicaLost("gone"))
    collector.close()
    del collector
    assert told == []


def test_wanted_heads_are_those_of_the_request_in_the_signatures_order() -> None:
    signature = Signature(
        name="m",
        inputs=(TensorSpec("x", "FP32", (1,)),),
        outputs=tuple(TensorSpec(f"out_{name}", "FP32", (1,)) for name in "abc"),
        heads=tuple(heads(a="fail", b="fail", c="omit").values()),
    )
    request = InferRequest("", {}, 1, [], {}, {}, heads=("c", "a"))
    assert list(wanted_heads(request, signature)) == ["a", "c"]
    assert list(wanted_heads(request, Signature("m", signature.inputs, signature.outputs))) == [WHOLE]


@pytest.mark.parametrize(("errors", "succeeded"), [("", True), ("a", True), ("ab", False)])
async def test_a_request_has_failed_if_every_head_has_even_if_each_may_be_omitted(errors: str, succeeded: bool) -> None:
    collector = stream(a="omit", b="omit")
    for head in "ab":
        if head in errors:
            collector.decide(head, error=CallableFailed("no"))
        else:
            collector.decide(head, outputs(head))
    assert (collector.succeeded, collector.failed) == (succeeded, not succeeded)
