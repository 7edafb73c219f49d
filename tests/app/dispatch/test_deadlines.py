"""When requests and heads run out of time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from headwater.signature import HeadSpec
from headwater_server.dispatch.collector import WHOLE, Collector
from headwater_server.dispatch.deadlines import Deadlines
from headwater_server.errors import DeadlineExceeded
from tests.app.dispatch.test_collector import pieces_of

LONG_S = 60.0


def collector_of(*heads: HeadSpec, is_stream: bool = False) -> Collector:
    return Collector({head.name: head for head in heads or (HeadSpec(WHOLE, ()),)}, is_stream=is_stream)


async def test_a_request_fails_when_its_time_is_over_and_says_what_it_was_at() -> None:
    collector = collector_of()
    Deadlines(collector, 0.005, 0, where=lambda: "while it waited")
    with pytest.raises(DeadlineExceeded, match=r"^the deadline of 0\.005 s passed while it waited$"):
        await collector.whole()


@pytest.mark.parametrize(("timeout_s", "timeout_us"), [(LONG_S, 5000), (0.005, 60_000_000), (0.005, 0)])
async def test_the_earlier_of_the_deployments_deadline_and_the_clients_counts(
    timeout_s: float, timeout_us: int
) -> None:
    collector = collector_of()
    deadlines = Deadlines(collector, timeout_s, timeout_us)
    assert deadlines.left_s(WHOLE) <= 0.005
    with pytest.raises(DeadlineExceeded):
        await collector.whole()
    assert deadlines.left_s(WHOLE) < 0.002


async def test_a_head_has_a_deadline_of_its_own() -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    collector = collector_of(HeadSpec("a", ("y",), 0.005, "omit"), HeadSpec("b", ("z",)))
    deadlines = Deadlines(collector, LONG_S, 0, on_head=told.put_nowait)
    assert await told.get() == "a"
    assert list(collector.undecided) == ["b"]
    collector.decide("b", {})
    (omitted,) = (await collector.whole()).omitted
    assert (omitted.head, omitted.status) == ("a", "timeout")
    assert omitted.error is not None
    assert omitted.error.message == "head `a`: its timeout_s of 0.005 s passed while it was computed"
    deadlines.close()


async def test_a_head_whose_own_deadline_is_later_ends_with_the_requests() -> None:
    told: list[str] = []
    collector = collector_of(HeadSpec("a", ("y",), LONG_S))
    Deadlines(collector, LONG_S, 5000, on_head=told.append)
    with pytest.raises(DeadlineExceeded, match=r"^head `a`: the deadline of 0\.005 s"):
        await collector.whole()
    assert told == ["a"]


async def test_at_the_requests_deadline_heads_that_may_be_left_out_are() -> None:
    collector = collector_of(HeadSpec("a", ("y",)), HeadSpec("b", ("z",), None, "omit"))
    Deadlines(collector, 0.005, 0)
    collector.decide("a", {})
    answer = await collector.whole()
    assert [(one.head, one.status) for one in answer.omitted] == [("b", "timeout")]


async def test_in_a_stream_heads_that_are_late_are_pieces() -> None:
    collector = collector_of(HeadSpec("a", ("y",)), HeadSpec("b", ("z",)), is_stream=True)
    Deadlines(collector, 0.005, 0)
    assert [(piece.head, piece.status) async for piece in pieces_of(collector)] == [
        ("a", "timeout"),
        ("b", "timeout"),
    ]


async def test_once_closed_nothing_ends() -> None:
    collector = collector_of(HeadSpec("a", ("y",), 0.001))
    Deadlines(collector, 0.002, 0).close()
    later = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.01, later.set_result, None)
    await later
    assert not collector.is_done


async def beats(collector: Collector, deadlines: Deadlines, count: int, interval_s: float) -> AsyncIterator[None]:
    """Pieces at intervals."""
    for _ in range(count):
        collector.add("a", {})
        deadlines.note_piece()
        yield
        await asyncio.sleep(interval_s)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": uses}) for uses in (False, True)])
async def test_a_stream_may_last_as_long_as_something_comes() -> None:
    loop = asyncio.get_running_loop()
    collector = collector_of(HeadSpec("a", ("y",)), is_stream=True)
    deadlines = Deadlines(collector, 0.5, 0, is_idle_limit=True)
    started_s = loop.time()
    async for _ in beats(collector, deadlines, 30, 0.02):
        assert not collector.is_done
    pieces = pieces_of(collector)
    for _ in range(30):
        await anext(pieces)
    with pytest.raises(DeadlineExceeded, match=r"^the stream sent no output for 0\.5 s$"):
        await anext(pieces)
    assert loop.time() - started_s >= 1.07


async def test_a_stream_that_never_began_is_late_like_any_request() -> None:
    collector = collector_of(HeadSpec("a", ("y",)), is_stream=True)
    Deadlines(collector, 0.005, 0, is_idle_limit=True)
    (piece,) = [piece async for piece in pieces_of(collector)]
    assert piece.error is not None
    assert piece.error.message == "head `a`: the deadline of 0.005 s passed while it was computed"


async def test_a_heads_deadline_after_a_streams_idle_limit_counts_too() -> None:
    collector = collector_of(HeadSpec("a", ("y",), 0.6), is_stream=True)
    deadlines = Deadlines(collector, 0.5, 0, is_idle_limit=True)
    async for _ in beats(collector, deadlines, 1000, 0.01):
        if collector.is_done:
            break
    *_, last = [piece async for piece in pieces_of(collector)]
    assert last.error is not None
    assert "its timeout_s of 0.6 s" in last.error.message
