"""What a channel says and when, and what it makes of frames, right and wrong."""

from __future__ import annotations

import asyncio
import random
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine import PromptLogprob, Sampling
from headwater.wire.lm import Ending, Load, Open, Post, SequenceEvent
from headwater_server.dispatch.admission import FinishRate
from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    Cancelled,
    ContractBroken,
    HeadwaterError,
    OutOfMemory,
    QueueFull,
    ReplicaLost,
    Unavailable,
)
from headwater_server.lm import engine_channel
from headwater_server.lm.engine_channel import REMEMBERED_ENDS, Channel
from headwater_server.lm.request import RequestRun
from headwater_server.lm.sequence import SequenceSpec, Tokens
from headwater_server.telemetry.recorder import recorder
from tests.app.dispatch.stand_in import pass_time
from tests.app.lm.stand_in import UNKNOWN, Replica, event, settle, spec, until
from tests.counted import count_from_zero, counts_of


class Line:
    """A replica, a channel to it, and requests on it."""

    def __init__(self, *, post_timeout_s: float = 60.0) -> None:
        self.replica = Replica()
        count_from_zero()
        self.meter = recorder().language_model("lm")
        self.ends: list[HeadwaterError] = []
        self._post_timeout_s = post_timeout_s
        self.channel = self._connect()

    def _connect(self) -> Channel:
        return Channel("lm", self.replica, self.meter, self.ends.append, post_timeout_s=self._post_timeout_s)

    def _start(self, request: RequestRun) -> None:
        if self.channel.is_ended:
            self.channel = self._connect()
        request.submit(self.channel)

    def ask(self, *specs: SequenceSpec, id: str = "q") -> RequestRun:
        request = RequestRun(
            id,
            specs or (spec(),),
            self.meter,
            start=self._start,
            on_left=lambda run: None,
            idle_s=60,
        )
        self._start(request)
        return request


def tokens_of(news: list[tuple[int, Tokens]]) -> list[tuple[int, list[int], str | None]]:
    return [(place, one.tokens, one.finish) for place, one in news]


async def failure(request: RequestRun) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as caught:
        await asyncio.wait_for(request.news(), 5)
    return caught.value


# What it says


async def test_a_channel_opens_with_its_first_sequence_and_posts_when_it_is_there() -> None:
    line = Line()
    await settle()
    assert line.replica.messages == []
    line.replica.answers_open.clear()
    line.ask()
    await settle()
    assert line.replica.messages == [Open(line.channel.name)]
    line.replica.answers_open.set()
    await settle()
    (post,) = line.replica.posts
    assert [submit.request_id for submit in post.submits] == ["q"]


async def test_a_submit_carries_all_that_is_asked() -> None:
    line = Line()
    asked = SequenceSpec(
        [5, 6], 7, Sampling(temperature=0.5, seed=3), frozenset({9}), ignore_eos=True, prompt_logprobs=2
    )
    line.ask(spec(), asked, id="mine")
    await settle()
    submit = line.replica.submits[1]
    assert (submit.number, submit.request_id, submit.prompt, submit.max_tokens) == (1, "mine", [5, 6], 7)
    assert (submit.sampling, submit.stop_ids, submit.ignore_eos) == (asked.sampling, asked.stop_ids, True)
    assert submit.prompt_logprobs == 2


async def test_what_gathers_in_a_turn_of_the_loop_or_behind_a_post_goes_in_one() -> None:
    line = Line()
    requests = [line.ask() for _ in range(50)]
    await settle()
    (post,) = line.replica.posts
    assert [submit.number for submit in post.submits] == list(range(50))
    line.replica.answers_posts.clear()
    requests[0].close()
    await settle()
    for request in requests[1:30]:
        request.close()
        await settle()
    for _ in range(10):
        line.ask()
        await settle()
    line.replica.answers_posts.set()
    await settle()
    first, second = line.replica.posts[1:]
    assert (first.cancels, first.submits) == ([0], [])
    assert second.cancels == list(range(1, 30))
    assert [submit.number for submit in second.submits] == list(range(50, 60))
    assert line.replica.most_posts_under_way == 1


