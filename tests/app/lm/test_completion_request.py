"""What a completion request may say, and what it comes to in tokens."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headwater.engine import EngineLimits
from headwater_server.errors import BadRequest
from headwater_server.lm.completion import CompletionRequest
from headwater_server.lm.text_plan import TextPlan
from tests.app.lm.scripted import LIMITS, ids_of, tiny_text


def planned(prompt: Any, limits: EngineLimits = LIMITS, **fields: Any) -> TextPlan:
    body = {"model": "m", "prompt": prompt, **fields}
    return CompletionRequest.read(json.dumps(body).encode()).plan(tiny_text(), limits)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("def f", [ids_of("def f")]),
        (["def f", "x"], [ids_of("def f"), ids_of("x")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts_of_every_form(prompt: Any, expected: list[list[int]]) -> None:
    plan = planned(prompt)
    assert [spec.prompt for spec in plan.specs] == expected
    assert plan.prompt_tokens == sum(map(len, expected))
    assert all(spec.max_tokens == 16 for spec in plan.specs)


def test_choices_of_a_prompt_stand_together() -> None:
    plan = planned([[5], [6]], n=2, seed=1, max_tokens=0)
    assert [(spec.prompt, spec.sampling.seed) for spec in plan.specs] == [([5], 1), ([5], 2), ([6], 1), ([6], 2)]
    assert plan.prompt_tokens == 2
    assert len(planned(["x"] * 64, msgspec.structs.replace(LIMITS, max_waiting=256), n=4).specs) == 256


def test_more_answers_than_places_can_never_be_had() -> None:
    limits = msgspec.structs.replace(LIMITS, max_sequences=2, max_waiting=3)
    assert len(planned("x", limits, n=5).specs) == 5
    with pytest.raises(BadRequest, match="n: expected at most 5 answers in all, got 1 prompts x 6"):
        planned("x", limits, n=6)
    with pytest.raises(BadRequest, match="prompt: expected at most 5 answers in all, got 6 prompts x 1"):
        planned(["x"] * 6, limits)


def test_answers_share_what_they_have_in_common() -> None:
    bias = {str(token): 1 for token in range(4096)}
    limits = msgspec.structs.replace(LIMITS, max_waiting=256)
    specs = planned([[5], [6]], limits, n=16, seed=1, logit_bias=bias, stop_token_ids=[7]).specs
    assert len({id(spec.sampling.logit_bias) for spec in specs}) == len({id(spec.stop_ids) for spec in specs}) == 1
    assert len({id(spec.prompt) for spec in specs}) == 2


def test_the_default_shrinks_to_what_fits() -> None:
    assert planned([5] * 510).specs[0].max_tokens == 2


def test_echo_gives_the_prompt_as_it_was_sent() -> None:
    assert planned(["a <|im_end|>", "b"], echo=True, n=2).prefixes == ["a <|im_end|>"] * 2 + ["b"] * 2
    assert planned([*ids_of("a b"), 2], echo=True).prefixes == ["a b"]
    assert planned([*ids_of("a b"), 2], echo=True, skip_special_tokens=False).prefixes == ["a b<|im_end|>"]
    assert planned("a").prefixes == [""]


def test_echo_with_logprobs_asks_for_those_of_the_prompts() -> None:
    limits = msgspec.structs.replace(LIMITS, prompt_logprobs=True)
    plan = planned([ids_of("a b"), ids_of("c")], limits, echo=True, logprobs=3, n=2, max_tokens=0)
    assert [(spec.prompt_logprobs, spec.sampling.logprobs) for spec in plan.specs] == [(3, 3)] * 4
    assert plan.offsets == [[0, 1]] * 2 + [[0]] * 2
    for fields in {"echo": True}, {"logprobs": 3}, {"logprobs": 3, "echo": False}:
        plan = planned("a b", limits, **fields)
        assert (plan.specs[0].prompt_logprobs, plan.offsets) == (None, [()])


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ("", {}, "prompt: expected at least one token, got none"),
        ([], {}, "prompt: expected at least one string or token id, got an empty array"),
        (["a", ""], {}, "prompt[1]: expected at least one token, got none"),
        ([[5], []], {}, "prompt[1]: expected at least one token, got none"),
        (5, {}, "prompt: expected a string or an array, got an integer"),
        (["a", 5], {}, "got an array with strings and token ids"),
        ([True], {}, "got an array with true"),
        ([5, 4096], {}, "prompt[1]: expected a token id from 0 to 4095, got 4096"),
        ([[5], [6, "x"]], {}, "prompt[1][1]: expected a token id from 0 to 4095, got 'x'"),
        ([[5, True]], {}, "prompt[0][1]: expected a token id from 0 to 4095, got true"),
        ([-1], {}, "prompt[0]: expected a token id from 0 to 4095, got -1"),
        (["x"] * 257, {}, "prompt: expected at most 256 prompts, got 257"),
        (["x"] * 64, {"n": 5}, "n: expected at most 256 answers in all, got 64 prompts x 5"),
        (["a", "x" * (512 * 256 + 1)], {}, "prompt[1]: this model's maximum context length is 512 tokens, prompt and"),
        ([5] * 512, {}, "prompt: this model's maximum context length is 512 tokens"),
        ([[5], [5] * 500], {"max_tokens": 100}, "this request comes to 600: 500 in prompt[1]"),
        ("x", {"max_tokens": -1}, "max_tokens: expected at least 0, got -1"),
        ("x", {"logprobs": 21}, "logprobs: expected an integer from 0 to 20, got 21"),
        ("x", {"logprobs": True}, "logprobs: expected an integer, got a boolean"),
        (
            "x",
            {"logprobs": 1, "echo": True},
            "logprobs: this model has no log probabilities of prompts",
        ),
        ("x", {"best_of": 2}, "best_of: this model ranks no answers; expected 1, the same as n, got 2; leave it out"),
        ("x", {"best_of": 1, "n": 2}, "best_of: this model ranks no answers; expected 2, the same as n, got 1"),
        (
            "x",
            {"suffix": "y"},
            "suffix: expected an empty string, since this model does not support suffixes, got 1 characters",
        ),
        ("x", {"messages": []}, "messages: expected one of the fields "),
    ],
)
def test_what_is_wrong_is_named(prompt: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        planned(prompt, **fields)
    assert message in caught.value.message
    assert caught.value.message.startswith(f"{caught.value.field}: ")


def test_a_cache_smaller_than_the_context_bounds_too() -> None:
    with pytest.raises(BadRequest, match="prompt: this model's cache is 8 tokens"):
        planned([5] * 8, msgspec.structs.replace(LIMITS, cache_tokens=8))


def test_the_best_of_as_many_as_asked_for_are_all_of_them() -> None:
    assert planned("x", best_of=1, suffix="", logprobs=0).specs[0].sampling.logprobs == 0
    assert planned("x", n=2, best_of=2) == planned("x", n=2)
