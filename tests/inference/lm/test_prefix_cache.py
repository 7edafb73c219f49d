"""The slot engine's prefix cache: what is reused, by whom, what goes first, and that no answer changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine import EngineFull, RequestTooLong, TokenEvent
from headwater.lm.prefix_index import BLOCK, PrefixIndex, chain_of
from headwater.lm.slot_cache import SlotCache
from headwater.lm.slot_engine import KEPT_ROWS, SlotEngine
from headwater_server.cli.plan.cache_size import CHUNK
from headwater_server.cli.plan.cache_size import KEPT_ROWS as planned_rows
from tests.inference.lm.llamas import (
    VOCAB_SIZE,
    by_id,
    differs,
    generated,
    held,
    prompt_of,
    request,
    rows_of,
    run,
    tiny,
    tokens,
)

pytestmark = pytest.mark.heavy
LLAMA = tiny()
LONG = tiny(max_position_embeddings=1024)


def engine_of(model: Any = LLAMA, **options: Any) -> SlotEngine:
    return SlotEngine(model, **{"max_sequences": 4, "prefill_chunk": 32, **options})


def entries(index: PrefixIndex) -> tuple[int, int]:
    """The numbers of rows and of blocks that the index knows."""
    # private: an entry that is left behind changes no answer of the index
    return len(index._rows), len(index._holders)


def reused(engine: SlotEngine, prompt: list[int], max_tokens: int = 2, scope: str = "") -> int:
    """How many of its tokens were not computed; the answer is right."""
    found = run(engine, request("a", prompt, max_tokens, cache_scope=scope))["a"]
    differs(tokens(found), *expected(tuple(prompt), max_tokens))
    assert all(event.cached == 0 for event in found[1:])
    return found[0].cached


@functools.cache
def expected(prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], list[float]]:
    return generated(LLAMA, prompt, max_tokens)


class TestAPromptReuses:
    def test_what_an_earlier_one_began_with_in_whole_blocks(self) -> None:
        engine, base = engine_of(), prompt_of(50)
        assert reused(engine, [*base, 1, 2]) == 0
        assert reused(engine, [*base, 3, 4]) == 48
        assert reused(engine, [*base[:40], 5]) == 32
        assert reused(engine, base[:BLOCK]) == BLOCK - 1  # the last token is always computed
        assert reused(engine, base[: BLOCK - 1]) == 0

    def test_the_whole_of_one_that_came_before_but_for_its_last_token(self) -> None:
        engine = engine_of()
        assert [reused(engine, prompt_of(64)) for _ in range(3)] == [0, 63, 63]

    def test_the_answer_too_as_the_next_turn_of_a_chat_does(self) -> None:
        engine, first = engine_of(), prompt_of(20)
        answer = tokens(run(engine, request("a", first, 30))["a"])
        assert reused(engine, [*first, *answer, *prompt_of(9)]) == 48  # of 20 + 30, the last of which was not computed

    def test_that_of_a_neighbour_that_still_generates(self) -> None:
        engine, base = engine_of(LONG, max_sequences=32), prompt_of(400)
        found = run(engine, *(request(str(n), [*base, n, n + 1], 40) for n in range(32)))
        assert [events[0].cached for events in found.values()] == [0] + 31 * [400]

    def test_that_of_one_that_is_to_be_computed_with_it(self) -> None:
        engine, base = engine_of(prefill_chunk=128), prompt_of(20)
        found = run(engine, *(request(str(n), [*base, n], 3) for n in range(4)))
        assert [events[0].cached for events in found.values()] == [0, 16, 16, 16]

    def test_what_one_that_was_cancelled_had_computed(self) -> None:
        engine, base = engine_of(prefill_chunk=16), prompt_of(60)
        engine.submit(request("a", base, 3))
        engine.step()
        engine.step()
        engine.cancel("a")
        assert [event.finish for event in engine.step()] == ["cancelled"]
        assert reused(engine, base) == 32

    def test_nothing_of_another_scope(self) -> None:
        engine, base = engine_of(max_sequences=8), prompt_of(50)
        assert [reused(engine, base, scope=scope) for scope in ("", "a", "b", "a", "")] == [0, 0, 0, 48, 48]

    def test_nothing_if_there_is_no_prefix_cache(self) -> None:
        engine = engine_of(prefix_cache=False)
        assert [reused(engine, prompt_of(64)) for _ in range(3)] == [0, 0, 0]
        assert held(engine) == 256

    def test_nothing_of_what_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny()
        engine, base, forward = engine_of(model), prompt_of(40), model.forward
        reused(engine, base)

        def fail(input_ids: torch.Tensor, **rest: Any) -> Any:
            forward(input_ids, **rest)
            raise RuntimeError("on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", fail)
            assert run(engine, request("a", [*base, 1], 3))["a"][0].finish == "error"
        assert reused(engine, base) == 0

    def test_no_row_that_there_was_no_memory_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, base = engine_of(), prompt_of(40)
        engine.submit(request("a", base, 20))
        events = engine.step() + engine.step()
        fit = SlotCache.fit

        def fail(cache: SlotCache, rows: int, length: int) -> None:
            if rows > 1:
                raise RuntimeError("CUDA out of memory")
            fit(cache, rows, length)

        monkeypatch.setattr(SlotCache, "fit", fail)
        engine.submit(request("b", base, 20))
        engine.submit(request("c", base, 20))
        while engine.has_work:
            events += engine.step()
        found = by_id(events)
        assert [(found[id][-1].finish, len(tokens(found[id]))) for id in "abc"] == [("length", 20)] * 3
        assert [events.index(found[id][0]) > events.index(found["a"][-1]) for id in "bc"] == [True] * 2

    def test_nothing_of_what_is_not_finite(self) -> None:
        model = tiny()
        with torch.no_grad():
            model.get_input_embeddings().weight[95] = float("nan")
            model.lm_head.weight[95] = 0
        engine, base = engine_of(model), [95, *(token % 95 for token in prompt_of(40))]
        for _ in range(2):
            events = run(engine, request("a", base, 3))["a"]
            assert (events[0].finish, events[0].cached) == ("error", 0)

    def test_nothing_after_the_engine_was_closed(self) -> None:
        engine = engine_of()
        reused(engine, prompt_of(40))
        engine.close()
        assert reused(engine, prompt_of(40)) == 0


class TestWhatIsKept:
    def test_goes_by_age_of_its_last_use(self) -> None:
        engine = engine_of(cache_tokens=3 * 256)
        one, two, three, four = (prompt_of(40, seed) for seed in range(4))
        assert [reused(engine, prompt) for prompt in (one, two, three, one)] == [0, 0, 0, 32]
        assert reused(engine, four) == 0  # in the place of two
        assert [reused(engine, prompt) for prompt in (one, three, four, two)] == [32, 32, 32, 0]

    def test_goes_first_where_another_row_holds_it_too(self) -> None:
        engine = engine_of(cache_tokens=3 * 256)
        one, two = prompt_of(40, 1), prompt_of(20, 2)
        reused(engine, one)
        for _ in range(9):  # each turn holds those before
            two = [*two, *tokens(run(engine, request("a", two, 2))["a"]), 5]
        assert reused(engine, one) == 32

    def test_never_keeps_a_sequence_waiting(self) -> None:
        engine = engine_of(cache_tokens=256, max_sequences=4)
        for seed in range(4):
            reused(engine, prompt_of(50, seed))
        assert held(engine) == 256
        engine.submit(request("all", prompt_of(100), 28))
        engine.submit(request("more", prompt_of(100, 1), 28))
        assert (engine.active, engine.waiting, engine.cache_used) == (2, 0, 256)
        found = run(engine)
        assert all(events[-1].finish == "length" for events in found.values())

    def test_takes_no_more_rows_than_are_needed_for_it(self) -> None:
        engine = engine_of(LONG, max_sequences=2)
        for _ in range(5):
            run(engine, request("a", prompt_of(100), 3))
        assert held(engine) == 256

    def test_grows_to_its_bound_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("headwater.lm.slot_engine.KEPT_TOKENS", 1000)
        for options, most in [({}, 3 * 256), ({"cache_tokens": 2000}, 7 * 256), ({"cache_tokens": 500}, 256)]:
            engine = engine_of(LONG, max_sequences=2, **options)
            for seed in range(12):
                run(engine, request("a", prompt_of(100, seed), 3))
            assert held(engine) == most
        assert planned_rows == KEPT_ROWS
        engine = engine_of(LONG, max_sequences=2, cache_tokens=100_000)
        for seed in range(50):
            run(engine, request("a", prompt_of(20, seed), 1))
        assert held(engine) == (2 + KEPT_ROWS) * CHUNK

    def test_is_bounded_over_many_requests(self) -> None:
        engine = engine_of(cache_tokens=2000)
        hits = 0
        for number in range(300):
            prompt = [*prompt_of(32, number % 3), *prompt_of(20, number)]
            hits += run(engine, request("a", prompt, 1))["a"][0].cached >= 32
            assert held(engine) <= 2000
        assert hits == 297
        rows, blocks = entries(rows_of(engine).prefixes)
        assert rows <= rows_of(engine).cache.shape[0]
        assert blocks <= held(engine) // BLOCK

    def test_is_lost_where_memory_for_more_is_short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engine_of()
        reused(engine, prompt_of(40, 1))

        def fail(*args: Any) -> bool:
            raise RuntimeError("CUDA out of memory")

        monkeypatch.setattr(SlotCache, "widen", fail)
        assert [reused(engine, prompt_of(40, seed)) for seed in (2, 1, 1)] == [0, 0, 32]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 8}),
        ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_other_models_give_the_same_tokens(kind: str, changes: dict[str, Any]) -> None:
    model = tiny(kind, **changes)
    engine, base = engine_of(model), prompt_of(50)
    engine.check()
    for tail in ([], [1, 2], [3], prompt_of(40)):
        found = run(engine, request("a", [*base, *tail], 12))["a"]
        assert found[0].cached >= (48 if tail else 0)
        differs(tokens(found), *generated(model, [*base, *tail], 12))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_answers_are_the_same_whatever_comes_goes_and_is_evicted(data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from([96, 200, 400, 2000]))
    engine = engine_of(
        max_sequences=data.draw(st.integers(1, 4)),
        cache_tokens=budget,
        prefill_chunk=data.draw(st.sampled_from([7, 64])),
    )
    wanted: dict[str, tuple[list[int], int]] = {}
    events: list[TokenEvent] = []
    for number in range(data.draw(st.integers(2, 14))):
        base = prompt_of(60, data.draw(st.integers(0, 2)))
        is_turn: bool = data.draw(st.booleans())
        if wanted and is_turn:  # the next turn of a chat
            earlier, most = data.draw(st.sampled_from(list(wanted.values())))
            base = [*earlier, *expected(tuple(earlier), most)[0]]
        prompt = [*base[: data.draw(st.integers(1, 90))], *prompt_of(data.draw(st.integers(0, 9)), number)]
        most = data.draw(st.integers(1, 24))
        try:
            engine.submit(request(str(number), prompt, most))
            wanted[str(number)] = prompt, most
        except (EngineFull, RequestTooLong):
            pass
        for _ in range(data.draw(st.integers(0, 9))):
            events += engine.step()
            assert held(engine) <= budget
        if data.draw(st.integers(0, 3)) == 0:
            engine.cancel(str(data.draw(st.integers(0, number))))
    while engine.has_work:
        events += engine.step()
        assert held(engine) <= budget
    found = by_id(events)
    assert set(found) == set(wanted)
    for id, all_events in found.items():
        assert all_events[-1].finish in ("length", "cancelled")
        got = tokens(all_events)
        if got:
            answer, leads = expected(tuple(wanted[id][0]), wanted[id][1])
            differs(got, answer[: len(got)], leads[: len(got)])
            assert 0 <= all_events[0].cached < len(wanted[id][0])
    assert (engine.active, engine.waiting, engine.cache_used) == (0, 0, 0)


class TestTheIndex:
    def test_tells_beginnings_apart_by_every_token_and_the_scope(self) -> None:
        ids = prompt_of(64)
        other = [*ids[:40], (ids[40] + 1) % VOCAB_SIZE, *ids[41:]]
        chain = chain_of(ids, "")
        assert len(chain) == len(set(chain)) == 4
        assert chain_of([*ids, 1], "") == chain
        assert [one == two for one, two in zip(chain_of(other, ""), chain, strict=True)] == [True, True, False, False]
        assert not set(chain) & set(chain_of(ids, "a"))

    def test_follows_rows_that_change_places(self) -> None:
        index, one, two = PrefixIndex(), chain_of(prompt_of(48), ""), chain_of(prompt_of(64, 1), "")
        index.learn(0, one)
        index.learn(1, two)
        index.move({0: 1, 1: 0})
        assert (index.find(one), index.find(two)) == ((1, 3), (0, 4))
        index.move({0: 1})
        assert (index.find(one), index.find(two)[1]) == ((0, 3), 0)
        index.trim(9, 40)
        assert index.find(one) == (0, 2)
        index.trim(0, 40)
        assert entries(index) == (0, 0)


def test_answers_of_several_keys_that_share_prefixes_are_those_of_each_alone() -> None:
    base = prompt_of(48)
    prompts = {f"{scope}{n}": ([*base[: 16 * (1 + n)], *prompt_of(20, n)], scope) for scope in "ab" for n in range(3)}
    expected = {
        id: tokens(run(engine_of(prefix_cache=False), request(id, prompt, 8))[id])
        for id, (prompt, _) in prompts.items()
    }
    engine = engine_of(max_sequences=2, prefill_chunk=16)
    for _ in range(2):  # the second time from what is kept
        found = run(engine, *(request(id, prompt, 8, cache_scope=scope) for id, (prompt, scope) in prompts.items()))
        assert {id: tokens(events) for id, events in found.items()} == expected