async def test_what_is_cancelled_before_it_was_sent_is_never_sent() -> None:
    line = Line()
    line.ask().close()
    line.ask(id="kept")
    await settle()
    (post,) = line.replica.posts
    assert [submit.request_id for submit in post.submits] == ["kept"]
    assert post.cancels == []


# Tokens


async def test_each_event_reaches_its_sequence_and_a_reader_sleeps_until_then() -> None:
    line = Line()
    one, two = line.ask(spec(), spec()), line.ask()
    await settle()
    reading = asyncio.create_task(one.news())
    line.replica.say(event(2, 0, [9]))
    await settle()
    assert not reading.done()
    line.replica.say(event(0, 0, [4]), event(1, 0, [5, 6], finish="length"))
    assert tokens_of(await reading) == [(0, [4], None), (1, [5, 6], "length")]
    assert tokens_of(await two.news()) == [(0, [9], None)]
    line.replica.say(event(0, 1, finish="stop"))
    assert tokens_of(await one.news()) == [(0, [], "stop")]
    assert await one.news() == []


async def test_a_slow_reader_gets_one_merged_chunk_and_holds_no_more_than_the_tokens_asked_for() -> None:
    line = Line()
    request = line.ask(spec(1000, sampling=Sampling(logprobs=2)))
    await settle()
    for index in range(1000):
        tops: list[tuple[tuple[int, float], ...]] = [((index, -0.5), (1, -2.0))]
        finish: Ending | None = "length" if index == 999 else None
        line.replica.say(SequenceEvent(0, index, [index], [-index / 8], tops, finish))
        await asyncio.sleep(0)
    await settle()
    assert line.replica.channel.answers.empty()  # its neighbours are not held up
    ((place, got),) = await request.news()
    assert (place, got.tokens, got.finish) == (0, list(range(1000)), "length")
    assert got.logprobs == [-index / 8 for index in range(1000)]
    assert got.tops is not None
    assert got.tops[777] == ((777, -0.5), (1, -2.0))
    assert await request.news() == []


async def test_logprobs_are_handed_on_only_where_they_were_asked_for() -> None:
    line = Line()
    request = line.ask(spec(), spec(sampling=Sampling(logprobs=0)))
    await settle()
    tops: list[tuple[tuple[int, float], ...]] = [((1, -1.0),)]
    line.replica.say(SequenceEvent(0, 0, [1], [-1.0], tops), SequenceEvent(1, 0, [1], [-1.0], tops))
    (_, plain), (_, told) = await request.news()
    assert (plain.logprobs, plain.tops) == (None, None)
    assert (told.logprobs, told.tops) == ([-1.0], None)


def scored(max_tokens: int) -> SequenceSpec:
    return SequenceSpec([5, 6, 7, 8], max_tokens, prompt_logprobs=1)


PARTS: list[PromptLogprob] = [(-0.5, ((6, -0.5),)), (-1.5, ((9, -0.25),)), (-2.5, ((1, -0.125),))]


def part(begin: int, end: int) -> SequenceEvent:
    return SequenceEvent(0, 0, [], prompt=tuple(PARTS[begin:end]))


async def test_what_is_told_of_a_prompt_comes_in_parts_before_the_answer() -> None:
    line = Line()
    request = line.ask(scored(2))
    await settle()
    for begin, end in (0, 1), (1, 2):
        line.replica.say(part(begin, end))
        ((_, got),) = await request.news()
        assert (got.prompt, got.tokens, got.finish) == (PARTS[begin:end], [], None)
    line.replica.say(part(2, 3))
    line.replica.say(event(0, 0, [1, 2], finish="length"))
    await settle()
    ((_, got),) = await request.news()
    assert (got.prompt, got.tokens, got.finish) == (PARTS[2:], [1, 2], "length")
    assert await request.news() == []
    assert counts_of("lm").total("headwater_prompt_tokens") == 4


