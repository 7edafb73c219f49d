"""HTTP to a vLLM on a unix socket."""

from __future__ import annotations

import asyncio

import pytest

from headwater_server.errors import ReplicaLost, ReplicaUnreachable
from headwater_server.transport import relay_client as client_module
from headwater_server.transport.relay_client import HIGH_BYTES, RelayClient, UpstreamAnswer
from tests.app.serving import until
from tests.app.vllm.stand_in import Exchange, StandIn, stand_ins


async def asked(client: RelayClient, path: str = "/v1/completions") -> UpstreamAnswer:
    answer = await client.connect()
    await answer.send("POST", path, b'{"a":1}', "X-Request-Id: 7\r\n")
    return answer


async def echo(exchange: Exchange) -> None:
    exchange.whole({"path": exchange.path, "body": exchange.body, "id": exchange.headers["x-request-id"]})


async def test_an_answer_has_status_and_body_and_its_connection_is_used_again() -> None:
    async with stand_ins("a") as found:
        found["a"].script = echo
        client = RelayClient(f"unix:{found['a'].path}")
        for path in ("/one", "/two"):
            answer = await asked(client, path)
            assert answer.status == 200
            assert await answer.whole() == b'{"path": "%b", "body": {"a": 1}, "id": "7"}' % path.encode()
            answer.release()
        assert found["a"].connections == 1
        client.close()


async def test_an_answer_that_is_left_early_ends_its_connection() -> None:
    async with stand_ins("a") as found:

        async def endless(exchange: Exchange) -> None:
            exchange.begin()
            exchange.event({})
            await exchange.left()

        found["a"].script = endless
        client = RelayClient(f"unix:{found['a'].path}")
        answer = await asked(client)
        assert await answer.read() == b"data: {}\n\n"
        answer.release()
        await found["a"].exchanges[0].left()
        client.close()


async def test_a_connection_that_vllm_is_about_to_close_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand_ins("a") as found:
        found["a"].script = echo
        client = RelayClient(f"unix:{found['a'].path}")
        for _ in range(2):
            monkeypatch.setattr(client_module, "IDLE_S", 0.0)
            answer = await asked(client)
            await answer.whole()
            answer.release()
        assert found["a"].connections == 2
        client.close()


async def test_a_connection_that_vllm_closed_is_forgotten() -> None:
    async with stand_ins("a") as found:
        found["a"].script = echo
        client = RelayClient(f"unix:{found['a'].path}")
        answer = await asked(client)
        await answer.whole()
        answer.release()
        found["a"].exchanges[0].lose()
        before = answer
        await until(lambda: before.is_lost)
        answer = await asked(client)
        assert await answer.whole()
        client.close()


async def test_a_vllm_that_ends_loses_its_answers() -> None:
    async with stand_ins("a") as found:

        async def script(exchange: Exchange) -> None:
            if exchange.path == "/begin":
                exchange.begin()
                await until(lambda: bool(begun))
            exchange.lose()

        begun: list[UpstreamAnswer] = []
        found["a"].script = script
        client = RelayClient(f"unix:{found['a'].path}")
        with pytest.raises(ReplicaLost):
            await asked(client)
        begun.append(await asked(client, "/begin"))
        with pytest.raises(ReplicaLost):
            await begun[0].read()
        client.close()


async def test_what_is_no_http_ends_the_connection() -> None:
    async with stand_ins("a") as found:

        async def script(exchange: Exchange) -> None:
            exchange.writer.write(b"nonsense\r\n\r\n")

        found["a"].script = script
        client = RelayClient(f"unix:{found['a'].path}")
        with pytest.raises(ReplicaLost):
            await asked(client)
        client.close()


async def test_without_a_socket_a_vllm_is_not_reached() -> None:
    with pytest.raises(ReplicaUnreachable):
        await RelayClient("unix:/nowhere/h").connect()


async def test_closing_ends_all_connections_and_opens_none() -> None:
    async with stand_ins("a") as found:

        async def silent(exchange: Exchange) -> None:
            await exchange.left()

        found["a"].script = silent
        client = RelayClient(f"unix:{found['a'].path}")
        answers = [await client.connect() for _ in range(3)]
        waiting = [asyncio.create_task(one.send("POST", "/", b"{}")) for one in answers]
        await until(lambda: len(found["a"].exchanges) == 3)
        client.close()
        for one in waiting:
            with pytest.raises(ReplicaLost):
                await one
        with pytest.raises(ReplicaUnreachable):
            await client.connect()


async def test_a_reader_that_pauses_stops_vllm() -> None:
    async with stand_ins("a") as found:
        sent = 0

        async def endless(exchange: Exchange) -> None:
            nonlocal sent
            exchange.begin()
            while not exchange.is_left:
                exchange.event({"x": "y" * 10_000})
                sent += 1
                await exchange.writer.drain()
                await asyncio.sleep(0)

        found["a"].script = endless
        client = RelayClient(f"unix:{found['a'].path}")
        answer = await asked(client)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.05)
        taken = len(await answer.read())
        assert HIGH_BYTES < taken < 2 * HIGH_BYTES
        await until(lambda: sent > before)
        answer.release()
        client.close()
        await found["a"].exchanges[0].left()


async def test_get_gives_a_body_or_fails() -> None:
    async with stand_ins("a") as found:
        standing: StandIn = found["a"]
        standing.metrics = b"m 1\n"
        client = RelayClient(f"unix:{standing.path}")
        assert await client.get("/metrics") == b"m 1\n"

        async def refuses(exchange: Exchange) -> None:
            exchange.whole(b"", 503)

        standing.script = refuses
        with pytest.raises(ReplicaLost, match="/other was answered with 503"):
            await client.get("/other")
        client.close()
