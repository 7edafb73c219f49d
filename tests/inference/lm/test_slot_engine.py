"""The slot engine: the tokens that `generate` gives, whoever the neighbours are; how sequences come, go and fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.engine import EngineFull, RequestRejected, RequestTooLong, Sampling, TokenEvent
from headwater.errors import ReplicaError
from headwater.lm import sampling as sampling_module
from headwater.lm.slot_cache import SlotCache
from headwater.lm.slot_engine import SlotEngine
from headwater.runtime.capacity import Capacity
from tests.inference.lm.llamas import (
    CONTEXT,
    VOCAB_SIZE,
    Short,
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
SEEDED = Sampling(temperature=0.9, top_p=0.95, seed=7)


def engine_of(model: Any = LLAMA, **options: Any) -> SlotEngine:
    return SlotEngine(model, **{"max_sequences": 32, "prefill_chunk": 16, **options})


class Poisoned:
    """Makes a model's forward raise, or return NaN, when told to."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, model: Any, is_poisoned: Callable[[torch.Tensor], bool]
    ) -> None:
        forward = model.forward
        self.is_on = True

        def poisoned(input_ids: torch.Tensor, logits_to_keep: Any = 0, **rest: Any) -> Any:
            output = forward(input_ids, logits_to_keep=logits_to_keep, **rest)
            if self.is_on and is_poisoned(input_ids):
                raise RuntimeError("on purpose")
            return output

        monkeypatch.setattr(model, "forward", poisoned)


class TestGreedyOutputIsThatOfGenerate:
    def test_of_50_prompts_alone_and_among_31_neighbours_of_mixed_lengths(self, record_property: Any) -> None:
        rng = random.Random(3)
        requests = [
            request(str(number), prompt_of(rng.choice([1, 2, 5, 15, 16, 17, 33, 60, 90]), number), rng.randint(2, 30))
            for number in range(52)
        ]
        together = run(engine_of(), *requests)
        ties = 0
        for one in requests:
            expected, leads = generated(LLAMA, one.prompt, one.max_tokens)
            alone = run(engine_of(), one)[one.id]
            assert alone[-1].finish == together[one.id][-1].finish == "length"
            ties += differs(tokens(alone), expected, leads) + differs(tokens(together[one.id]), expected, leads)
        record_property("ties", ties)
        assert ties <= 2

    @pytest.mark.parametrize(
        ("kind", "attention", "changes"),
        [
            ("llama", "eager", {}),
            ("llama", "sdpa", {"num_key_value_heads": 4}),
            ("gpt2", "sdpa", {}),
            ("qwen3", "sdpa", {}),
            ("mistral", "sdpa", {"sliding_window": 8}),
            ("gemma3_text", "sdpa", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
            ("gpt_neox", "sdpa", {}),
        ],
    )
    def test_of_other_models_and_kinds_of_attention(self, kind: str, attention: str, changes: dict[str, Any]) -> None:
        model = tiny(kind, attention, **changes)
        engine = engine_of(model)
        engine.check()
        requests = [request(str(length), prompt_of(length), 12) for length in (3, 9, 30, 1)]
        found = run(engine, *requests)
        for one in requests:
            differs(tokens(found[one.id]), *generated(model, one.prompt, 12))

    @settings(deadline=None, max_examples=15)
    @given(st.data())
    def test_whenever_neighbours_come_and_go(self, data: st.DataObject) -> None:
        engine = engine_of(max_sequences=4, prefill_chunk=data.draw(st.sampled_from([1, 7, 64])))
        arrivals = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 6)), max_size=8))
        prompts = {str(number): (prompt_of(length, number), most) for number, (length, most, _) in enumerate(arrivals)}
        events: list[TokenEvent] = []
        for number, (_, _, pause) in enumerate(arrivals):
            engine.submit(request(str(number), *prompts[str(number)]))
            for _ in range(pause):
                events += engine.step()
            if number % 3 == 2:
                engine.cancel(str(number - 1))
        while engine.has_work:
            events += engine.step()
        for id, found in by_id(events).items():
            got = tokens(found)
            if got:
                expected, leads = generated(LLAMA, *prompts[id])
                differs(got, expected[: len(got)], leads[: len(got)])