async def test_a_prompt_alone_is_counted() -> None:
    line = Line()
    request = line.ask(scored(0))
    await settle()
    line.replica.say(part(0, 3), event(0, 0, finish="length"))
    ((_, got),) = await request.news()
    assert (got.prompt, got.tokens, got.finish) == (PARTS, [], "length")
    assert await request.news() == []
    assert counts_of("lm").total("headwater_prompt_tokens") == 4


@pytest.mark.parametrize(
    ("asked", "wrong", "message"),
    [
        (scored(1), [event(0, 0, [1])], "expected 3 more log probabilities, got 0"),
        (scored(0), [part(0, 2), event(0, 0, finish="length")], "expected 1 more log probabilities, got 0"),
        (scored(1), [part(0, 2), part(0, 2)], "expected 1 more log probabilities, got 2"),
        (spec(), [part(0, 1)], "expected 0 more log probabilities, got 1"),
    ],
)
async def test_a_prompt_is_told_of_once_and_wholly(
    asked: SequenceSpec, wrong: list[SequenceEvent], message: str
) -> None:
    line = Line()
    request = line.ask(asked)
    await settle()
    line.replica.say(*wrong)
    error = await failure(request)
    assert isinstance(error, ContractBroken)
    assert error.message == f"sequence 0: prompt: {message}"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 40))
async def test_however_frames_and_readers_interleave_each_token_comes_once_and_in_order(
    seed: int, count: int, max_tokens: int
) -> None:
    chance = random.Random(seed)

    line = Line()
    lengths = [chance.randint(0, max_tokens) for _ in range(count)]
    requests, places, owners = [], 0, []
    while places < count:
        group = chance.randint(1, count - places)
        requests.append(line.ask(*[spec(max_tokens)] * group))
        owners += [(len(requests) - 1, place) for place in range(group)]
        places += group
    got: dict[tuple[int, int], list[int]] = {owner: [] for owner in owners}
    ends: dict[tuple[int, int], str | None] = {}

    async def read(index: int) -> None:
        while news := await requests[index].news():
            for place, one in news:
                assert (index, place) not in ends
                got[index, place] += one.tokens
                if one.finish:
                    ends[index, place] = one.finish
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)

    readers = [asyncio.create_task(read(index)) for index in range(len(requests))]
    await settle()
    told = [0] * count
    left = set(range(count))
    while left:
        events = []
        for number in chance.sample(sorted(left), chance.randint(1, len(left))):
            more = min(chance.randint(0, 3), lengths[number] - told[number])
            is_last = told[number] + more == lengths[number]
            events.append(
                event(
                    number,
                    told[number],
                    [number * 1000 + told[number] + step for step in range(more)],
                    finish="stop" if is_last else None,
                )
            )
            told[number] += more
            if is_last:
                left.remove(number)
        line.replica.say(*events)
        for _ in range(chance.randint(0, 3)):
            await asyncio.sleep(0)
    await asyncio.gather(*readers)
    assert [got[owner] for owner in owners] == [
        [number * 1000 + step for step in range(length)] for number, length in enumerate(lengths)
    ]
    assert len(ends) == count
    counts = counts_of("lm")
    assert counts.total("headwater_generated_tokens") == sum(lengths)
    assert counts.total("headwater_sequences") == count


