"""Requests for the models of a repository: how they reach a replica's Triton, and what becomes of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.wire.open_requests import REQUEST, is_open
from headwater_server.control.load import Moment
from headwater_server.control.routing import State
from headwater_server.errors import (
    BadRequest,
    DeadlineExceeded,
    HeadwaterError,
    QueueFull,
    RateLimited,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from headwater_server.triton.relayed_calls import RelayedRequest, TritonAnswer
from headwater_server.triton.repository_dispatcher import TritonDispatcher
from tests.app.serving import until
from tests.app.triton.stand_in import (
    INFER,
    RelayBench,
    RelayedExchange,
    answers,
    benched,
    events,
    hangs,
    repository_route,
)

STREAM = RelayedRequest("POST", "/v2/models/m/generate_stream", b"{}")


async def collected(bench: RelayBench, request: RelayedRequest = STREAM) -> list[Any]:
    """All that a stream gives."""
    return [event async for event in bench.dispatcher.events(request)]


def _have_got(bench: RelayBench, count: int) -> bool:
    return sum(bench.counts()) == count


@contextlib.asynccontextmanager
async def asking(bench: RelayBench, count: int = 1) -> AsyncIterator[list[asyncio.Task[TritonAnswer]]]:
    """Requests in flight, which replicas have got; at the end of the block they are over."""
    before = sum(bench.counts())
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(bench.dispatcher.ask(INFER)))
        await until(functools.partial(_have_got, bench, before + number + 1))
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TestRelay:
    async def test_a_request_arrives_as_it_is(self) -> None:
        body = bytes(range(256)) * 10
        request = RelayedRequest("POST", "/v2/models/a%20b/infer", body, "application/octet-stream", "X-Y: 1\r\n")
        async with benched() as bench:
            await bench.dispatcher.ask(request)
            (exchange,) = bench.replica.exchanges
        assert exchange.line == "POST /v2/models/a%20b/infer HTTP/1.1"
        assert exchange.body == body
        assert exchange.headers["Content-Type"] == "application/octet-stream"
        assert exchange.headers["X-Y"] == "1"

    async def test_an_answer_comes_as_it_is_with_the_headers_that_clients_get(self) -> None:
        body = b'{"x":1}\0\1\2'
        async with benched() as bench:
            bench.replica.script = answers(
                body, 200, content_type="application/octet-stream", inference_header_content_length="7", server="x"
            )
            answer = await bench.dispatcher.ask(INFER)
        assert (answer.status, answer.body) == (200, body)
        assert dict(answer.headers) == {
            b"content-type": b"application/octet-stream",
            b"inference-header-content-length": b"7",
        }

    @pytest.mark.parametrize("status", [400, 404, 405, 500, 501, 503])
    async def test_an_error_of_triton_is_an_answer(self, status: int) -> None:
        async with benched() as bench:
            bench.replica.script = answers(b'{"error":"x"}', status, allow="GET")
            answer = await bench.dispatcher.ask(INFER)
            assert (answer.status, answer.body) == (status, b'{"error":"x"}')
            assert (b"allow", b"GET") in answer.headers
            assert bench.losses == []

    async def test_a_large_answer_comes_whole(self) -> None:
        body = b"x" * 3_000_000
        async with benched() as bench:
            bench.replica.script = answers(body)
            assert (await bench.dispatcher.ask(INFER)).body == body

    async def test_a_connection_is_used_again(self) -> None:
        async with benched() as bench:
            for _ in range(3):
                await bench.dispatcher.ask(INFER)
            assert len({exchange.writer for exchange in bench.replica.exchanges}) == 1

    @pytest.mark.parametrize(
        ("pattern", "kept"),
        [
            ("", []),
            ("x-.*", [("x-a", "1"), ("X-B", "2")]),
            ("x-a|other", [("x-a", "1"), ("other", "3")]),
            (".*", [("x-a", "1"), ("X-B", "2"), ("other", "3")]),
        ],
    )
    async def test_headers_that_match_the_pattern_are_passed_on(
        self, pattern: str, kept: list[tuple[str, str]]
    ) -> None:
        headers = [(b"x-a", b"1"), (b"X-B", b"2"), (b"other", b"3"), (b"x-" + b"a" * 200, b"4")]
        headers += [(b"content-length", b"5"), (b"Transfer-Encoding", b"chunked"), (b"x-api-key", b"secret")]
        async with benched(header_pattern=pattern) as bench:
            assert bench.dispatcher.forwarded(headers) == kept


class TestReplicas:
    async def test_the_least_busy_replica_gets_a_request(self) -> None:
        async with benched("a", "b") as bench:
            for replica in bench.replicas.values():
                replica.script = hangs
            async with asking(bench, 5):
                assert sorted(bench.counts()) == [2, 3]
                assert bench.dispatcher.moment() == Moment(5, 5)
            bench.replicas["b"].script = answers()
            async with asking(bench) as (busy,):  # `a` is as idle as `b`, and is the first
                assert not busy.done()
                before = bench.counts()
                for _ in range(3):
                    await bench.dispatcher.ask(INFER)
                assert bench.counts() == [before[0], before[1] + 3]

    async def test_a_replica_that_is_retired_gets_nothing_new_and_finishes(self) -> None:
        async with benched("a", "b") as bench:
            opened = asyncio.Event()

            async def later(exchange: RelayedExchange) -> None:
                await opened.wait()
                exchange.answer(b"late")

            bench.replicas["a"].script = bench.replicas["b"].script = later
            async with asking(bench, 2) as tasks:
                assert bench.counts() == [1, 1]
                route = repository_route(bench.replicas)
                old, new = route.replicas
                bench.dispatcher.update(msgspec.structs.replace(route, replicas=(new,), retiring=(old,)))
                async with asking(bench, 2) as more:
                    assert bench.counts() == [1, 3]
                    opened.set()
                    assert {(await task).body for task in (*tasks, *more)} == {b"late"}

    async def test_a_lost_replica_is_an_error_and_the_request_is_not_sent_again(self) -> None:
        async with benched("a", "b") as bench:

            async def lose(exchange: RelayedExchange) -> None:
                exchange.lose()

            for replica in bench.replicas.values():
                replica.script = lose
            with pytest.raises(ReplicaLost) as caught:
                await bench.dispatcher.ask(INFER)
            assert caught.value.status == 503
            assert sum(bench.counts()) == 1
            assert len(bench.losses) == 1

    async def test_a_lost_replica_gets_nothing_more(self) -> None:
        async with benched("a", "b") as bench:

            async def lose(exchange: RelayedExchange) -> None:
                exchange.lose()

            bench.replicas["a"].script = lose
            failures = 0
            for _ in range(6):
                try:
                    await bench.dispatcher.ask(INFER)
                except ReplicaLost:
                    failures += 1
            assert bench.counts()[0] == failures <= 1
            assert sum(bench.counts()) == 6

    async def test_a_replica_that_is_lost_in_its_answer_is_an_error(self) -> None:
        async with benched() as bench:

            async def lose(exchange: RelayedExchange) -> None:
                exchange.writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
                await exchange.writer.drain()
                exchange.writer.close()

            bench.replica.script = lose
            with pytest.raises(ReplicaLost):
                await bench.dispatcher.ask(INFER)

    async def test_another_replica_is_tried_if_one_is_not_reached(self) -> None:
        async with benched("a", "b") as bench:
            bench.replicas["a"].close()
            for _ in range(3):
                assert (await bench.dispatcher.ask(INFER)).status == 200
            assert bench.counts() == [0, 3]

    async def test_without_a_replica_that_is_reached_the_request_fails(self) -> None:
        async with benched("a", "b") as bench:
            for replica in bench.replicas.values():
                replica.close()
            with pytest.raises(ReplicaUnreachable):
                await bench.dispatcher.ask(INFER)
            with pytest.raises(Unavailable) as caught:
                await bench.dispatcher.ask(INFER)
            assert caught.value.status == 503


class TestLimits:
    async def test_a_deadline_ends_the_request(self) -> None:
        async with benched(timeout_s=0.2) as bench:
            bench.replica.script = hangs
            with pytest.raises(DeadlineExceeded, match=r"the deadline of 0\.2 s passed") as caught:
                await bench.dispatcher.ask(INFER)
            assert caught.value.status == 504
            await bench.replica.exchanges[0].has_left()
            assert bench.losses == []
            bench.replica.script = answers()
            assert (await bench.dispatcher.ask(INFER)).status == 200

    async def test_more_requests_than_the_limit_are_refused(self) -> None:
        async with benched(max_requests=2) as bench:
            bench.replica.script = hangs
            async with asking(bench, 2):
                with pytest.raises(
                    QueueFull, match=r"2 requests are in flight, as many as options\.max_requests"
                ) as caught:
                    await bench.dispatcher.ask(INFER)
                with pytest.raises(QueueFull):
                    await collected(bench)
                assert caught.value.status == 429
                assert bench.counts() == [2]
            bench.replica.script = answers()
            assert (await bench.dispatcher.ask(INFER)).status == 200

    async def test_a_client_that_leaves_ends_its_request(self) -> None:
        async with benched() as bench:
            bench.replica.script = hangs
            async with asking(bench) as (task,):
                task.cancel()
                await bench.replica.exchanges[0].has_left()
            assert bench.losses == []

    async def test_a_deployment_that_drains_refuses_requests(self) -> None:
        async with benched(state=State.DRAINING) as bench:
            dispatcher = bench.dispatcher
            for ask in (
                lambda: dispatcher.ask(INFER), lambda: dispatcher.change_model("m", INFER), lambda: collected(bench)
            ):  # fmt: skip
                with pytest.raises(HeadwaterError) as caught:
                    await ask()
                assert caught.value.status == 503
            assert bench.counts() == [0]

    async def test_a_key_that_is_barred_is_refused_and_others_are_not(self) -> None:
        async with benched(barred={"bad": time.time() + 1000}) as bench:
            for ask in (bench.dispatcher.ask(INFER, "good"), bench.dispatcher.ask(INFER)):
                assert (await ask).status == 200
            with pytest.raises(RateLimited):
                await bench.dispatcher.ask(INFER, "bad")

    async def test_the_deployment_itself_takes_no_tensors(self) -> None:
        async with benched() as bench:
            request: Any = None
            with pytest.raises(
                BadRequest, match="`models` is a model repository, expected one of its models: `m`, `n`"
            ):
                await bench.dispatcher.infer(request)
            with pytest.raises(BadRequest):
                bench.dispatcher.stream(request)
            with pytest.raises(BadRequest):
                bench.dispatcher.check_whole()


class TestEvents:
    async def test_events_come_as_they_are_sent(self) -> None:
        async with benched() as bench:
            go_on = asyncio.Event()

            async def script(exchange: RelayedExchange) -> None:
                exchange.begin()
                exchange.piece(b'data: {"a":1}\n\n')
                await go_on.wait()
                exchange.piece(b'data: {"a":2}\n\n')
                exchange.end()

            bench.replica.script = script
            stream = bench.dispatcher.events(STREAM)
            assert await anext(stream) == b'{"a":1}'
            assert bench.dispatcher.in_flight == 1
            go_on.set()
            assert [event async for event in stream] == [b'{"a":2}']

    @given(st.lists(st.binary(max_size=30).filter(lambda data: b"\n" not in data), max_size=5), st.data())
    def test_events_are_whole_however_they_are_cut(self, values: list[bytes], data: Any) -> None:
        whole = b"".join(b"data: %b\n\n" % value for value in values)
        cuts = sorted(data.draw(st.sets(st.integers(1, max(len(whole) - 1, 1)), max_size=6)))
        pieces = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]

        async def ask() -> list[Any]:
            async with benched() as bench:
                bench.replica.script = events(*[piece for piece in pieces if piece])
                return await collected(bench)

        assert asyncio.run(ask()) == values

    async def test_a_stream_without_events_is_empty(self) -> None:
        async with benched() as bench:
            bench.replica.script = events()
            assert await collected(bench) == []

    @pytest.mark.parametrize("status", [400, 404, 500])
    async def test_an_error_before_the_first_event_is_the_answer_itself(self, status: int) -> None:
        async with benched() as bench:
            bench.replica.script = answers(b'{"error":"x"}', status)
            (answer,) = await collected(bench)
        assert answer == TritonAnswer(status, [(b"content-type", b"application/json")], b'{"error":"x"}')

    async def test_a_replica_that_is_lost_in_a_stream_is_an_error_after_the_events(self) -> None:
        async with benched() as bench:

            async def script(exchange: RelayedExchange) -> None:
                exchange.begin()
                exchange.piece(b"data: 1\n\n")
                await exchange.writer.drain()
                exchange.writer.close()

            bench.replica.script = script
            stream = bench.dispatcher.events(STREAM)
            assert await anext(stream) == b"1"
            with pytest.raises(ReplicaLost):
                await anext(stream)
            assert len(bench.losses) == 1

    async def test_the_deadline_is_the_longest_time_without_an_event(self) -> None:
        async with benched(timeout_s=0.2) as bench:

            async def script(exchange: RelayedExchange) -> None:
                exchange.begin()
                exchange.piece(b"data: 1\n\n")
                await exchange.has_left()

            bench.replica.script = script
            stream = bench.dispatcher.events(STREAM)
            assert await anext(stream) == b"1"
            with pytest.raises(DeadlineExceeded):
                await anext(stream)

    async def test_a_client_that_reads_slowly_is_not_the_replicas_fault(self) -> None:
        async with benched(timeout_s=0.2) as bench:

            async def script(exchange: RelayedExchange) -> None:
                exchange.begin()
                exchange.piece(b"data: 1\n\ndata: 2\n\n")
                exchange.end()

            bench.replica.script = script
            stream = bench.dispatcher.events(STREAM)
            assert await anext(stream) == b"1"
            passed = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_later(0.4, passed.set_result, None)  # twice the deadline
            await passed
            assert [event async for event in stream] == [b"2"]

    async def test_a_stream_that_is_closed_ends_at_the_replica(self) -> None:
        async with benched() as bench:

            async def script(exchange: RelayedExchange) -> None:
                exchange.begin()
                exchange.piece(b"data: 1\n\n")
                await exchange.has_left()

            bench.replica.script = script
            stream = bench.dispatcher.events(STREAM)
            await anext(stream)
            await stream.aclose()
            assert bench.dispatcher.in_flight == 0
            await bench.replica.exchanges[0].has_left()
            assert bench.losses == []


class TestNames:
    """The name by which a model learns whether its request is open."""

    @pytest.mark.parametrize("how", ["leaves", "deadline", "fails", "is lost", "ends"])
    @pytest.mark.parametrize("action", ["generate", "generate_stream"])
    async def test_a_request_is_open_until_it_ends_in_any_way(self, action: str, how: str) -> None:
        go_on = asyncio.Event()

        async def script(exchange: RelayedExchange) -> None:
            await go_on.wait()
            exchange.lose() if how == "is lost" else exchange.answer()

        async with benched(timeout_s=0.5 if how == "deadline" else 60) as bench:
            bench.replica.script = script
            request = RelayedRequest("POST", f"/v2/models/m/{action}", b'{"x":1.50,"headwater_request":"a client\'s"}')
            ask = bench.dispatcher.ask(request) if action == "generate" else collected(bench, request)
            task = asyncio.create_task(ask)
            await until(lambda: bench.counts() == [1])
            (exchange,) = bench.replica.exchanges
            name = json.loads(exchange.body)[REQUEST]
            assert exchange.body == b'{"x":1.50,"headwater_request":"%b"}' % name.encode()
            assert is_open(bench.folder, name)
            if how == "leaves":
                task.cancel()
            elif how == "fails":
                bench.dispatcher.under_way(None)[0](Unavailable("the end"))
            elif how != "deadline":
                go_on.set()
            await asyncio.gather(task, return_exceptions=True)
            assert not is_open(bench.folder, name)
            go_on.set()

    @pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b"\xff", b'{"a":1,"a"}'])
    async def test_a_body_that_is_no_object_is_tritons_to_refuse(self, body: bytes) -> None:
        async with benched() as bench:
            await collected(bench, STREAM._replace(body=body))
            assert bench.replica.exchanges[0].body == body


class TestEnd:
    async def test_what_is_under_way_is_failed_with_an_error(self) -> None:
        async with benched("a", "b") as bench:
            for replica in bench.replicas.values():
                replica.script = hangs
            async with asking(bench, 3) as tasks:
                count = len(bench.dispatcher.under_way(["a"]))
                assert (count, len(bench.dispatcher.under_way(["b"]))) in {(1, 2), (2, 1)}
                assert bench.dispatcher.under_way([]) == []
                for fail in bench.dispatcher.under_way(None):
                    fail(Unavailable("the end"))
                    fail(Unavailable("only the first error counts"))
                for task in tasks:
                    with pytest.raises(Unavailable, match=r"^the end$"):
                        await task
                assert bench.dispatcher.under_way(None) == []
            assert bench.losses == []

    async def test_closing_ends_what_is_under_way(self) -> None:
        async with benched() as bench:
            bench.replica.script = hangs
            async with asking(bench) as (task,):
                bench.dispatcher.close()
                with pytest.raises(HeadwaterError):
                    await task

    @pytest.mark.parametrize("state", [State.LOADING, State.READY, State.UNAVAILABLE, State.FAILED])
    async def test_a_route_without_replicas_is_unavailable(self, state: State) -> None:
        dispatcher = TritonDispatcher(repository_route({}, state=state))
        for asked in (dispatcher.ask(INFER), dispatcher.change_model("m", INFER)):
            with pytest.raises(HeadwaterError) as caught:
                await asked
            assert caught.value.status == 503
        assert dispatcher.in_flight == 0
        dispatcher.close()
