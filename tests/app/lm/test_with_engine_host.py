"""The dispatcher against a true `EngineHost`, without the processes between: both ends of the wire agree."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headwater.engine import Engine, EngineLimits
from headwater.lm.engine_host import EngineHost
from headwater.lm.null_engine import NullEngine
from headwater_server.errors import BadRequest, Cancelled, ContractBroken, QueueFull, Unavailable
from headwater_server.lm.language_model import LmDispatcher
from headwater_server.lm.sequence import Generation
from tests.app.lm.app_with_engine import HostClient
from tests.app.lm.stand_in import route_of, spec, until
from tests.counted import count_from_zero, counts_of
from tests.services.engines import FaultyEngine


@contextlib.asynccontextmanager
async def hosted(engine: Engine) -> AsyncIterator[tuple[LmDispatcher, EngineHost]]:
    count_from_zero()
    host = EngineHost(engine)
    dispatcher = LmDispatcher(route_of("a"), lambda name, route: HostClient(host), lambda folder: None)  # type: ignore[arg-type, return-value]
    try:
        yield dispatcher, host
    finally:
        dispatcher.close()
        await asyncio.to_thread(host.close)


async def whole(generation: Generation) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {}
    while news := await generation.news():
        for place, tokens in news:
            got.setdefault(place, []).extend(tokens.tokens)
    return got


async def test_many_requests_at_once_each_get_all_of_their_tokens() -> None:
    async with hosted(NullEngine()) as (dispatcher, _host):
        lengths = [(number * 37 % 300, number % 5) for number in range(100)]
        answers = await asyncio.gather(
            *(whole(dispatcher.open("q", [spec(one), spec(other)])) for one, other in lengths)
        )
        assert answers == [{0: list(range(one)), 1: list(range(other))} for one, other in lengths]
        counts = counts_of(dispatcher.route.name)
        assert (counts.total("headwater_sequences"), counts.total("headwater_contract_violations")) == (200, 0)
        assert counts.total("headwater_generated_tokens") == sum(one + other for one, other in lengths)
        assert dispatcher.load.active == dispatcher.in_flight == 0


async def test_requests_are_cancelled_by_their_id_or_left_and_the_engine_is_then_idle() -> None:
    engine = NullEngine(step_s=0.001)

    async with hosted(engine) as (dispatcher, _host):
        mine, left, dropped = (dispatcher.open(id, [spec(900_000)] * 2) for id in ("mine", "left", "dropped"))
        for generation in (mine, left, dropped):
            assert await generation.news()
        assert engine.active == 6
        assert dispatcher.cancel("mine") == 2
        with pytest.raises(Cancelled):
            await whole(mine)
        left.close()
        dropped.drop(0)
        assert await dropped.news()
        dropped.drop(1)
        assert await dropped.news() == []
        await until(lambda: not engine.has_work)
        assert dispatcher.cancel("mine") == 0


@pytest.mark.parametrize(
    ("fault", "message"), [("repeat", "repeated tokens"), ("history", "repeated tokens"), ("skip", "left tokens out")]
)
async def test_an_engine_that_breaks_its_contract_is_found_out(fault: str, message: str) -> None:
    bad = FaultyEngine(NullEngine(), fault, is_faulty=lambda id: id.endswith("/0"))  # type: ignore[arg-type]

    async with hosted(bad) as (dispatcher, _host):
        faulty, good = dispatcher.open("faulty", [spec(50)]), dispatcher.open("good", [spec(50)])
        with pytest.raises(ContractBroken, match=message):
            await whole(faulty)
        assert await whole(good) == {0: list(range(50))}
        assert counts_of(dispatcher.route.name).total("headwater_contract_violations") == 1


async def test_what_the_engine_refuses_has_the_right_status() -> None:
    limits = EngineLimits(max_sequences=1, max_waiting=1, context_length=100_000, cache_tokens=100_000, vocab_size=10)

    async with hosted(NullEngine(limits, step_s=0.001)) as (dispatcher, _host):
        with pytest.raises(BadRequest) as caught:
            await whole(dispatcher.open("long", [spec(100_000)]))
        assert caught.value.field is None
        running = dispatcher.open("running", [spec(90_000)])
        assert await running.news()
        waiting = dispatcher.open("waiting", [spec(5)])
        with pytest.raises(QueueFull, match="`max_waiting` is 1"):
            await whole(dispatcher.open("full", [spec(5)]))
        running.close()
        assert await whole(waiting) == {0: [0, 1, 2, 3, 4]}


async def test_what_a_host_never_had_because_it_knows_no_such_channel_is_asked_for_on_another() -> None:
    async with hosted(NullEngine()) as (dispatcher, host):
        assert await whole(dispatcher.open("q", [spec(3)])) == {0: [0, 1, 2]}
        # private: a host that drops a channel says so, and only a broken connection loses that
        changed, channels = host._changed, host._channels
        with changed:
            (before,) = channels
            channels.clear()
        assert await whole(dispatcher.open("q", [spec(3), spec(2)])) == {0: [0, 1, 2], 1: [0, 1]}
        assert before not in channels
        assert counts_of(dispatcher.route.name).total("headwater_sequences") == 3


async def test_a_host_that_ends_says_why() -> None:
    async with hosted(NullEngine(step_s=0.001)) as (dispatcher, host):
        generation = dispatcher.open("q", [spec(900_000)])
        assert await generation.news()
        await asyncio.to_thread(host.close, "the replica is ending")
        with pytest.raises(Unavailable, match="the replica is ending"):
            await whole(generation)
        with pytest.raises(Unavailable, match="the replica is ending"):
            await whole(dispatcher.open("q", [spec(5)]))
