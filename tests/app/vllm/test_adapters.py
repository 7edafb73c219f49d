"""Requests for an adapter's name: which of them an unload waits for, and what of the prefix cache they share."""

from __future__ import annotations

import asyncio

from headwater_server.control.messages import Drain, Drained
from headwater_server.control.routing import RoutingTable
from headwater_server.gateway.models import Models
from headwater_server.telemetry.recorder import recorder
from headwater_server.vllm.answers import ChunkAnswer, TokenCount
from headwater_server.vllm.vllm_model import VllmDispatcher
from tests.app.serving import until
from tests.app.vllm.stand_in import Exchange, benched, chunk, request, route_of, stand_ins


async def begun(dispatcher: VllmDispatcher, model: str) -> asyncio.Task[int]:
    """A stream for a model: the number of its events, once it has ended."""
    asked = request(model=model)
    relay = dispatcher.open(asked, "id")

    async def read() -> int:
        return len(
            [event async for event in relay.events(ChunkAnswer(asked, TokenCount(recorder().language_model("m"))))]
        )

    return asyncio.create_task(read())


async def test_an_unload_waits_for_requests_for_that_adapter_only() -> None:
    async with stand_ins("a") as replicas:
        gate = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            exchange.begin()
            exchange.event(chunk("a", 1))
            if exchange.body["model"] == "first":
                await gate.wait()
                exchange.end()
            else:
                await exchange.left()

        replicas["a"].script = waits
        models = Models()
        models.update(RoutingTable((route_of(replicas, adapters={"first": 0, "second": 0}),)))
        dispatcher = models.vllm("first")
        assert dispatcher is not None
        first, other, base = [await begun(dispatcher, name) for name in ("first", "second", "m")]
        await until(lambda: len(replicas["a"].exchanges) == 3)
        models.update(RoutingTable((route_of(replicas, adapters={"second": 0}),)))
        draining = asyncio.create_task(models.drain(Drain(1, "m", 9, None, ["first"])))
        await asyncio.sleep(0)
        assert not draining.done()
        gate.set()
        assert await draining == Drained(1, 0)
        assert await first == 1
        assert dispatcher.in_flight == 2
        assert await models.drain(Drain(2, "m", 0.01, None, ["second"])) == Drained(0, 1)
        await asyncio.wait({other})
        assert "the adapter is being unloaded" in str(other.exception())
        assert not base.done()
        base.cancel()
        models.close()


async def test_an_adapter_that_was_loaded_again_shares_no_prefix_with_the_one_before() -> None:
    async with benched(adapters={"first": 0, "second": 2}) as bench:
        salts = []
        for model, scope in (("m", ""), ("first", ""), ("second", ""), ("first", "key"), ("second", "key")):
            asked = request(model=model)
            relay = bench.dispatcher.open(asked, "id", scope)
            answer = ChunkAnswer(asked, TokenCount(recorder().language_model("m")))
            assert [event async for event in relay.events(answer)]
            salts.append(bench.exchanges[-1].body.get("cache_salt"))
        bench.dispatcher.update(route_of(bench.replicas, adapters={"second": 3}))
        relay = bench.dispatcher.open(request(model="second"), "id")
        await anext(relay.events(answer))
        salts.append(bench.exchanges[-1].body.get("cache_salt"))
        assert salts[:2] == [None, None]
        assert len(set(salts[2:])) == 4
        relay.close()