# Breaches


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (event(0, 3, [7]), "sequence 0: expected token 5, got 3: the engine repeated tokens"),
        (event(0, 0, [1, 2, 3, 4, 5, 6]), "sequence 0: expected token 5, got 0: the engine repeated tokens"),
        (event(0, 6, [7]), "sequence 0: expected token 5, got 6: the engine left tokens out"),
        (event(0, 5, [7] * 6), "sequence 0: expected at most 10 tokens, got 11: the engine went on after the end"),
        (event(0, 4, finish="stop"), "sequence 0: expected token 5, got 4: the engine repeated tokens"),
        (SequenceEvent(0, 5, [7], cached=1), "sequence 0: cached: expected 0 to 0 tokens of the prompt, got 1"),
    ],
    ids=["repeat", "history", "gap", "growth", "end", "cached"],
)
async def test_tokens_out_of_sequence_end_their_request_and_no_other(wrong: SequenceEvent, message: str) -> None:
    line = Line()
    bad, good = line.ask(spec(), spec(), id="bad"), line.ask()
    await settle()
    line.replica.say(*(event(number, 0, [1, 2, 3, 4, 5]) for number in range(3)))
    assert len(await bad.news()) == 2
    line.replica.say(event(1, 5, [6]), wrong, event(2, 5, [6]))
    await settle()
    assert tokens_of(await bad.news()) == [(1, [6], None)]  # what was right before
    error = await failure(bad)
    assert isinstance(error, ContractBroken)
    assert error.message == message
    assert sorted(line.replica.cancels) == [0, 1]
    assert tokens_of(await good.news()) == [(0, [1, 2, 3, 4, 5, 6], None)]
    assert counts_of("lm").total("headwater_contract_violations") == 1
    line.replica.say(event(0, 9, [7]), event(2, 6, finish="stop"))  # what still comes of it is nobody's
    assert tokens_of(await good.news()) == [(0, [], "stop")]
    assert counts_of("lm").total("headwater_contract_violations") == 1
    assert line.ends == []


@pytest.mark.parametrize("cached", [-1, 4])
async def test_more_tokens_of_a_prompt_than_there_are_can_not_have_been_cached(cached: int) -> None:
    line = Line()
    request = line.ask(spec())
    await settle()
    line.replica.say(SequenceEvent(0, 0, [1], cached=cached))
    assert "cached: expected 0 to 3 tokens of the prompt" in str(await failure(request))
    assert counts_of("lm").total("headwater_cached_prompt_tokens") == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (event(0, 2, [7]), "sequence 0: expected nothing after its end at 2 tokens, got token 2"),
        (event(0, 2, finish="stop"), "sequence 0: expected nothing after its end at 2 tokens, got another end (stop)"),
    ],
)
async def test_what_comes_after_an_end_is_a_breach(wrong: SequenceEvent, message: str) -> None:
    line = Line()
    request, done = line.ask(spec(), spec()), line.ask()
    await settle()
    line.replica.say(event(0, 0, [1, 2], finish="stop"), event(2, 0, [1], finish="stop"))
    assert tokens_of(await request.news()) == [(0, [1, 2], "stop")]
    assert tokens_of(await done.news()) == [(0, [1], "stop")]
    assert await done.news() == []
    line.replica.say(wrong)
    error = await failure(request)
    assert isinstance(error, ContractBroken)
    assert error.message == message
    await settle()
    assert sorted(line.replica.cancels) == [0, 1]
    line.replica.say(event(2, 1, [1]))  # its request is over: counted all the same
    await settle()
    assert counts_of("lm").total("headwater_contract_violations") == 2
    assert counts_of("lm").total("headwater_sequences") == 1


async def test_ends_are_remembered_for_a_while_only() -> None:
    line = Line()
    for number in range(REMEMBERED_ENDS + 1):
        request = line.ask()
        await settle()
        line.replica.say(event(number, 0, [1], finish="stop"))
        assert await request.news()
    line.replica.say(event(0, 1, [1]), event(1, 1, [1]))
    await settle()
    assert counts_of("lm").total("headwater_contract_violations") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SequenceEvent(0, 0, [1, 2], [-1.0], [(), ()]), "sequence 0: logprobs: expected 2, one a token, got 1"),
        (SequenceEvent(0, 0, [1], None, [()]), "sequence 0: logprobs: expected 1, one a token, got 0"),
        (SequenceEvent(0, 0, [1], [-1.0], None), "sequence 0: tops: expected 1, one a token, got 0"),
    ],
)
async def test_logprobs_that_were_asked_for_must_be_there(wrong: SequenceEvent, message: str) -> None:
    line = Line()
    request = line.ask(spec(sampling=Sampling(logprobs=1)))
    await settle()
    line.replica.say(wrong)
    assert (await failure(request)).message == message


