"""One request, from a replica to the client: retries, deadlines, and what ends it."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    Cancelled,
    DeadlineExceeded,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
    Unavailable,
)
from headwater_server.lm.text_generate import GenerateAnswer
from headwater_server.telemetry.recorder import recorder
from headwater_server.vllm.answers import ChunkAnswer, GenerateRelay, RelayedAnswer, TokenCount
from headwater_server.vllm.relay import Relay
from tests.app.dispatch.stand_in import pass_time
from tests.app.serving import until
from tests.app.vllm.stand_in import (
    Bench,
    Exchange,
    Script,
    benched,
    chunk,
    completion,
    error,
    hangs,
    request,
    says,
    usage,
)

GOOD = says(chunk("a", 1), chunk("b", 2, finish="stop"), usage(3, 2))


def form(**body: Any) -> RelayedAnswer:
    return ChunkAnswer(request(**body), TokenCount(recorder().language_model("m")))


def opened(bench: Bench, id: str = "id", scope: str = "", **body: Any) -> Relay:
    return bench.dispatcher.open(request(**body), id, scope)


async def told(relay: Relay, answer: RelayedAnswer | None = None) -> str:
    """The text of a stream."""
    events = [json.loads(event) async for event in relay.events(answer or form())]  # type: ignore[arg-type]
    return "".join(one["choices"][0]["text"] for one in events if one["choices"])


async def whole(bench: Bench, **body: Any) -> Any:
    return json.loads(await opened(bench, stream=False, **body).whole(form(stream=False, **body)))


async def failure(relay: Relay, kind: type[HeadwaterError]) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as caught:
        await asyncio.wait_for(told(relay), 10)
    assert type(caught.value) is kind, caught.value
    return caught.value


async def loses(exchange: Exchange) -> None:
    exchange.lose()


async def silent(exchange: Exchange) -> None:
    await exchange.left()


async def test_a_request_has_its_route_an_id_of_its_own_and_its_keys_salt() -> None:
    async with benched() as bench:
        assert await told(opened(bench, scope="key")) == "ab"
        assert await told(opened(bench)) == "ab"
        one, two = bench.exchanges
        assert one.path == "/v1/completions"
        assert one.headers["x-request-id"] != two.headers["x-request-id"]
        assert len(one.body["cache_salt"]) == 64
        assert "cache_salt" not in two.body
        assert bench.replica.connections <= 2


async def test_a_whole_answer() -> None:
    async with benched() as bench:

        async def script(exchange: Exchange) -> None:
            exchange.whole(completion("a", "b"))

        bench.replica.script = script
        assert [one["text"] for one in (await whole(bench, n=2))["choices"]] == ["a", "b"]


# Replicas that are lost


async def breaks_off(exchange: Exchange) -> None:
    exchange.begin()
    exchange.end(done=False)


@pytest.mark.parametrize(
    "script",
    [loses, breaks_off, says(error("EngineCore died", 500)), says(error("EngineCore died", 500), status=500),
     says(chunk("", 0, finish="abort"))],
)  # fmt: skip
async def test_a_request_of_a_lost_replica_goes_to_another_if_the_client_has_nothing(script: Script) -> None:
    async with benched("a", "b") as bench:
        bench.replicas["a"].script = script
        bench.replicas["b"].script = GOOD
        assert await told(opened(bench)) == "ab"
        assert [len(one.exchanges) for one in bench.replicas.values()] == [1, 1]


async def test_a_whole_answer_of_a_lost_replica_comes_from_another() -> None:
    async with benched("a", "b") as bench:

        async def half(exchange: Exchange) -> None:
            exchange.writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"id')
            exchange.lose()

        async def good(exchange: Exchange) -> None:
            exchange.whole(completion("a"))

        bench.replicas["a"].script = half
        bench.replicas["b"].script = good
        assert (await whole(bench))["choices"][0]["text"] == "a"


async def test_after_its_first_event_a_request_of_a_lost_replica_fails() -> None:
    async with benched("a", "b") as bench:

        async def script(exchange: Exchange) -> None:
            exchange.begin()
            exchange.event(chunk("a", 1))
            exchange.lose()

        bench.replicas["a"].script = script
        found = await failure(opened(bench), ReplicaLost)
        assert found.retry_after_s
        assert bench.replicas["b"].exchanges == []


async def test_a_request_is_sent_twice_at_most() -> None:
    async with benched("a", "b", "c") as bench:
        for one in bench.replicas.values():
            one.script = loses
        await failure(opened(bench), ReplicaLost)
        assert len(bench.exchanges) == 2


async def test_without_another_replica_a_lost_one_is_unavailable() -> None:
    async with benched() as bench:
        bench.replica.script = loses
        found = await failure(opened(bench), Unavailable)
        assert found.retry_after_s
        await failure(opened(bench), Unavailable)
        assert len(bench.exchanges) == 1


async def test_a_request_that_fails_on_a_good_connection_costs_others_no_replica() -> None:
    async with benched() as bench:
        bench.replica.script = says(error("Internal server error", 500))
        await failure(opened(bench), ReplicaLost)
        assert len(bench.exchanges) == 2
        bench.replica.script = GOOD
        assert await told(opened(bench)) == "ab"


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (says(error("wrong", 400, "stop"), status=400), BadRequest),
        (says(error("broken", 500), status=500), CallableFailed),
    ],
)
async def test_what_a_replica_refuses_is_not_sent_again(script: Script, kind: type[HeadwaterError]) -> None:
    async with benched("a", "b") as bench:
        for one in bench.replicas.values():
            one.script = script
        await failure(opened(bench), kind)
        assert len(bench.exchanges) == 1


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("body", [[], b"no json", b'{"error": {"message": "\xff"}}', {**completion("a"), "usage": 1}])
async def test_an_answer_of_another_form_fails_the_request_and_is_not_sent_again(body: Any, streams: bool) -> None:
    async def script(exchange: Exchange) -> None:
        exchange.whole(body)

    async with benched("a", "b") as bench:
        for one in bench.replicas.values():
            one.script = says(body) if streams else script
        with pytest.raises(CallableFailed, match="model `m`: expected an answer in the form of vLLM's API, got "):
            await (told(opened(bench)) if streams else whole(bench))
        assert len(bench.exchanges) == 1


async def test_another_number_of_choices_than_the_generate_extension_has_fails_the_request() -> None:
    async def script(exchange: Exchange) -> None:
        exchange.whole(completion("a", "b"))

    async with benched() as bench:
        bench.replica.script = script
        answer = GenerateRelay(GenerateAnswer("m"), TokenCount(recorder().language_model("m")))
        with pytest.raises(CallableFailed, match="expected an answer in the form of vLLM's API"):
            await opened(bench, stream=False).whole(answer)


FULL = [says(error("full", 503), status=503), says(error("full", 503))]


@pytest.mark.parametrize("full", FULL)
async def test_a_request_that_finds_a_replica_full_goes_to_another(full: Script) -> None:
    async with benched("a", "b") as bench:
        bench.replicas["a"].script = full
        bench.replicas["b"].script = GOOD
        assert await told(opened(bench)) == "ab"
        bench.replicas["b"].script = full
        assert (await failure(opened(bench), QueueFull)).retry_after_s


@pytest.mark.parametrize("full", FULL)
async def test_without_another_replica_a_full_one_is_asked_once(full: Script) -> None:
    async with benched() as bench:
        bench.replica.script = full
        await failure(opened(bench), QueueFull)
        assert len(bench.exchanges) == 1


# Deadlines


async def test_a_stream_that_gives_nothing_ends_at_the_deployments_timeout() -> None:
    for script in (silent, hangs):
        async with benched(timeout_s=0.2) as bench:
            bench.replica.script = script
            assert "sent no output for 0.2 s" in str(await failure(opened(bench), DeadlineExceeded))
            await bench.exchanges[0].left()


async def test_each_event_begins_the_timeout_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with benched(timeout_s=50) as bench:

        async def script(exchange: Exchange) -> None:
            exchange.begin()
            for number in range(30):
                exchange.event(chunk("a", number + 1))
                pass_time(monkeypatch, 3)
                await asyncio.sleep(0.01)
            exchange.end()

        bench.replica.script = script
        assert await told(opened(bench)) == "a" * 30


@pytest.mark.slow
async def test_no_timeout_runs_while_the_client_takes_its_time() -> None:
    async with benched(timeout_s=0.2) as bench:
        taken = []
        async for event in opened(bench).events(form()):
            taken.append(event)
            await asyncio.sleep(0.5)
        assert len(taken) == 2


@pytest.mark.parametrize("streams", [True, False])
async def test_the_clients_own_timeout_is_for_the_whole(streams: bool) -> None:
    async with benched() as bench:
        bench.replica.script = hangs
        relay = opened(bench, timeout_s=0.2, stream=streams)
        with pytest.raises(DeadlineExceeded, match=r"the deadline of 0\.2 s passed"):
            await (told(relay) if streams else relay.whole(form()))
        await bench.exchanges[0].left()


# What else ends a request


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("script", [silent, hangs])
async def test_a_request_is_cancelled_by_its_id(script: Script, streams: bool) -> None:
    async with benched() as bench:
        bench.replica.script = script
        relay, other = opened(bench, "one", stream=streams), opened(bench, "two")
        reading = asyncio.create_task(told(relay) if streams else relay.whole(form()))
        await until(lambda: len(bench.exchanges) == 1)
        assert bench.dispatcher.cancel("none") == 0
        assert bench.dispatcher.cancel("one") == 1
        assert bench.dispatcher.cancel("one") == 0
        with pytest.raises(Cancelled):
            await reading
        await bench.exchanges[0].left()
        assert other.is_running
        other.close()


async def test_a_failed_request_reads_nothing_of_another() -> None:
    """Its answer was complete before it failed; another request then has a connection of its own."""

    async with benched() as bench:
        slow = opened(bench, "slow").events(form())
        assert b'"text":"a"' in await anext(slow)
        bench.dispatcher.cancel("slow")
        assert await told(opened(bench)) == "ab"
        with pytest.raises(Cancelled):
            await anext(slow)


async def test_a_client_that_leaves_ends_its_connection_only() -> None:
    async with benched() as bench:
        bench.replica.script = hangs
        leaving, staying = (opened(bench).events(form()) for _ in range(2))
        await anext(leaving)
        await anext(staying)
        await leaving.aclose()
        await bench.exchanges[0].left()
        assert not bench.exchanges[1].is_left
        assert bench.dispatcher.in_flight == 1
        await staying.aclose()
        whole = asyncio.create_task(opened(bench, stream=False).whole(form()))
        await until(lambda: len(bench.exchanges) == 3)
        whole.cancel()
        await bench.exchanges[2].left()
        await asyncio.wait([whole])


@pytest.mark.slow
async def test_a_request_that_is_over_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for script in [GOOD, loses, hangs, says(error("wrong", 400), status=400)]:
            async with benched(timeout_s=5) as bench:
                bench.replica.script = script
                relay = opened(bench, timeout_s=5)
                events = relay.events(form())
                try:
                    await anext(events)
                except HeadwaterError as raised:
                    raised.__traceback__ = None
                await events.aclose()
                gone = weakref.ref(relay)
                del relay, events
                await asyncio.sleep(0.01)
                assert gone() is None, script
    finally:
        gc.enable()
