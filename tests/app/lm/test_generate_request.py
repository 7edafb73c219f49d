"""What a request of the generate extension may say to a language model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import BadRequest
from app.lm.generate import GenerateRequest
from app.lm.text_plan import TextPlan
from tests.app.lm.scripted import LIMITS, ids_of, tiny_text


def planned(**fields: Any) -> TextPlan:
    return GenerateRequest.read(json.dumps(fields).encode()).plan(tiny_text(), LIMITS)


def test_the_text_is_taken_as_it_is() -> None:
    (spec,) = planned(text_input="def f").specs
    assert (spec.prompt, spec.max_tokens) == (ids_of("def f"), 16)


def test_parameters_stand_within_or_beside() -> None:
    given = {"max_tokens": 5, "top_k": 3, "seed": 1, "stop": ["x"], "timeout": 2_500_000, "ignore_eos": True}
    within = planned(text_input="def f", parameters=given, id="i")
    assert within == planned(text_input="def f", **given)
    assert within == planned(text_input="def f", parameters={"max_tokens": 5}, **{**given, "max_tokens": None})
    (spec,) = within.specs
    assert (spec.max_tokens, spec.sampling.top_k, spec.sampling.seed, spec.ignore_eos) == (5, 3, 1, True)
    assert (within.end.stops, within.timeout_s) == (("x",), 2.5)
    assert planned(text_input="x", timeout=0).timeout_s is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "text_input: expected this field, got an object without it"),
        ({"text_input": ["x"]}, "text_input: expected a string, got an array"),
        ({"text_input": ""}, "text_input: expected at least one token, got none"),
        ({"text_input": "x", "top_k": -2}, "top_k: expected an integer from -1"),
        ({"text_input": "x", "parameters": {"top_k": -2}}, "parameters.top_k: expected an integer from -1"),
        ({"text_input": "x", "parameters": {"top_k": ""}}, "parameters.top_k: expected an integer, got a string"),
        ({"text_input": "x", "parameters": {"stop": ["a", ""]}}, "parameters.stop[1]: expected 1 to 1024"),
        ({"text_input": "x", "parameters": {"stop_token_ids": [-1]}}, "parameters.stop_token_ids[0]: expected"),
        ({"text_input": "x", "parameters": {"max_tokens": -1}}, "parameters.max_tokens: expected at least 0"),
        ({"text_input": "x", "parameters": {"max_tokens": 999}}, "parameters.max_tokens: this model's maximum"),
        ({"text_input": "x", "parameters": {"min_tokens": 17}}, "parameters.min_tokens: expected at most 16"),
        ({"text_input": "x", "parameters": {"timeout": -1}}, "parameters.timeout: expected an integer"),
        ({"text_input": "x", "parameters": {"volume": 1}}, "parameters.volume: expected one of the fields "),
        ({"text_input": "x", "volume": 1}, "volume: expected one of the fields "),
        ({"text_input": "x", "seed": 1, "parameters": {"seed": 1}}, "seed: expected it once, got parameters.seed"),
        ({"text_input": "x", "id": "i" * 1001}, "id: expected at most 1000 characters, got 1001"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        planned(**fields)
    assert message in caught.value.message