@pytest.mark.parametrize("number", [1, 3], ids=["again", "lost"])
async def test_a_frame_that_is_missing_or_repeated_breaks_the_channel(number: int) -> None:
    line = Line()
    requests = [line.ask(), line.ask()]
    await settle()
    line.replica.say(event(0, 0, [1]))
    line.replica.channel.say(event(0, 1, [1]), number=number)
    await settle()
    for request in requests:
        error = await failure(request)
        assert isinstance(error, ContractBroken)
        assert error.message == f"model `lm`: expected frame 2, got {number}"
    assert line.channel.is_ended
    assert counts_of("lm").total("headwater_contract_violations") == 1
    assert [type(error) for error in line.ends] == [ContractBroken]
    assert line.replica.channel.is_ended  # it was told


async def test_what_is_no_frame_breaks_the_channel() -> None:
    line = Line()
    request = line.ask()
    await settle()
    line.replica.channel.answers.put_nowait(b"\xc1nothing")
    error = await failure(request)
    assert isinstance(error, ContractBroken)
    assert "expected a frame" in error.message
    assert counts_of("lm").total("headwater_contract_violations") == 1


# Ends


@pytest.mark.parametrize(
    ("finish", "text", "kind", "message", "field"),
    [
        ("rejected", "logit_bias: expected tokens from 0 to 9, got 10 to 10", BadRequest, None, "logit_bias"),
        ("rejected", "expected prompt and max_tokens to be at most 64 tokens", BadRequest, None, None),
        ("error", "RuntimeError: it broke", CallableFailed, None, None),
        ("out_of_memory", "out of memory on cuda:0 with this sequence alone", OutOfMemory, None, None),
        ("cancelled", "", Cancelled, "the request was cancelled", None),
        ("full", "4 run and 8 wait", QueueFull, "model `lm`: the queue is full: 4 run and 8 wait", None),
    ],
)  # fmt: skip
async def test_an_end_that_is_a_failure_fails_the_request_and_cancels_its_other_sequences(
    finish: Ending, text: str, kind: type[HeadwaterError], message: str | None, field: str | None
) -> None:
    line = Line()
    request = line.ask(spec(), spec())
    await settle()
    line.replica.say(event(1, 0, [5]), event(0, 0, finish=finish, error=text))
    error = await failure(request)  # true from the first byte, although a neighbour had a token
    assert type(error) is kind
    assert (error.message, error.field) == (message or text, field)
    await settle()
    assert line.replica.cancels == [1]
    assert counts_of("lm").total("headwater_sequences") == 0


async def test_a_full_queue_says_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = FinishRate()
    now_s = asyncio.get_running_loop().time()
    for late_s in (40, 30, 20, 10):
        rate.note(now_s - late_s)
    monkeypatch.setattr(engine_channel, "FinishRate", lambda: rate)
    line = Line()
    request, other = line.ask(), line.ask()
    await settle()
    line.replica.say(event(0, 0, finish="full"), load=Load(0, 3))
    assert (await failure(request)).retry_after_s == 10  # one in 10 s, three times as many with the others', 3 wait
    line.replica.say(event(1, 0, finish="full"), load=Load(4, 100))
    assert (await failure(other)).retry_after_s == 60


def test_without_ends_a_full_queue_is_worth_a_try_soon() -> None:
    rate = FinishRate()
    assert rate.wait_s(1000, 5.0) == 1
    rate.note(1.0)
    assert rate.wait_s(1000, 5.0) == 1
    rate.note(2.0)
    assert rate.wait_s(4, 5.0) == 4
    assert rate.wait_s(0, 5.0) == 1


def test_idle_time_and_ends_of_long_ago_say_nothing_of_how_fast_places_are_left() -> None:
    rate = FinishRate()
    for ended_s in (0.0, 1.0, 1000.0, 1002.0, 1004.0):
        rate.note(ended_s)
    assert rate.wait_s(10, 1050.0) == 20
    assert rate.wait_s(10, 1050.0, share=0.25) == 5
    assert rate.wait_s(10, 2000.0) == 1