class TestASeed:
    @pytest.fixture
    def model(self) -> Any:
        return tiny()

    def test_gives_the_same_tokens_alone_and_among_neighbours(self, model: Any) -> None:
        mine = request("mine", prompt_of(20), 40, SEEDED)
        alone = run(engine_of(model, batch_invariant=True), mine)["mine"]
        others = [request(str(n), prompt_of(3 * n + 1), 5 * n + 5, Sampling(seed=n)) for n in range(8)]
        engine = engine_of(model, batch_invariant=True)
        assert tokens(run(engine, *others[:5], mine, *others[5:])["mine"]) == tokens(alone)

    def test_gives_the_same_tokens_after_a_cancelled_neighbour(self, model: Any) -> None:
        mine = request("mine", prompt_of(20), 40, SEEDED)
        alone = run(engine_of(model, batch_invariant=True), mine)["mine"]
        engine = engine_of(model, batch_invariant=True)
        engine.submit(request("first", prompt_of(30), 60))
        engine.submit(mine)
        events = [event for _ in range(9) for event in engine.step()]
        engine.cancel("first")
        while engine.has_work:
            events += engine.step()
        assert tokens(by_id(events)["mine"]) == tokens(alone)

    def test_of_its_own_gives_other_tokens(self) -> None:
        found = run(engine_of(), *(request(str(n), prompt_of(9), 30, Sampling(seed=n)) for n in range(3)))
        assert len({tuple(tokens(events)) for events in found.values()}) == 3

    def test_left_out_gives_other_tokens_each_time(self) -> None:
        found = run(engine_of(), *(request(str(n), prompt_of(9), 30, Sampling()) for n in range(3)))
        assert len({tuple(tokens(events)) for events in found.values()}) == 3


class TestTheEnd:
    def test_comes_with_the_last_of_max_tokens(self) -> None:
        for most in 1, 2, 17:
            found = run(engine_of(), request("a", prompt_of(5), most))["a"]
            assert len(tokens(found)) == len(found) == most
            assert found[-1].finish == "length"

    def test_comes_without_a_token_if_none_was_asked_for(self) -> None:
        assert run(engine_of(), request("a", prompt_of(5), 0)) == {"a": [TokenEvent("a", 0, None, finish="length")]}

    def test_comes_with_a_stop_token(self) -> None:
        whole = tokens(run(engine_of(), request("a", prompt_of(5), 20))["a"])
        stop = whole[6]
        found = run(engine_of(), request("a", prompt_of(5), 20, stop_ids=frozenset([stop])))["a"]
        assert tokens(found) == whole[: whole.index(stop) + 1]
        assert found[-1].finish == "stop"

    def test_comes_with_the_models_own_unless_they_are_ignored(self) -> None:
        whole = tokens(run(engine_of(), request("a", prompt_of(5), 20))["a"])
        eos = frozenset([whole[6]])
        found = run(
            engine_of(eos_ids=eos), request("a", prompt_of(5), 20), request("b", prompt_of(5), 20, ignore_eos=True)
        )
        assert (found["a"][-1].finish, found["b"][-1].finish) == ("stop", "length")
        assert tokens(found["a"]) == whole[: whole.index(whole[6]) + 1]
        assert tokens(found["b"]) == whole

    def test_comes_not_before_the_least_number_of_tokens(self) -> None:
        whole = tokens(run(engine_of(), request("a", prompt_of(5), 20))["a"])
        sampling = Sampling(temperature=0, min_tokens=8)
        ask = request("a", prompt_of(5), 20, sampling=sampling, stop_ids=frozenset([whole[4]]))
        found = tokens(run(engine_of(eos_ids=frozenset([whole[6]])), ask)["a"])
        assert len(found) > 8
        assert not {whole[4], whole[6]} & set(found[:8])

    def test_of_a_stop_token_that_is_also_the_last_is_a_stop(self) -> None:
        whole = tokens(run(engine_of(), request("a", prompt_of(5), 3))["a"])
        found = run(engine_of(), request("a", prompt_of(5), 1, stop_ids=frozenset([whole[0]])))["a"]
        assert found[-1].finish == "stop"

    def test_frees_the_place_in_the_same_step(self) -> None:
        engine = engine_of(max_sequences=1)
        engine.submit(request("a", prompt_of(5), 2))
        engine.submit(request("b", prompt_of(5), 1))
        assert [event.id for event in engine.step()] == ["a"]
        assert [(event.id, event.finish) for event in engine.step()] == [("a", "length"), ("b", "length")]


