"""A load or unload of a model at all replicas of a repository."""

from __future__ import annotations

import asyncio

import pytest

from headwater_server.errors import DeadlineExceeded, ReplicaLost
from headwater_server.triton.relayed_calls import RelayedRequest
from tests.app.serving import until
from tests.app.triton.stand_in import RelayBench, RelayedExchange, answers, benched, hangs

LOAD = RelayedRequest("POST", "/v2/repository/models/m/load", b"{}")


async def lose(exchange: RelayedExchange) -> None:
    exchange.lose()


class TestReplicas:
    async def test_all_are_asked_at_once(self) -> None:
        async with benched("a", "b", "c") as bench:
            opened = asyncio.Event()

            async def later(exchange: RelayedExchange) -> None:
                await opened.wait()
                exchange.answer()

            for replica in bench.replicas.values():
                replica.script = later
            change = asyncio.create_task(bench.dispatcher.change_model("m", LOAD))
            await until(lambda: bench.counts() == [1, 1, 1])
            assert not change.done()
            opened.set()
            assert (await change).status == 200
        for replica in bench.replicas.values():
            (exchange,) = replica.exchanges
            assert (exchange.line, exchange.body) == ("POST /v2/repository/models/m/load HTTP/1.1", b"{}")

    async def test_the_first_refusal_is_the_answer_once_all_have_answered(self) -> None:
        async with benched("a", "b", "c") as bench:
            bench.replicas["b"].script = answers(b"b refuses", 400)
            bench.replicas["c"].script = answers(b"c refuses", 400)
            answer = await bench.dispatcher.change_model("m", LOAD)
            assert (answer.status, answer.body) == (400, b"b refuses")
            assert bench.counts() == [1, 1, 1]


class TestErrors:
    async def fails(self, bench: RelayBench, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            await bench.dispatcher.change_model("m", LOAD)
        assert bench.counts() == [1, 1]

    async def test_a_replica_that_hangs_is_named_with_the_field(self) -> None:
        async with benched("a", "b", load_timeout_s=0.2) as bench:
            bench.replicas["a"].script = hangs
            text = (
                r"model `m`: replica a gave no answer to load within load_timeout_s = 0\.2 s, and the other replicas "
            )
            await self.fails(bench, DeadlineExceeded, text + "keep what they did; send load again, with a larger")
            await bench.replicas["a"].exchanges[0].has_left()
            bench.replicas["a"].script = answers()
            assert (await bench.dispatcher.change_model("m", LOAD)).status == 200

    async def test_a_replica_that_ends_is_named(self) -> None:
        async with benched("a", "b") as bench:
            bench.replicas["b"].script = lose
            await self.fails(bench, ReplicaLost, "model `m`: replica b ended before it answered load, and .* send load")

    async def test_a_refusal_is_said_rather_than_a_loss(self) -> None:
        async with benched("a", "b") as bench:
            bench.replicas["a"].script = lose
            bench.replicas["b"].script = answers(b"refused", 400)
            assert (await bench.dispatcher.change_model("m", LOAD)).body == b"refused"