async def test_a_place_is_left_by_whatever_ends_a_sequence_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[float] = []
    monkeypatch.setattr(FinishRate, "note", lambda rate, now_s: noted.append(now_s))
    line = Line()
    dropped, left, ended, failed = (line.ask(spec(), spec()) for _ in range(4))
    line.ask().close()  # never sent
    await settle()
    line.replica.say(*(event(2 * number, 0, [1]) for number in range(4)))  # the second ones of them wait
    await settle()
    assert len(noted) == 0
    dropped.drop(0)
    dropped.drop(1)
    assert len(noted) == 1
    left.close()
    assert len(noted) == 2
    line.replica.say(event(4, 1, finish="length"), event(6, 1, finish="cancelled"))
    assert await ended.news()
    assert isinstance(await failure(failed), Cancelled)
    assert len(noted) == 4


async def test_a_channel_that_is_closed_or_ends_fails_its_sequences() -> None:
    closed, ended, unknown, lost = Line(), Line(), Line(), Line()
    lines = [closed, ended, unknown, lost]
    requests = [line.ask() for line in lines]
    await settle()
    closed.replica.say(event(0, 0, [1]), closed="the engine: it broke")
    ended.replica.channel.answers.put_nowait(None)
    unknown.replica.channel.is_ended = True
    other = unknown.ask(id="other")
    lost.replica.lose()
    errors = [await failure(request) for request in requests]
    assert [type(error) for error in errors] == [Unavailable, Unavailable, Unavailable, ReplicaLost]
    assert [error.message for error in errors] == [
        "model `lm`: the replica closed the channel to it: the engine: it broke",
        "model `lm`: the replica ended the channel to it",
        "model `lm`: the replica closed the channel to it: channel: unknown name",
        "the replica ended while it had the request",
    ]
    assert all(error.retry_after_s for error in errors[:3])
    assert all(len(line.ends) == 1 for line in lines)
    assert [line.channel.is_ended for line in lines] == [True, True, False, True]
    unknown.replica.say(event(0, 0, [1], finish="stop"))  # what it never had is asked for anew
    assert tokens_of(await other.news()) == [(0, [1], "stop")]


async def test_a_channel_that_is_refused_is_tried_once_more_and_then_fails_its_sequences_with_the_reason() -> None:
    line = Line()
    line.replica.answers_open.clear()
    request = line.ask(spec(), spec())
    await settle()
    line.replica.say(closed="the replica is ending")
    line.replica.answers_open.set()
    line.replica.answers_open.clear()
    await settle()
    assert len(line.replica.channels) == 2
    line.replica.say(closed="the replica is ending")
    line.replica.answers_open.set()
    error = await failure(request)
    assert isinstance(error, Unavailable)
    assert error.message.endswith("the replica is ending")
    assert counts_of("lm").total("headwater_contract_violations") == 0
    await settle()
    assert (len(line.replica.channels), line.replica.posts) == (2, [])


async def test_what_is_on_its_way_when_the_channel_is_closed_is_held_until_it_is_known_whether_it_came() -> None:
    for has_it in (False, True):
        line = Line()
        had = line.ask(id="had")
        await settle()
        line.replica.answers_posts.clear()
        request = line.ask(spec(), spec(), id="mine")
        await settle()
        gone = line.ask(id="gone")
        never = line.ask(id="never")
        gone.close()
        line.replica.say(closed="it is too slow")
        assert isinstance(await failure(had), Unavailable)
        waiting = asyncio.create_task(request.news())
        await settle()
        assert len(line.replica.channels) == 2  # for the one that was not even on its way
        assert not waiting.done()
        first, second = line.replica.channels
        first.is_ended = not has_it
        if has_it:  # and its answer is on its way
            line.replica.channels.reverse()
        line.replica.answers_posts.set()
        await settle()
        if has_it:
            with pytest.raises(Unavailable, match="it is too slow"):
                await waiting
        else:
            assert [submit.request_id for submit in line.replica.submits.values()] == ["never", "mine", "mine"]
            second.say(event(1, 0, [7], finish="stop"))
            assert tokens_of(await waiting) == [(0, [7], "stop")]
        never.close()