class TestPrompts:
    def test_one_that_is_long_is_computed_in_chunks_while_the_others_go_on(self) -> None:
        engine = engine_of(prefill_chunk=16)
        engine.submit(request("short", prompt_of(4), 50))
        engine.step()
        engine.submit(request("long", prompt_of(64), 3))
        steps = [[event.id for event in engine.step()] for _ in range(5)]
        assert steps == [["short"], ["short"], ["short"], ["short", "long"], ["short", "long"]]

    def test_those_that_are_short_are_computed_together(self) -> None:
        engine = engine_of(prefill_chunk=16)
        for number, length in enumerate((3, 4, 4, 1, 9)):
            engine.submit(request(str(number), prompt_of(length), 9))
        assert [event.id for event in engine.step()] == ["0", "1", "2", "3"]
        assert [event.id for event in engine.step()] == ["0", "1", "2", "3", "4"]


class TestLogprobs:
    def test_are_of_the_models_own_distribution(self) -> None:
        sampling = Sampling(temperature=0.5, top_k=3, presence_penalty=1, logit_bias={5: 3.0}, seed=1, logprobs=4)
        prompt = prompt_of(9)
        found = run(engine_of(), request("a", prompt, 10, sampling), request("b", prompt_of(30), 12, SEEDED))
        ids = torch.tensor([prompt + tokens(found["a"])])
        with torch.inference_mode():
            expected = LLAMA(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        for event, logprobs in zip(found["a"], expected, strict=True):
            assert event.logprob == pytest.approx(float(logprobs[event.token]), abs=1e-4)
            values, best = logprobs.topk(4)
            assert [token for token, _ in event.top] == best.tolist()
            assert [logprob for _, logprob in event.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert all(event.logprob is None and event.top == () for event in found["b"])


class TestWhatIsRefused:
    def test_a_prompt_that_can_never_fit(self) -> None:
        with pytest.raises(RequestTooLong, match=rf"at most {CONTEXT} tokens, the model's context; got 100 \+ 29"):
            engine_of().submit(request("a", prompt_of(100), 29))
        with pytest.raises(RequestTooLong, match=r"at most 64 tokens, the cache's size; got 60 \+ 5"):
            engine_of(cache_tokens=64).submit(request("a", prompt_of(60), 5))

    def test_one_more_than_may_wait(self) -> None:
        engine = engine_of(max_sequences=2, max_waiting=1)
        for number in range(3):
            engine.submit(request(str(number), prompt_of(5), 5))
        assert (engine.active, engine.waiting) == (2, 1)
        with pytest.raises(EngineFull, match="2 sequences run and 1 wait; `max_waiting` is 1"):
            engine.submit(request("3", prompt_of(5), 5))
        assert engine.cancel("0")
        engine.submit(request("3", prompt_of(5), 5))
        assert set(run(engine)) == {"0", "1", "2", "3"}

    def test_what_would_fail_in_the_midst_of_a_batch(self) -> None:
        engine = engine_of()
        for wrong, message in [
            (request("a", [], 5), "prompt: expected at least one token"),
            (request("a", [1, VOCAB_SIZE], 5), "prompt: expected tokens from 0 to 95, got 1 to 96"),
            (request("a", [-1], 5), "prompt: expected tokens"),
            (request("a", [1], 5, Sampling(logit_bias={VOCAB_SIZE: 1.0})), "logit_bias: expected tokens"),
        ]:
            with pytest.raises(RequestRejected, match=message):
                engine.submit(wrong)
        engine.submit(request("a", [1], 5))
        with pytest.raises(RequestRejected, match="id: expected an id that is not in use"):
            engine.submit(request("a", [1], 5))

    def test_a_model_whose_attention_the_cache_does_not_serve(self) -> None:
        with pytest.raises(ReplicaError, match=r"model: expected layers of full_attention or sliding_attention, got"):
            engine_of(tiny("qwen3_next", layer_types=["linear_attention", "full_attention"]))
        model = tiny("bloom", "eager", n_layer=2, n_head=4)
        with pytest.raises(ReplicaError, match=r"model: fails in the slot engine|model: BloomForCausalLM gives other"):
            engine_of(model).check()
        with pytest.raises(ReplicaError, match="attention: expected sdpa or eager, got flex_attention"):
            engine_of(tiny(attention="flex_attention"))

    def test_a_model_whose_context_is_unknown(self) -> None:
        model = tiny("bloom", "eager", n_layer=2, n_head=4)
        del model.config.max_position_embeddings
        with pytest.raises(ReplicaError, match="context_length: the model's configuration has no max_position"):
            engine_of(model)
        assert engine_of(model, context_length=50).limits.context_length == 50

    def test_a_context_longer_than_the_model_has(self) -> None:
        assert engine_of(context_length=CONTEXT).limits.context_length == CONTEXT
        with pytest.raises(ReplicaError, match=f"context_length: expected at most {CONTEXT}, .*, got {CONTEXT + 1}"):
            engine_of(context_length=CONTEXT + 1)

    @pytest.mark.parametrize("options", [{"cache_tokens": 1}, {"max_sequences": 1}, {"context_length": 1}])
    def test_a_check_has_room_whatever_the_engine_has(self, options: dict[str, Any]) -> None:
        engine = engine_of(**options)
        engine.check()
        assert held(engine) == 0

    def test_a_check_leaves_the_engine_as_it_was(self) -> None:
        engine = engine_of()
        engine.check()
        assert (engine.has_work, held(engine)) == (False, 0)


class TestCancelling:
    def test_one_that_waits(self) -> None:
        engine = engine_of(max_sequences=1)
        engine.submit(request("a", prompt_of(5), 3))
        engine.submit(request("b", prompt_of(5), 3))
        assert engine.cancel("b")
        assert engine.waiting == 0
        found = run(engine)
        assert found["b"] == [TokenEvent("b", 0, None, finish="cancelled")]
        assert found["a"][-1].finish == "length"

    def test_one_that_has_a_place_but_was_not_begun(self) -> None:
        engine = engine_of()
        engine.submit(request("a", prompt_of(5), 3))
        assert engine.cancel("a")
        assert (engine.active, engine.cache_used) == (0, 0)
        assert engine.step() == [TokenEvent("a", 0, None, finish="cancelled")]

    def test_one_whose_prompt_is_computed_in_part(self) -> None:
        engine = engine_of(prefill_chunk=16)
        engine.submit(request("a", prompt_of(60), 3))
        engine.submit(request("b", prompt_of(5), 3))
        assert engine.step() == []
        assert engine.cancel("a")
        assert engine.active == 1
        found = run(engine)
        assert found["a"] == [TokenEvent("a", 0, None, finish="cancelled")]
        differs(tokens(found["b"]), *generated(LLAMA, prompt_of(5), 3))

    def test_one_that_generates(self) -> None:
        engine = engine_of(prefill_chunk=32)
        others = {"b": (prompt_of(7), 20), "c": (prompt_of(11), 20)}
        engine.submit(request("a", prompt_of(5), 50))
        for id, other in others.items():
            engine.submit(request(id, *other))
        events = engine.step() + engine.step()
        engine.submit(request("d", prompt_of(60), 4))
        events += engine.step()  # computes a part of d's prompt, which then moves
        assert engine.cancel("a")
        assert engine.active == 3
        while engine.has_work:
            events += engine.step()
        found = by_id(events)
        assert found["a"][-1] == TokenEvent("a", 3, None, finish="cancelled")
        for id, other in {**others, "d": (prompt_of(60), 4)}.items():
            differs(tokens(found[id]), *generated(LLAMA, *other))

    def test_one_that_is_not_there(self) -> None:
        engine = engine_of()
        assert not engine.cancel("a")
        run(engine, request("a", prompt_of(5), 2))
        assert not engine.cancel("a")
        assert not engine.has_work


class TestAFailure:
    @pytest.fixture
    def model(self) -> Any:
        return tiny()

    def test_of_a_step_ends_all_that_run_and_frees_everything(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = engine_of(model, max_sequences=3)
        for number in range(4):
            engine.submit(request(str(number), prompt_of(5), 9))
        events = engine.step() + engine.step()
        assert len(events) == 6
        poison = Poisoned(monkeypatch, model, lambda ids: True)
        events = engine.step()
        assert [(event.id, event.index, event.finish) for event in events[:3]] == [
            (str(n), 2, "error") for n in range(3)
        ]
        assert {event.error for event in events} == {"RuntimeError: on purpose"}
        assert events[3].id == "3"  # it had its turn, and failed too
        assert (engine.active, engine.waiting, engine.cache_used, engine.has_work) == (0, 0, 0, False)
        poison.is_on = False
        differs(tokens(run(engine, request("a", prompt_of(5), 9))["a"]), *generated(model, prompt_of(5), 9))

    def test_of_a_prompt_spares_those_that_generate(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        Poisoned(monkeypatch, model, lambda ids: ids.shape[1] > 1 and bool((ids == 95).any()))
        prompt = [1, 2, 3]
        found = run(engine_of(model, prefill_chunk=3), request("a", prompt, 9), request("b", [95, 95], 9))
        assert found["b"] == [TokenEvent("b", 0, None, finish="error", error="RuntimeError: on purpose")]
        assert found["a"][-1].finish == "length"

    def test_of_a_step_spares_a_prompt_computed_in_part(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engine_of(model)
        engine.submit(request("a", prompt_of(5), 50))
        engine.step()
        engine.submit(request("b", prompt_of(40), 5))
        events = engine.step()
        poison = Poisoned(monkeypatch, model, lambda ids: ids.shape[1] == 1)
        events += engine.step()
        poison.is_on = False
        while engine.has_work:
            events += engine.step()
        assert [event.finish for event in events if event.id == "a"] == [None, "error"]
        differs(tokens([event for event in events if event.id == "b"]), *generated(model, prompt_of(40), 5))

    def test_of_numbers_ends_that_sequence_and_leaves_nothing_behind(self, model: Any) -> None:
        with torch.no_grad():
            model.get_input_embeddings().weight[95] = float("nan")
            model.lm_head.weight[95] = 0
        engine = engine_of(model, max_sequences=3)
        requests = [request("a", prompt_of(5), 9), request("bad", [1, 95, 3], 9), request("c", prompt_of(7), 9)]
        clean = [[token % 95 for token in one.prompt] for one in requests]
        requests = [
            request(one.id, one.prompt if one.id == "bad" else ids, 9) for one, ids in zip(requests, clean, strict=True)
        ]
        found = run(engine, *requests)
        assert found["bad"] == [TokenEvent("bad", 0, None, finish="error", error="the model's logits are not finite")]
        again = run(engine, *(request(str(n), clean[0], 20) for n in range(3)))
        assert [events[-1].finish for events in (*again.values(), found["a"], found["c"])] == ["length"] * 5

    def test_of_the_device_is_reported(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        reasons: list[str] = []
        engine = engine_of(model, on_broken=reasons.append)

        def fail(*args: Any, **rest: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

        monkeypatch.setattr(model, "forward", fail)
        monkeypatch.setattr("headwater.lm.slot_engine.breaks_device", lambda reason, device: "CUDA error" in reason)
        assert run(engine, request("a", [1], 3))["a"][-1].finish == "error"
        assert reasons == ["RuntimeError: CUDA error: device-side assert triggered"]


class TestMemory:
    REQUESTS = tuple((prompt_of(4 + 3 * number, number), 12 + number) for number in range(6))

    @pytest.fixture
    def model(self) -> Any:
        return tiny()

    @pytest.mark.parametrize("limits", [{"rows": 4}, {"rows": 1}, {"tokens": 20}, {"rows": 2, "tokens": 16}], ids=str)
    def test_that_does_not_suffice_for_all_ends_no_sequence_and_changes_no_token(
        self, model: Any, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
    ) -> None:
        expected = [generated(model, *one) for one in self.REQUESTS]
        short = Short(monkeypatch, model, **limits)
        engine = engine_of(model, max_sequences=6, prefill_chunk=64)
        found = run(engine, *(request(str(n), *one) for n, one in enumerate(self.REQUESTS)))
        assert short.failures
        for number, one in enumerate(expected):
            assert found[str(number)][-1].finish == "length"
            assert [event.index for event in found[str(number)]] == list(range(self.REQUESTS[number][1]))
            differs(tokens(found[str(number)]), *one)
        assert (engine.active, engine.waiting, engine.cache_used) == (0, 0, 0)

    def test_that_runs_out_once_a_token_is_drawn_changes_no_drawn_token(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        samplings = [Sampling(temperature=1.5, seed=n, logprobs=0) for n in range(2)]
        requests = [request(str(n), [5, 6, 7], 12, sampling) for n, sampling in enumerate(samplings)]
        expected = {id: tokens(events) for id, events in run(engine_of(model), *requests).items()}
        logprobs_of, failures = sampling_module.logprobs_of, []

        def short(logits: torch.Tensor, *rest: Any) -> Any:
            if len(logits) > 1:
                failures.append(len(logits))
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return logprobs_of(logits, *rest)

        monkeypatch.setattr(sampling_module, "logprobs_of", short)
        assert {id: tokens(events) for id, events in run(engine_of(model), *requests).items()} == expected
        assert failures

    def test_is_not_tried_beyond_what_fitted_and_the_operator_is_told(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[tuple[str, int]] = []
        capacity = Capacity(lambda text, count: told.append((text, count)))
        engine = engine_of(model, max_sequences=6, capacity=capacity)
        short = Short(monkeypatch, model, rows=3)
        requests = [request(str(n), prompt_of(4, n), 8) for n in range(6)]
        run(engine, *requests)
        assert told[-1] == ("the engine: out of memory with 6 sequences at once; computes at most 2 for 300 s", 2)
        before = short.failures
        assert {events[-1].finish for events in run(engine, *requests).values()} == {"length"}
        assert short.failures == before

    def test_that_does_not_suffice_for_one_alone_ends_that_one(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forward = model.forward

        def greedy(input_ids: torch.Tensor, logits_to_keep: Any = 0, **rest: Any) -> Any:
            if (input_ids == 95).any():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return forward(input_ids, logits_to_keep=logits_to_keep, **rest)

        monkeypatch.setattr(model, "forward", greedy)
        broken: list[str] = []
        engine = engine_of(model, on_broken=broken.append)
        others = [[token % 95 for token in prompt_of(6, n)] for n in range(3)]
        found = run(engine, request("bad", [1, 95, 3], 9), *(request(str(n), ids, 9) for n, ids in enumerate(others)))
        (end,) = found.pop("bad")
        assert (end.finish, end.index) == ("out_of_memory", 0)
        assert end.error.startswith("out of memory on cpu with this sequence alone; send a shorter prompt, or ")
        assert {events[-1].finish for events in found.values()} == {"length"}
        assert (broken, engine.has_work) == ([], False)

    def test_for_a_larger_cache_is_found_by_those_that_have_one_going_first(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = engine_of(model, max_sequences=4)
        requests = [(prompt_of(5, n), 20) for n in range(4)]
        expected = [generated(model, *one) for one in requests]
        fit = SlotCache.fit

        def fail(cache: SlotCache, rows: int, length: int) -> None:
            if rows > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            fit(cache, rows, length)

        monkeypatch.setattr(SlotCache, "fit", fail)
        found = run(engine, *(request(str(n), *one) for n, one in enumerate(requests)))
        for number, one in enumerate(expected):
            differs(tokens(found[str(number)]), *one)

    def test_that_is_short_in_a_prompts_middle_repeats_none_of_its_log_probabilities(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompt = prompt_of(60)
        one = request("a", prompt, 3, prompt_logprobs=1)
        engine = engine_of(model, prefill_chunk=32)
        engine.submit(one)
        expected = [part for _ in range(9) for event in engine.step() for part in event.prompt]
        engine.submit(request("b", prompt_of(5), 40))
        events = engine.step()
        engine.submit(one)
        events += engine.step()
        short = Short(monkeypatch, model, tokens=0)
        events += engine.step()
        short.tokens = 999
        while engine.has_work:
            events += engine.step()
        found = [part for event in events if event.id == "a" for part in event.prompt]
        assert short.failures
        assert len(found) == len(prompt) - 1
        assert [own for own, _ in found] == pytest.approx([own for own, _ in expected], abs=1e-4)

    def test_cancelling_one_that_was_put_off_ends_it(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = engine_of(model, max_sequences=4)
        Short(monkeypatch, model, rows=1)
        for number in range(4):
            engine.submit(request(str(number), prompt_of(5, number), 9))
        events = engine.step() + engine.step() + engine.step()
        assert (engine.active, {event.id for event in events}) == (4, {"3"})
        assert engine.cancel("0")
        while engine.has_work:
            events += engine.step()
        assert sorted(str(event.finish) for event in events if event.finish) == ["cancelled", *["length"] * 3]


class TestTheCache:
    @settings(deadline=None, max_examples=25)
    @given(st.data())
    def test_never_exceeds_its_budget_and_leaks_nothing(self, data: st.DataObject) -> None:
        budget = data.draw(st.integers(40, 200))
        engine = engine_of(max_sequences=4, max_waiting=3, cache_tokens=budget, prefill_chunk=8)
        wanted: dict[str, int] = {}
        cancelled: set[str] = set()
        events: list[TokenEvent] = []
        for number in range(data.draw(st.integers(1, 12))):
            length, most = data.draw(st.tuples(st.integers(1, 30), st.integers(0, 12)))
            try:
                engine.submit(request(str(number), prompt_of(length), most))
                wanted[str(number)] = most
            except (EngineFull, RequestTooLong):
                pass
            for _ in range(data.draw(st.integers(0, 3))):
                events += engine.step()
                assert engine.cache_used <= budget
                assert held(engine) <= budget
                assert engine.active <= 4
                assert engine.waiting <= 3
            if data.draw(st.booleans()):
                id = str(data.draw(st.integers(0, number)))
                if engine.cancel(id):
                    cancelled.add(id)
        while engine.has_work:
            events += engine.step()
        found = by_id(events)
        assert set(found) == set(wanted)
        for id, all_events in found.items():
            assert all_events[-1].finish == ("cancelled" if id in cancelled else "length")
            if id not in cancelled:
                assert len(tokens(all_events)) == wanted[id]
        assert (engine.active, engine.waiting, engine.cache_used) == (0, 0, 0)

    def test_grows_with_what_is_there(self) -> None:
        engine = engine_of(tiny(max_position_embeddings=2048), prefill_chunk=1024)
        run(engine, request("a", prompt_of(5), 5))
        assert held(engine) == 256
        run(engine, *(request(str(n), prompt_of(300), 5) for n in range(3)))
        assert held(engine) == 3 * 512

    def test_is_freed_for_the_device_whenever_the_cache_has_another_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        freed: list[tuple[int, int]] = []
        engine = engine_of(tiny(max_position_embeddings=2048), prefill_chunk=1024)
        monkeypatch.setattr("headwater.lm.slot_cache.free_memory", lambda: freed.append(rows_of(engine).cache.shape))
        run(engine, request("a", prompt_of(5), 5))
        run(engine, request("b", prompt_of(300), 5))
        assert freed == [(1, 256), (1, 512)]

    def test_is_given_back_at_the_end(self) -> None:
        engine = engine_of()
        engine.submit(request("a", prompt_of(5), 5))
        engine.submit(request("b", prompt_of(5), 5))
        engine.step()
        engine.close()
        assert (held(engine), engine.active, engine.has_work, engine.step()) == (0, 0, False, [])


@pytest.mark.gpu
def test_on_a_gpu_too_greedy_output_is_that_of_generate() -> None:
    model = tiny().to("cuda")
    engine = engine_of(model)
    engine.check()
    requests = [request(str(length), prompt_of(length), 20) for length in (3, 9, 30, 1)]
    found = run(engine, *requests)
    for one in requests:
        assert tokens(found[one.id]) == tokens(run(engine_of(), one)[one.id])
