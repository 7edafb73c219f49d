"""What a request of the generate extension may say to a language model."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headwater_server.errors import BadRequest, CallableFailed
from headwater_server.lm.text_generate import GenerateRequest
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.text_stream import TextPiece, Usage
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
        ({"text_input": 1}, "text_input: expected a string or an array, got an integer"),
        ({"text_input": ["x", "y"]}, "text_input: expected one text, got 2"),
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
        (
            {"text_input": "x", "seed": 1, "parameters": {"seed": 1}},
            "parameters.seed: expected it once, got seed as well",
        ),
        ({"text_input": "x", "stop": "a", "stop_words": "b"}, "stop_words: expected it once, got stop as well"),
        ({"text_input": "x", "stop_words": ["a"] * 17}, "stop_words: expected at most 16 words, got 17"),
        ({"text_input": "x", "bad_words": ["def", "big words"]}, "bad_words[1]: expected a word that is one token"),
        ({"text_input": "x", "parameters": {"bad_words": "big words"}}, "parameters.bad_words: expected a word that"),
        ({"text_input": "x", "end_id": 4096}, "end_id: expected a token id up to 4095, or -1, got 4096"),
        ({"text_input": "x", "beam_width": 4}, "beam_width: expected 1, got 4"),
        ({"text_input": "x", "min_length": -1}, "min_length: expected at least 0, got -1"),
        ({"text_input": "x", "min_length": 1, "min_tokens": 1}, "min_length: expected it once, got min_tokens as well"),
        ({"text_input": "x", "return_log_probs": True}, "return_log_probs: this model does not support it"),
        (
            {"text_input": "x", "parameters": {"return_finish_reason": True}},
            "parameters.return_finish_reason: expected false, since the parameters of every answer have finish_reason",
        ),
        ({"text_input": "x", "sampling_parameters": "{"}, "sampling_parameters: expected JSON, got malformed JSON"),
        ({"text_input": "x", "sampling_parameters": "{}" * 32_769}, "sampling_parameters: expected at most 65536"),
        (
            {"text_input": "x", "parameters": {"sampling_parameters": '{"n": 2}'}},
            "parameters.sampling_parameters.n: expected 1, got 2",
        ),
        (
            {"text_input": "x", "sampling_parameters": '{"temperature": "hot"}'},
            "sampling_parameters.temperature: expected a number, got a string",
        ),
        (
            {"text_input": "x", "top_k": 1, "sampling_parameters": '{"top_k": 1}'},
            "sampling_parameters.top_k: expected it once, got top_k as well",
        ),
        (
            {"text_input": "x", "sampling_parameters": '{"stop_token_ids": [4096]}'},
            "sampling_parameters.stop_token_ids[0]: expected a token id from 0 to 4095",
        ),
        ({"text_input": "x", "id": "i" * 1001}, "id: expected at most 1000 characters, got 1001"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        planned(**fields)
    assert message in caught.value.message


def test_the_documented_bodies_of_tritons_backends_are_taken() -> None:
    vllm = planned(text_input="What is Triton?", parameters={"stream": False, "temperature": 0})
    assert vllm == planned(text_input=["What is Triton?"], temperature=0)
    tensorrt = planned(text_input="What is ML?", max_tokens=20, bad_words="", stop_words="", pad_id=2, end_id=2)
    (spec,) = tensorrt.specs
    assert (spec.max_tokens, spec.stop_ids, spec.ignore_eos, tensorrt.end.stops) == (20, frozenset([2]), True, ())


def test_the_backends_words_for_the_same() -> None:
    given = {"stop_words": ["a", ""], "random_seed": 5, "beam_width": 1, "n": 1, "return_log_probs": False}
    assert planned(text_input="x", **given) == planned(text_input="x", stop="a", seed=5)
    assert planned(text_input="x", end_id=-1) == planned(text_input="x", ignore_eos=True)


def test_bad_words_are_never_likely_with_and_without_a_space() -> None:
    (spec,) = planned(text_input="x", bad_words=["def", ""], logit_bias={"5": 1}).specs
    banned = {*ids_of("def"), *ids_of(" def")}
    assert len(banned) == 2
    assert spec.sampling.logit_bias == {5: 1, **dict.fromkeys(banned, -100)}
    engine = msgspec.structs.replace(LIMITS, sampling=LIMITS.sampling - {"logit_bias"})
    request = GenerateRequest.read(b'{"text_input": "x", "bad_words": "def"}')
    with pytest.raises(BadRequest, match="bad_words: this model does not support it"):
        request.plan(tiny_text(), engine)


def test_sampling_parameters_are_json_text_whose_numbers_may_be_strings() -> None:
    text = json.dumps({"temperature": "0.1", "top_p": 0.95, "max_tokens": "7", "ignore_eos": "true", "stop": ["x"]})
    same = {"temperature": 0.1, "top_p": 0.95, "max_tokens": 7, "ignore_eos": True, "stop": ["x"]}
    expected = planned(text_input="x", **same)
    assert planned(text_input="x", sampling_parameters=text) == expected
    assert planned(text_input="x", parameters={"sampling_parameters": text, "stream": False}) == expected


def test_the_answer_begins_with_the_input_if_asked() -> None:
    assert planned(text_input="x", exclude_input_in_output=False).prefixes == ["x"]
    assert planned(text_input="x", parameters={"exclude_input_in_output": True}).prefixes == [""]


def test_details_are_for_engines_that_have_log_probabilities() -> None:
    (spec,) = planned(text_input="x", parameters={"details": True}).specs
    assert spec.sampling.logprobs == 0
    assert planned(text_input="x", details=False).specs[0].sampling.logprobs is None
    engine = msgspec.structs.replace(LIMITS, sampling=LIMITS.sampling - {"logprobs"})
    request = GenerateRequest.read(b'{"text_input": "x", "parameters": {"details": true}}')
    with pytest.raises(BadRequest, match=r"^parameters\.details: this model has no log probabilities; expected false"):
        request.plan(tiny_text(), engine)


def test_a_stream_in_one_event() -> None:
    request = GenerateRequest.read(b'{"text_input": "x", "parameters": {"stream": false}}')
    form = request.answer_form("m", streams=True)
    assert form.piece(0, TextPiece("a")) == form.piece(0, TextPiece("b", (), "stop")) == []
    text, end = map(json.loads, form.end(Usage(1, 2), None))
    assert text == {"model_name": "m", "model_version": "1", "text_output": "ab"}
    assert (end["final"], end["finish_reason"]) == (True, "stop")
    form = request.answer_form("m", streams=True)
    assert [json.loads(event).get("status") for event in form.end(Usage(1, 2), CallableFailed("x"))] == [500, None]


@pytest.mark.parametrize("where", [{"stream": True}, {"parameters": {"stream": True}}])
def test_events_are_not_for_the_route_without(where: dict[str, Any]) -> None:
    request = GenerateRequest.read(json.dumps({"text_input": "x", **where}).encode())
    with pytest.raises(BadRequest, match=r"stream: expected false, .*got true; POST to /v2/models/m/generate_stream"):
        request.answer_form("m", streams=False)
    form = request.answer_form("m", streams=True)
    assert len(form.piece(0, TextPiece("a"))) == 1