async def test_what_is_left_while_it_is_held_is_not_asked_for_anew() -> None:
    line = Line()
    line.ask(id="had")
    await settle()
    line.replica.answers_posts.clear()
    left, stays = line.ask(id="left"), line.ask(id="stays")
    await settle()
    line.replica.say(closed="it is too slow")
    line.replica.channel.is_ended = True
    await settle()
    left.close()
    line.replica.answers_posts.set()
    await settle()
    assert [submit.request_id for submit in line.replica.submits.values()] == ["stays"]
    stays.close()


async def test_what_is_refused_again_and_again_is_asked_for_twice() -> None:
    line = Line()
    line.replica.refuses_posts = UNKNOWN
    error = await failure(line.ask(spec(), spec()))
    assert isinstance(error, Unavailable)
    assert error.message.endswith(UNKNOWN)
    await settle()
    assert [len(post.submits) for post in line.replica.posts] == [2, 2]
    assert counts_of("lm").total("headwater_sequences") == 0


@pytest.mark.parametrize("is_on_its_way", [True, False])
async def test_what_is_cancelled_is_not_asked_for_anew(is_on_its_way: bool) -> None:
    line = Line()
    line.replica.refuses_posts = UNKNOWN
    line.replica.answers_posts.clear()
    request = line.ask(spec(), spec())
    await settle()
    if is_on_its_way:
        assert request.cancel() == 2
    line.replica.answers_open.clear()
    line.replica.answers_posts.set()
    await settle()
    if not is_on_its_way:
        assert len(line.replica.channels) == 2
        assert request.cancel() == 2
    line.replica.refuses_posts = ""
    line.replica.answers_open.set()
    await settle()
    assert (request.cancel(), line.replica.submits) == (0, {})
    assert isinstance(await failure(request), Cancelled)


async def test_a_post_that_went_wrong_halfway_is_not_repeated() -> None:
    line = Line()
    line.replica.refuses_posts = "internal error: KeyError"
    assert (await failure(line.ask())).message.endswith("internal error: KeyError")
    assert len(line.replica.posts) == 1


async def test_large_requests_do_not_travel_in_the_messages_of_others() -> None:
    line = Line()
    large = Sampling(logit_bias=dict.fromkeys(range(99_000), 1.0))
    prompt = [1, 2]
    line.ask(*[SequenceSpec(prompt, 3, large) for _ in range(256)], id="large")
    line.ask(id="small")
    left = line.ask(id="left")
    await settle()
    assert [len(post.submits) for post in line.replica.posts] == [256, 2]
    left.close()
    await settle()
    assert [post.cancels for post in line.replica.posts] == [[], [], [257]]
    assert line.ends == []


async def test_many_prompts_travel_in_several_messages() -> None:
    line = Line()
    line.ask(*[SequenceSpec([n] * 30_000, 3) for n in range(20)])
    await settle()
    assert [len(post.submits) for post in line.replica.posts] == [6, 6, 6, 2]


class Prompt(list[int]):
    """Token ids, which may be referred to weakly."""


