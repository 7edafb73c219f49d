"""A language model's requests: which replica has them, how they end, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import weakref

import msgspec
import pytest

from headwater.signature import LanguageModelSpec
from headwater.wire.lm import Load, Open, Post, decode_message
from headwater_server.control.load import Moment
from headwater_server.control.routing import State
from headwater_server.dispatch.pool import LOST_RETRY_S
from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    Cancelled,
    DeadlineExceeded,
    HeadwaterError,
    ReplicaLost,
    ReplicaUnreachable,
    Unavailable,
)
from headwater_server.lm.engine_channel import LOAD_FRESH_S, REMEMBERED_ENDS
from headwater_server.lm.language_model import AVOID_S, LmDispatcher
from headwater_server.lm.sequence import Generation
from tests.app.dispatch.stand_in import pass_time
from tests.app.lm.stand_in import LIMITS, SIGNATURE, Bench, Replica, event, route_of, settle, spec, until
from tests.counted import count_from_zero, counts_of


async def failure(generation: Generation) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as caught:
        await asyncio.wait_for(generation.news(), 5)
    return caught.value


# Replicas


async def test_the_way_to_a_replica_is_made_ready_before_the_first_request() -> None:
    bench = Bench()
    (nothing,) = bench.replica.opened
    ((_, _, _, (raw,)),) = nothing.inputs
    assert decode_message(raw) == Post("")
    assert bench.replica.messages == []


async def test_all_sequences_of_a_request_go_to_the_replica_with_the_fewest() -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    bench.dispatcher.open("one", [spec(), spec(), spec()])
    bench.dispatcher.open("two", [spec()])
    bench.dispatcher.open("three", [spec()])
    await settle()
    assert [submit.request_id for submit in a.submits.values()] == ["one"] * 3
    assert [submit.request_id for submit in b.submits.values()] == ["two", "three"]


async def test_what_other_workers_have_on_a_replica_counts_too() -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    first = bench.dispatcher.open("first", [spec()])
    await settle()
    a.say(event(0, 0, [1]), load=Load(4, 6, 30))  # nine of them are not ours
    await first.news()
    for _ in range(9):
        bench.dispatcher.open("next", [spec()])
    await settle()
    assert (len(a.submits), len(b.submits)) == (1, 9)
    assert bench.dispatcher.load == Load(4, 6, 30)
    bench.dispatcher.open("next", [spec()])
    bench.dispatcher.open("next", [spec()])
    await settle()
    assert (len(a.submits), len(b.submits)) == (2, 10)


async def test_a_lost_replica_fails_what_it_had_and_gets_no_more() -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    on_a, on_b = (bench.dispatcher.open(id, [spec()]) for id in ("a", "b"))
    await settle()
    for replica in (a, b):
        replica.say(event(0, 0, [1]))
    assert await on_a.news()
    a.lose()
    assert type(await failure(on_a)) is ReplicaLost
    for _ in range(3):
        bench.dispatcher.open("next", [spec()])
    await settle()
    assert len(b.submits) == 4
    assert await on_b.news()
    b.lose()
    assert type(await failure(on_b)) is ReplicaLost
    with pytest.raises(Unavailable, match="its replica ended"):
        bench.dispatcher.open("last", [spec()])


async def test_a_request_that_a_lost_replica_never_had_goes_to_another() -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    a.is_gone = True
    request = bench.dispatcher.open("mine", [spec(), spec()])
    await settle()
    assert [submit.request_id for submit in b.submits.values()] == ["mine"] * 2
    b.say(event(0, 0, [1], finish="stop"), event(1, 0, [2], finish="stop"))
    assert len(await request.news()) == 2
    only = Bench()
    only.replica.is_gone = True
    alone = only.dispatcher.open("mine", [spec(), spec()])
    assert type(await failure(alone)) is ReplicaUnreachable


async def test_a_request_that_a_lost_replica_never_had_does_not_go_to_one_of_a_reloaded_model() -> None:
    bench = Bench("a")
    bench.replica.is_gone = True
    request = bench.dispatcher.open("mine", [spec()])
    bench.dispatcher.update(route_of("b", retiring=bench.dispatcher.route.replicas, generation=1))
    assert isinstance(await failure(request), Unavailable)
    assert not bench.replicas["b"].submits


@pytest.mark.parametrize("never_came", [False, True])
async def test_what_was_on_its_way_to_a_lost_replica_goes_to_another_if_it_never_came(never_came: bool) -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    had, _ = bench.dispatcher.open("had", [spec()]), bench.dispatcher.open("b", [spec(), spec()])
    await settle()
    a.answers_posts.clear()
    a.loses_posts = never_came
    request = bench.dispatcher.open("mine", [spec()])
    await settle()
    assert len(a.posts) == 2
    a.lose()
    assert type(await failure(had)) is ReplicaLost
    if not never_came:
        assert type(await failure(request)) is ReplicaLost
        assert len(b.submits) == 2
        return
    await settle()
    assert [submit.request_id for submit in b.submits.values()] == ["b", "b", "mine"]
    b.say(event(2, 0, [1], finish="stop"))
    assert await request.news()


async def test_a_replica_that_refuses_gets_nothing_for_a_while_if_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    a.answers_open.clear()
    bench.dispatcher.open("refused", [spec()])
    await settle()
    a.say(closed="the replica is ending")
    a.answers_open.set()
    await until(lambda: b.submits)
    bench.dispatcher.open("next", [spec()])
    await settle()
    assert [submit.request_id for submit in b.submits.values()] == ["refused", "next"]
    pass_time(monkeypatch, AVOID_S)
    bench.dispatcher.open("later", [spec()])
    await settle()
    assert [submit.request_id for submit in a.submits.values()] == ["later"]


async def test_what_there_is_to_do_is_told_in_sequences_of_this_worker_and_since_when_some_wait() -> None:
    bench = Bench("a", "b")
    a, _ = bench.replicas.values()
    assert bench.dispatcher.moment() == Moment(0, 0, 0, 0.0)
    request = bench.dispatcher.open("first", [spec(), spec()])
    bench.dispatcher.open("second", [spec()])
    await settle()
    assert bench.dispatcher.moment() == Moment(3, 3, 0, 0.0)
    a.say(event(0, 0, [1]), load=Load(4, 2, 30))
    await request.news()
    assert bench.dispatcher.moment() == Moment(3, 3, 2, 0.0)  # looked at for the first time
    await until(lambda: bench.dispatcher.moment().wait_s > 0.01)
    a.say(event(0, 1, [1]), load=Load(6, 0, 30))
    await request.news()
    assert bench.dispatcher.moment() == Moment(3, 3, 0, 0.0)


async def test_a_load_of_long_ago_keeps_nothing_from_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    first = bench.dispatcher.open("first", [spec()])
    await settle()
    a.say(event(0, 0, [1], finish="stop"), load=Load(31, 4, 300))
    assert await first.news()
    assert bench.dispatcher.load == Load(31, 4, 300)
    bench.dispatcher.open("b", [spec()])
    pass_time(monkeypatch, LOAD_FRESH_S)
    assert bench.dispatcher.load == Load()
    bench.dispatcher.open("a", [spec()])
    await settle()
    assert (list(a.submits), list(b.submits)) == ([0, 1], [0])


async def test_a_replica_that_was_lost_but_stays_in_the_table_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater_server.dispatch.pool.LOST_RETRY_S", 0.01)
    assert LOST_RETRY_S > 1

    bench = Bench()
    before = bench.replica
    request = bench.dispatcher.open("q", [spec()])
    await settle()
    before.lose()
    assert isinstance(await failure(request), ReplicaLost)
    await until(lambda: bench.replica is not before)
    assert before.is_closed
    assert len(bench.replica.opened) == 1
    bench.dispatcher.open("q", [spec()])
    await settle()
    assert len(bench.replica.submits) == 1


async def test_a_channel_that_ended_is_followed_by_another_of_another_name() -> None:
    bench = Bench()
    request = bench.dispatcher.open("q", [spec()])
    await settle()
    bench.replica.say(closed="its worker left 500 tokens unread for 6 s")
    error = await failure(request)
    assert type(error) is Unavailable
    assert "its worker left 500 tokens unread" in error.message
    again = bench.dispatcher.open("q", [spec()])
    await settle()
    first, second = bench.replica.channels
    assert first.name != second.name
    bench.replica.say(event(0, 0, [1], finish="stop"))
    assert await again.news()
    assert [type(message) for message in bench.replica.messages] == [Open, Post, Open, Post]


async def test_a_replica_that_leaves_the_table_ends_with_its_requests() -> None:
    bench = Bench("a", "b")
    a, b = bench.replicas.values()
    gone, unsent = bench.dispatcher.open("gone", [spec()]), None
    await settle()
    bench.dispatcher.open("there", [spec()])
    await settle()
    a.answers_posts.clear()
    unsent = bench.dispatcher.open("unsent", [spec()])  # to a, and not on its way yet
    bench.dispatcher.update(route_of("b"))
    assert type(await failure(gone)) is ReplicaLost
    assert a.is_closed
    await settle()
    assert [submit.request_id for submit in b.submits.values()] == ["there", "unsent"]
    b.say(event(1, 0, [1], finish="stop"))
    assert await unsent.news()
    bench.dispatcher.update(msgspec.structs.replace(route_of(), state=State.UNAVAILABLE, reason="it crashed"))
    with pytest.raises(Unavailable, match="model `lm` is UNAVAILABLE: it crashed"):
        bench.dispatcher.open("q", [spec()])
    assert b.is_closed


# The end


async def test_closing_ends_all_requests() -> None:
    bench = Bench("a", "b")
    requests = [bench.dispatcher.open("q", [spec()]) for _ in range(4)]
    await settle()
    requests.append(bench.dispatcher.open("q", [spec()]))  # not sent yet
    bench.dispatcher.close()
    for request in requests:
        assert isinstance(await failure(request), Unavailable)
    assert bench.dispatcher.in_flight == 0
    assert all(replica.is_closed for replica in bench.replicas.values())


async def test_what_no_replica_had_goes_to_none_that_is_about_to_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("a", "b")
    requests = [bench.dispatcher.open("q", [spec()]) for _ in range(2)]
    submitted: list[object] = []
    monkeypatch.setattr("headwater_server.lm.request.RequestRun.submit", lambda run, channel: submitted.append(channel))
    bench.dispatcher.close()
    for request in requests:
        assert isinstance(await failure(request), Unavailable)
    assert submitted == []


async def test_closing_in_the_turn_in_which_a_request_came_ends_it_too() -> None:
    bench = Bench()
    request = bench.dispatcher.open("q", [spec()])
    bench.dispatcher.close()
    assert isinstance(await failure(request), Unavailable)
    await settle()
    assert bench.replica.messages == []


async def test_while_the_server_drains_requests_are_answered_but_none_is_taken() -> None:
    bench = Bench()
    request = bench.dispatcher.open("q", [spec()])
    await settle()
    bench.dispatcher.is_draining = True
    with pytest.raises(Unavailable, match="the server is stopping"):
        bench.dispatcher.open("q", [spec()])
    assert bench.dispatcher.in_flight == 1
    bench.replica.say(event(0, 0, [1], finish="stop"))
    assert await request.news()
    assert await request.news() == []
    assert bench.dispatcher.in_flight == 0


async def test_requests_are_in_flight_until_they_are_read_to_the_end_or_closed() -> None:
    count_from_zero()
    bench = Bench()
    read, closed, failed, empty = (bench.dispatcher.open("q", [spec()] * count) for count in (1, 1, 1, 0))
    await settle()
    assert bench.dispatcher.in_flight == 4
    assert await empty.news() == []
    bench.replica.say(
        event(0, 0, [1, 2], finish="stop"), event(1, 0, [1]), event(2, 0, finish="error", error="no")
    )  # fmt: skip
    await read.news()
    assert bench.dispatcher.in_flight == 3
    assert await read.news() == []
    closed.close()
    await failure(failed)
    failed.close()
    assert bench.dispatcher.in_flight == 0
    counts = counts_of(bench.dispatcher.route.name)
    found = [counts.total(f"headwater_{name}") for name in ("sequences", "prompt_tokens", "generated_tokens")]
    assert found == [1, 6, 3]
    first_tokens, first_token_ns = counts.sum("headwater_time_to_first_token_seconds")
    assert first_tokens == 2
    assert first_token_ns > 0


async def test_a_request_that_is_over_is_freed_without_the_garbage_collector() -> None:
    bench = Bench()
    gone = []
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            request = bench.dispatcher.open("q", [spec()])
            await settle()
            if number == 1:
                bench.replica.say(event(number, 0, [1]))
                await request.news()
            elif number == 2:
                bench.replica.say(event(number, 0, finish="error", error="no"))
                with contextlib.suppress(CallableFailed):
                    await request.news()
            request.close()
            gone.append(weakref.ref(request))
            del request
        await settle()
        assert [one() for one in gone[:2]] == [None, None]
        for number in range(3, 4 + REMEMBERED_ENDS):  # a channel knows those that ended last
            bench.dispatcher.open("q", [spec()])
            await settle()
            bench.replica.say(event(number, 0, [1], finish="stop"))
        await settle()
        assert gone[2]() is None
    finally:
        gc.enable()


# Deadlines


async def test_a_request_that_gets_no_token_ends_at_the_deployments_timeout() -> None:
    bench = Bench(timeout_s=0.03)
    error = await failure(bench.dispatcher.open("q", [spec(), spec()]))
    assert isinstance(error, DeadlineExceeded)
    assert error.message == "the deadline of 0.03 s passed while it waited in the queue"
    await settle()
    assert bench.replica.cancels == [0, 1]


async def test_each_token_begins_the_timeout_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(timeout_s=3)
    request = bench.dispatcher.open("q", [spec(1_000_000), spec(1_000_000)])
    await settle()
    for count in range(4):  # well over the timeout, with tokens of the one only
        pass_time(monkeypatch, 2)
        await settle()
        bench.replica.say(event(0, count, [1]))
        assert await request.news()
    pass_time(monkeypatch, 3)
    error = await failure(request)
    assert error.message == "the stream sent no output for 3 s"


@pytest.mark.parametrize("has_tokens", [False, True])
async def test_the_clients_own_timeout_is_for_the_whole(has_tokens: bool) -> None:
    bench = Bench(timeout_s=30)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    request = bench.dispatcher.open("q", [spec(1_000_000)], timeout_s=0.05)
    await settle()

    async def read() -> None:
        for count in itertools.count():
            if has_tokens:
                bench.replica.say(event(0, count, [1]))
            await request.news()

    with pytest.raises(DeadlineExceeded) as caught:
        await read()
    where = "while it was computed" if has_tokens else "while it waited in the queue"
    assert caught.value.message == f"the deadline of 0.05 s passed {where}"
    assert loop.time() - began_s < 5
    await settle()
    assert bench.replica.cancels == [0]


async def test_no_deadline_waits_for_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(timeout_s=20)
    request = bench.dispatcher.open("q", [spec()], timeout_s=30)
    await settle()
    bench.replica.say(event(0, 0, [1, 2], finish="stop"))
    await settle()
    pass_time(monkeypatch, 60)
    await settle()
    ((_, tokens),) = await request.news()
    assert tokens.tokens == [1, 2]
    assert await request.news() == []


# Cancel by the request's id


async def test_a_request_is_cancelled_by_its_id_on_the_replicas_that_have_it() -> None:
    bench = Bench("a", "b", "c")
    a, b, c = bench.replicas.values()
    mine = bench.dispatcher.open("mine", [spec(), spec()])
    other = bench.dispatcher.open("other", [spec()])
    again = bench.dispatcher.open("mine", [spec()])
    await settle()
    assert [len(one.submits) for one in (a, b, c)] == [2, 1, 1]
    assert bench.dispatcher.cancel("mine") == 3
    for request in (mine, again):
        error = await failure(request)
        assert isinstance(error, Cancelled)
    b.say(event(0, 0, [1], finish="stop"))
    assert await other.news()
    assert bench.dispatcher.cancel("mine") == bench.dispatcher.cancel("unknown") == 0
    await settle()
    assert (a.cancels, b.cancels, c.cancels) == ([0, 1], [], [0])
    assert [len(one.messages) for one in (a, b, c)] == [3, 2, 3]  # nobody else is told anything


async def test_a_request_that_no_replica_knows_yet_is_cancelled_here() -> None:
    bench = Bench()
    bench.replica.answers_open.clear()
    request = bench.dispatcher.open("mine", [spec(), spec()])
    await settle()
    assert bench.dispatcher.cancel("mine") == 2
    assert isinstance(await failure(request), Cancelled)
    bench.replica.answers_open.set()
    await settle()
    assert bench.replica.submits == {}


async def test_a_request_whose_tokens_are_all_there_is_not_cancelled_any_more() -> None:
    bench = Bench()
    request = bench.dispatcher.open("mine", [spec(), spec()])
    await settle()
    bench.replica.say(event(0, 0, [1], finish="stop"), event(1, 0, [1], finish="stop"))
    await settle()
    bench.replica.submits.clear()
    assert bench.dispatcher.cancel("mine") == 0
    assert len(await request.news()) == 2
    assert await request.news() == []


# Text


async def test_text_is_loaded_as_soon_as_the_folder_is_known_and_again_for_another() -> None:
    bench = Bench()
    await until(lambda: bench.loaded)
    await bench.dispatcher.text()
    await bench.dispatcher.text()
    bench.dispatcher.update(msgspec.json.decode(msgspec.json.encode(bench.dispatcher.route), type=type(route_of())))
    await bench.dispatcher.text()
    assert bench.loaded == ["/folder"]


async def test_text_is_loaded_anew_after_a_reload_of_the_same_folder() -> None:
    asked, dispatcher = texts("old", "new")
    assert await dispatcher.text() == "old"  # type: ignore[comparison-overlap]
    dispatcher.update(route_of("b", generation=1))
    assert await dispatcher.text() == "new"  # type: ignore[comparison-overlap]
    dispatcher.update(route_of("b", "c", generation=1))
    assert await dispatcher.text() == "new"  # type: ignore[comparison-overlap]
    assert asked == ["/folder", "/folder"]


def texts(*answers: object) -> tuple[list[str], LmDispatcher]:
    """A dispatcher whose loads have these answers, in turn; an exception is raised."""
    asked: list[str] = []
    left = list(answers)

    def load(spec: LanguageModelSpec) -> object:
        asked.append(spec.folder)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return asked, LmDispatcher(route_of("a"), lambda name, route: Replica(), load)  # type: ignore[arg-type]


async def test_a_text_that_cannot_be_loaded_is_said_why_and_tried_again_with_the_next_table(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, dispatcher = texts(ValueError("tokenizer.json: expected JSON"), "it")
    with pytest.raises(Unavailable, match=r"can't be loaded: tokenizer\.json: expected JSON"):
        await dispatcher.text()
    assert "no tokenizer or chat template from /folder" in caplog.text
    dispatcher.update(route_of("a"))
    assert await dispatcher.text() == "it"  # type: ignore[comparison-overlap]
    assert asked == ["/folder", "/folder"]


async def test_whoever_waits_for_a_text_gets_that_of_the_folder_that_holds_now() -> None:
    asked, dispatcher = texts("old", "new")
    waiting = asyncio.create_task(dispatcher.text())
    await asyncio.sleep(0)
    other = msgspec.structs.replace(SIGNATURE, language_model=LanguageModelSpec("/other", LIMITS))
    dispatcher.update(msgspec.structs.replace(route_of("a"), signature=other))
    assert await waiting == "new"  # type: ignore[comparison-overlap]
    assert asked == ["/folder", "/other"]


async def test_before_its_signature_is_known_a_model_has_no_text() -> None:
    route = msgspec.structs.replace(route_of(), signature=None, state=State.LOADING, reason="loading weights")
    dispatcher = LmDispatcher(route, lambda name, route: Replica())
    with pytest.raises(Unavailable, match="model `lm` is LOADING: loading weights"):
        await dispatcher.text()
    with pytest.raises(Unavailable, match="LOADING"):
        dispatcher.check_ready()
    assert dispatcher.signature is None


# The rest


async def test_a_language_model_takes_no_tensors() -> None:
    bench = Bench()
    with pytest.raises(BadRequest, match="/v2/models/lm/generate_stream or /v1/chat/completions"):
        await bench.dispatcher.infer(None)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="/v2/models/lm/generate,"):
        bench.dispatcher.stream(None)  # type: ignore[arg-type]


async def test_a_signature_that_says_the_same_is_the_same_object() -> None:
    bench = Bench()
    before = bench.dispatcher.check_ready()
    bench.dispatcher.update(msgspec.json.decode(msgspec.json.encode(route_of("a")), type=type(route_of())))
    assert bench.dispatcher.check_ready() is before
