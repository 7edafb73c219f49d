"""The slot engine's log probabilities of prompts: those of a plain forward pass, whatever the chunks and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import headwater.zoo
from headwater.engine import PromptLogprob, RequestRejected, Sampling, SequenceRequest, TokenEvent
from headwater.lm import step_limits
from headwater.lm.causal_lm import load_causal_lm
from headwater.lm.null_engine import NullEngine
from headwater.lm.slot_engine import SlotEngine
from tests.inference.lm.llamas import VOCAB_SIZE, by_id, prompt_of, request, tiny, tokens

pytestmark = pytest.mark.heavy
LLAMA = tiny()
TINY_LM = Path(headwater.zoo.__file__).parent / "weights" / "tiny_lm"


def engine_of(model: Any = LLAMA, **options: Any) -> SlotEngine:
    return SlotEngine(model, **{"max_sequences": 4, "prefill_chunk": 32, **options})


def run(engine: SlotEngine, *requests: SequenceRequest) -> dict[str, tuple[list[PromptLogprob], list[TokenEvent]]]:
    """What each request was told of its prompt, and its other events, which come after that."""
    for one in requests:
        engine.submit(one)
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    parts = [event for event in events if event.prompt]
    assert all((event.index, event.token, event.finish) == (0, None, None) for event in parts)
    rest = by_id([event for event in events if not event.prompt])
    for id, found in rest.items():
        last_part = max((events.index(event) for event in parts if event.id == id), default=-1)
        assert last_part < events.index(found[0])
    return {
        id: ([one for event in parts if event.id == id for one in event.prompt], found) for id, found in rest.items()
    }


@torch.inference_mode()
def check(model: Any, prompt: Sequence[int], found: Sequence[PromptLogprob], most: int) -> None:
    """They are those of one pass over the whole prompt."""
    expected = model(torch.tensor([prompt]), use_cache=False).logits[0].float().log_softmax(dim=-1)
    assert len(found) == len(prompt) - 1
    for place, (logprob, top) in enumerate(found):
        assert logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=1e-4)
        assert len(top) == min(most, expected.shape[1])
        assert [other for _, other in top] == sorted((other for _, other in top), reverse=True)
        for (token, other), best in zip(top, expected[place].topk(len(top)).values.tolist(), strict=True):
            assert other == pytest.approx(float(expected[place, token]), abs=1e-4)
            assert other == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize("chunk", [7, 16, 256])
@pytest.mark.parametrize("length", [1, 2, 16, 100])
def test_they_are_those_of_a_plain_pass_in_chunks_or_not(length: int, chunk: int) -> None:
    prompt = prompt_of(length)
    found, events = run(engine_of(prefill_chunk=chunk), request("a", prompt, 3, prompt_logprobs=3))["a"]
    check(LLAMA, prompt, found, 3)
    _, plain = run(engine_of(prefill_chunk=chunk), request("a", prompt, 3))["a"]
    assert tokens(events) == tokens(plain)


def test_they_are_those_of_the_shipped_model() -> None:
    model = load_causal_lm(TINY_LM).model
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    prompt = [token % vocab_size for token in range(5, 3000, 23)]
    for chunk in 50, 256:
        engine = engine_of(model, prefill_chunk=chunk)
        found, _ = run(engine, request("a", prompt, 1, Sampling(temperature=0, logprobs=20), prompt_logprobs=20))["a"]
        check(model, prompt, found, 20)


def test_a_prompt_alone_has_them() -> None:
    prompts = {str(length): prompt_of(length) for length in (1, 9, 60)}
    found = run(engine_of(), *(request(id, prompt, 0, prompt_logprobs=1) for id, prompt in prompts.items()))
    for id, (logprobs, events) in found.items():
        check(LLAMA, prompts[id], logprobs, 1)
        assert events == [TokenEvent(id, 0, None, finish="length")]


def test_none_of_the_most_probable_if_none_are_wanted() -> None:
    found, _ = run(engine_of(), request("a", prompt_of(9), 0, prompt_logprobs=0))["a"]
    check(LLAMA, prompt_of(9), found, 0)


def test_neighbours_have_them_only_if_they_ask_for_them() -> None:
    prompts = {str(length): prompt_of(length) for length in (5, 7, 9, 40)}
    found = run(
        engine_of(prefill_chunk=64),
        *(request(id, one, 4, prompt_logprobs=2 if id in "7 40" else None) for id, one in prompts.items()),
    )
    for id, (logprobs, events) in found.items():
        if id in "7 40":
            check(LLAMA, prompts[id], logprobs, 2)
        else:
            assert logprobs == []
        assert tokens(events) == tokens(run(engine_of(), request(id, prompts[id], 4))[id][1])


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_what_the_prefix_cache_has_is_computed_all_the_same(prefix_cache: bool) -> None:
    engine, prompt = engine_of(prefix_cache=prefix_cache), prompt_of(70)
    run(engine, request("before", prompt, 2))
    for id in "a", "b":
        found, events = run(engine, request(id, prompt, 2, prompt_logprobs=2))[id]
        check(LLAMA, prompt, found, 2)
        assert events[0].cached == 0
    _, events = run(engine, request("after", prompt, 2))["after"]
    assert events[0].cached == (64 if prefix_cache else 0)


def test_choices_of_the_same_prompt_each_have_them() -> None:
    prompt = prompt_of(50)
    found = run(engine_of(), *(request(str(n), prompt, 1, prompt_logprobs=1) for n in range(6)))
    for logprobs, _ in found.values():
        check(LLAMA, prompt, logprobs, 1)


def test_few_logits_are_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    engine, forward, sizes = engine_of(model, prefill_chunk=64), model.forward, []

    def noting(**given: Any) -> Any:
        output = forward(**given)
        sizes.append(output.logits.numel())
        return output

    monkeypatch.setattr(model, "forward", noting)
    monkeypatch.setattr(step_limits, "SCORED_LOGITS", 10 * VOCAB_SIZE)
    prompts = {str(length): prompt_of(length) for length in (4, 5, 64)}
    run(engine, request("plain", prompt_of(64), 2))
    assert max(sizes) == VOCAB_SIZE  # of the last token alone
    found = run(engine, *(request(id, prompt, 1, prompt_logprobs=1) for id, prompt in prompts.items()))
    assert max(sizes) == 10 * VOCAB_SIZE
    for id, (logprobs, _) in found.items():
        check(LLAMA, prompts[id], logprobs, 1)


def test_one_that_is_cancelled_in_the_middle_gets_no_more() -> None:
    engine = engine_of(prefill_chunk=16)
    engine.submit(request("a", prompt_of(60), 3, prompt_logprobs=1))
    assert [len(event.prompt) for event in engine.step()] == [16]
    engine.cancel("a")
    assert [(event.prompt, event.finish) for event in engine.step()] == [((), "cancelled")]
    assert not engine.has_work


def test_logits_that_are_not_finite_fail_a_prompt_alone_too() -> None:
    model = tiny()
    engine = engine_of(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    _, events = run(engine, request("a", prompt_of(9), 0, prompt_logprobs=1))["a"]
    assert [(event.finish, event.error) for event in events] == [("error", "the model's logits are not finite")]


def test_an_engine_without_them_refuses() -> None:
    with pytest.raises(RequestRejected, match="prompt_logprobs: this engine does not support it"):
        NullEngine().submit(request("a", [1, 2], 1, prompt_logprobs=0))


def test_what_follows_reuses_the_prompt_that_had_them() -> None:
    engine, prompt = engine_of(), prompt_of(70)
    run(engine, request("a", prompt, 2, prompt_logprobs=0))
    assert run(engine, request("b", prompt, 2))["b"][1][0].cached == 64