async def test_a_prompt_is_kept_until_the_replica_has_it() -> None:
    line = Line()
    line.replica.answers_posts.clear()
    prompts = [Prompt([n] * 30_000) for n in range(20)]
    kept = [weakref.ref(prompt) for prompt in prompts]
    line.ask(*[SequenceSpec(prompt, 3) for prompt in prompts])
    del prompts
    await settle()
    assert line.replica.posts
    assert all(prompt() is not None for prompt in kept)
    line.replica.answers_posts.set()
    await settle()
    assert [prompt() for prompt in kept] == [None] * 20


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_post_that_is_never_answered_ends_the_channel(is_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(post_timeout_s=20)
    had = line.ask(id="had")
    await settle()
    line.replica.answers_posts.clear()
    posted = None if is_left else line.ask(id="posted")
    if is_left:
        had.close()
    await settle()
    assert len(line.replica.posts) == 2
    never = line.ask(id="never")
    if is_left:
        never.close()
    stuck = line.channel
    pass_time(monkeypatch, 20)
    await until(lambda: stuck.is_ended)
    for request in (posted, None if is_left else had):
        if request is not None:
            error = await failure(request)
            assert type(error) is Unavailable
            assert error.message == "model `lm`: the replica didn't answer a message for 20 s"
    line.replica.answers_posts.set()
    again = line.ask(id="again")
    await settle()
    asked = [submit.request_id for submit in line.replica.submits.values()]
    assert asked == (["again"] if is_left else ["never", "again"])
    assert [channel.name for channel in line.replica.channels if channel.is_ended] == [stuck.name]
    again.close()
    never.close()


async def test_a_load_of_long_ago_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_is_fresh_for(seconds: float) -> None:
        monkeypatch.setattr(engine_channel, "LOAD_FRESH_S", seconds)

    line = Line()
    request = line.ask()
    await settle()
    line.replica.say(event(0, 0, [1]), load=Load(31, 2, 500))
    assert await request.news()
    load_is_fresh_for(0)
    assert (line.channel.load, line.channel.others) == (Load(31, 2, 500), 32)  # ours would have said more
    load_is_fresh_for(600)
    line.replica.say(event(0, 1, finish="stop"), load=Load(31, 0, 400))
    await request.news()
    assert (line.channel.load, line.channel.others) == (Load(31, 0, 400), 31)
    load_is_fresh_for(0)
    assert (line.channel.load, line.channel.others) == (Load(), 0)


# The reader


async def test_who_leaves_before_having_read_all_has_cancelled() -> None:
    line = Line()
    left, read, dropped = line.ask(), line.ask(), line.ask()
    await settle()
    line.replica.say(*(event(number, 0, [1], finish="stop") for number in range(3)))
    await settle()
    left.close()
    assert counts_of("lm").total("headwater_sequences") == 0
    assert await read.news()
    read.close()
    dropped.drop(0)
    dropped.close()
    assert counts_of("lm").total("headwater_sequences") == 2


async def test_a_sequence_that_is_dropped_is_cancelled_and_has_no_more_news() -> None:
    line = Line()
    request = line.ask(spec(), spec())
    await settle()
    line.replica.say(event(0, 0, [1]), event(1, 0, [1]))
    await settle()
    request.drop(0)
    line.replica.say(event(0, 1, [2]), event(1, 1, [2]))
    await settle()
    assert tokens_of(await request.news()) == [(1, [1, 2], None)]
    line.replica.say(event(0, 2, finish="cancelled"))
    reading = asyncio.create_task(request.news())
    await settle()
    assert not reading.done()
    request.drop(1)
    assert await reading == []
    await settle()
    assert line.replica.cancels == [0, 1]
    counts = counts_of("lm")
    assert (counts.total("headwater_sequences"), counts.total("headwater_contract_violations")) == (2, 0)


async def test_a_request_that_is_closed_is_cancelled_once_and_at_once() -> None:
    line = Line()
    request = line.ask(spec(), spec())
    await settle()
    reading = asyncio.create_task(request.news())
    await settle()
    request.close()
    request.close()
    request.drop(0)
    assert await reading == []
    await settle()
    assert line.replica.cancels == [0, 1]
    assert line.channel.sequences == 0
    assert counts_of("lm").total("headwater_sequences") == 0


async def test_names_of_calls_are_never_used_twice() -> None:
    lines = [Line(), Line()]
    for line in lines:
        for _ in range(5):
            line.ask()
            await settle()
    names = [name for line in lines for name in line.replica.names]
    assert len(names) == len(set(names)) == 12


async def test_an_answer_to_a_post_that_failed_ends_the_channel() -> None:
    class Refusing(Replica):
        async def frames(self, name, request):  # type: ignore[no-untyped-def]
            async for raw in super().frames(name, request):
                yield raw
            if isinstance(self.messages[-1], Post):
                raise CallableFailed("the replica refused the call: no")

    line = Line()
    line.replica = Refusing()
    line.channel = Channel("lm", line.replica, line.meter, line.ends.append)
    error = await failure(line.ask())
    assert type(error) is CallableFailed
    await settle()
    assert line.replica.channel.is_ended
