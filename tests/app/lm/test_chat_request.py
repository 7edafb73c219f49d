"""What a chat request may say, and what it comes to in tokens."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headwater.engine import SAMPLING_FIELDS, EngineLimits, Sampling
from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.text.language import LanguageText
from headwater_server.lm.text_plan import TextPlan
from tests.app.lm.scripted import LIMITS, tiny_text

HELLO = [{"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def planned(limits: EngineLimits = LIMITS, text: LanguageText | None = None, **fields: Any) -> TextPlan:
    body = {"model": "m", "messages": HELLO, **fields}
    return ChatRequest.read(json.dumps(body).encode()).plan(text or tiny_text(), limits)


def refused(limits: EngineLimits = LIMITS, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        planned(limits, **fields)
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def test_messages_go_through_the_chat_template() -> None:
    (spec,) = planned().specs
    assert tiny_text().tokenizer.decode(spec.prompt, skip_special_tokens=False) == RENDERED
    assert spec.sampling == Sampling()
    assert planned().prompt_tokens == len(spec.prompt)


def test_parts_are_joined_and_nulls_are_nothing() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}
    nulls: dict[str, Any] = dict.fromkeys(
        field for field in ChatRequest.__struct_fields__ if field not in ("model", "messages")
    )
    assert planned(messages=[message], **nulls).specs == planned().specs


def test_every_field_gets_where_it_belongs() -> None:
    plan = planned(
        temperature=0, top_p=0.5, top_k=7, min_p=0.1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5,
        logit_bias={"5": -100, "17": 1.5}, seed=-3, stop="x", stop_token_ids=[9], ignore_eos=True, logprobs=True,
        top_logprobs=4, max_completion_tokens=11, max_tokens=11, include_stop_str_in_output=True,
        skip_special_tokens=False, timeout_s=2, user="me", response_format={"type": "text"},
    )  # fmt: skip
    (spec,) = plan.specs
    assert spec.sampling == Sampling(
        temperature=0, top_p=0.5, top_k=7, min_p=0.1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5,
        logit_bias={5: -100, 17: 1.5}, seed=-3, logprobs=4,
    )  # fmt: skip
    assert (spec.max_tokens, spec.stop_ids, spec.ignore_eos) == (11, frozenset({9}), True)
    assert (plan.end.stops, plan.end.include_stop, plan.end.skip_special_tokens) == (("x",), True, False)
    assert plan.timeout_s == 2
    assert planned(logprobs=True).specs[0].sampling.logprobs == 0
    assert planned(stream=True, stream_options={"include_obfuscation": False}).specs == planned().specs


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"store": False},
        {"metadata": {"run": "7"}},
        {"service_tier": "auto"},
        {"service_tier": "default"},
        {"modalities": ["text"]},
        {"prompt_cache_key": "k"},
        {"safety_identifier": "s"},
        {"user": "u"},
        {"top_k": -1},
        {"min_tokens": 0},
    ],
    ids=str,
)
def test_what_asks_for_nothing_changes_nothing(fields: dict[str, Any]) -> None:
    assert planned(**fields) == planned()


def test_an_unknown_role_is_refused_and_a_developers_message_is_a_systems() -> None:
    developer, system = (planned(messages=[{"role": role, "content": "x"}, *HELLO]) for role in ("developer", "system"))
    assert developer == system


def test_a_system_message_may_stand_alone() -> None:
    (spec,) = planned(messages=[{"role": "system", "content": "Be brief."}]).specs
    rendered = tiny_text().tokenizer.decode(spec.prompt, skip_special_tokens=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_that_is_too_long_has_openais_code() -> None:
    for fields in ({"max_tokens": 1000}, {"messages": [{"role": "user", "content": "word " * 600}]}):
        assert refused(**fields).code == "context_length_exceeded"
    assert refused(messages=[]).code is None


def test_choices_have_seeds_in_a_row() -> None:
    assert [spec.sampling.seed for spec in planned(n=3, seed=5).specs] == [5, 6, 7]
    assert [spec.sampling.seed for spec in planned(n=2, seed=2**63 - 1).specs] == [2**63 - 1, -(2**63)]
    assert [spec.sampling.seed for spec in planned(n=2).specs] == [None, None]
    assert planned(n=3).prompt_tokens == planned().prompt_tokens


def test_an_answer_has_its_share_of_the_cache_unless_said_otherwise() -> None:
    size = planned().prompt_tokens

    def room(**limits: int) -> int:
        return planned(msgspec.structs.replace(LIMITS, **limits)).specs[0].max_tokens

    assert room(cache_tokens=8 * 400) == 400 - size
    assert room(cache_tokens=8 * 100) == 256
    assert room(cache_tokens=8 * 1000) == 512 - size
    assert room(cache_tokens=100) == 100 - size


def test_what_can_never_fit_is_refused() -> None:
    size = planned().prompt_tokens
    assert planned(max_tokens=512 - size).specs[0].max_tokens == 512 - size
    error = refused(max_tokens=513 - size)
    assert error.message == (
        f"max_tokens: this model's maximum context length is 512 tokens, but this request comes to 513: {size} in "
        f"messages, and an answer of {513 - size}; expected at most {512 - size}, or a shorter prompt"
    )
    assert refused(max_completion_tokens=10**30).field == "max_completion_tokens"
    assert (
        "this model's cache is 64 tokens"
        in refused(msgspec.structs.replace(LIMITS, cache_tokens=64), max_tokens=64).message
    )
    long = refused(messages=[{"role": "user", "content": "word " * 600}])
    assert long.field == "messages"
    assert "expected at most 511 in the prompt" in long.message
    longer = refused(messages=[{"role": "user", "content": "x" * 512 * 256}])
    assert "512 tokens, prompt and answer together; expected at most 131072 characters, got 131" in longer.message
    many = refused(messages=[{"role": "user", "content": "x"}] * 513)
    assert "expected at most as many messages, got 513" in many.message
    assert "expected tokens from 0 to 9" in refused(msgspec.structs.replace(LIMITS, vocab_size=10)).message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 2.5}, "temperature: expected a number from 0 to 2, got 2.5"),
        ({"temperature": "1"}, "temperature: expected a number, got a string"),
        ({"top_p": -0.1}, "top_p: expected a number from 0 to 1, got -0.1"),
        ({"min_p": 2}, "min_p: expected a number from 0 to 1, got 2.0"),
        ({"presence_penalty": 3}, "presence_penalty: expected a number from -2 to 2, got 3.0"),
        ({"frequency_penalty": -3}, "frequency_penalty: expected a number from -2 to 2, got -3.0"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number from 0.01 to 100, got 0.0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: expected a number from 0.01 to 100, got 1e-300"),
        ({"repetition_penalty": 101}, "repetition_penalty: expected a number from 0.01 to 100, got 101.0"),
        ({"top_k": -2}, "top_k: expected an integer from -1 to 2147483647; 0 and -1 keep all tokens, got -2"),
        ({"min_tokens": -1}, "min_tokens: expected at least 0, got -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: expected at most 8, the most tokens of the answer, got 9"),
        ({"top_k": 1.5}, "top_k: expected an integer, got a number"),
        ({"seed": 2**63}, f"seed: expected an integer from {-(2**63)} to {2**63 - 1}, got {2**63}"),
        ({"n": 0}, "n: expected an integer from 1 to 128, got 0"),
        ({"n": 129}, "n: expected an integer from 1 to 128, got 129"),
        ({"n": True}, "n: expected an integer, got a boolean"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x: expected a token id from 0 to 4095, got 'x'"),
        ({"logit_bias": {"4096": 1}}, "logit_bias.4096: expected a token id from 0 to 4095, got '4096'"),
        ({"logit_bias": {"9" * 5000: 1}}, "expected a token id"),
        ({"logit_bias": {"4": 101}}, "logit_bias.4: expected a number from -100 to 100, got 101.0"),
        ({"stop": ""}, "stop: expected 1 to 1024 characters, got an empty string"),
        ({"stop": ["a", "x" * 1025]}, "stop[1]: expected 1 to 1024 characters, got 1025 characters"),
        ({"stop": ["a"] * 17}, "stop: expected at most 16 strings, got 17"),
        ({"stop": [1]}, "stop[0]: expected a string, got an integer"),
        ({"stop_token_ids": [3, 4096]}, "stop_token_ids[1]: expected a token id from 0 to 4095, got 4096"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"max_completion_tokens": -1}, "max_completion_tokens: expected at least 1, got -1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens: expected the same as max_tokens"),
        ({"top_logprobs": 1}, 'top_logprobs: allowed only with "logprobs": true'),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: expected an integer from 0 to 20, got 21"),
        ({"stream_options": {"include_usage": True}}, 'stream_options: expected it with "stream": true only'),
        (
            {"stream_options": {"x": 1}, "stream": True},
            "stream_options.x: expected one of the fields include_usage, continuous_usage_stats, include_obfuscation, ",
        ),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation: "),
        ({"timeout_s": 0}, "timeout_s: expected seconds, above 0"),
        ({"response_format": {"type": "json_object"}}, "response_format: this model does not support it; leave it out"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: expected an object with a name"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
            "response_format.json_schema: expected it with the type \"json_schema\" only, got 'text'; leave it out",
        ),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content: expected a string or an array of text parts, got null",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[1].tool_calls[0].function: expected an object with 'name' and 'arguments', got null",
        ),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[0].tool_call_id: expected a "),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt: "),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages: expected a variable of the model"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "`options.tool_parser`"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls: expected a boolean, got an integer"),
        ({"store": True}, "store: this server keeps no answers; expected false, got true"),
        ({"metadata": {"a": 1}}, "metadata[...]: expected a string, got an integer"),
        ({"modalities": ["text", "text"]}, 'modalities: expected ["text"], got 2'),
        ({"modalities": ["audio"]}, "modalities[0]: expected 'text', got 'audio'"),
        ({"service_tier": "flex"}, "service_tier: expected 'auto' or 'default', got 'flex'"),
        ({"audio": {}}, "audio: this model does not support it; leave it out"),
        ({"best_of": 2}, "best_of: expected one of the fields "),
        ({"chat_template_kwargs": []}, "chat_template_kwargs: expected an object, got an array"),
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": [{}]}, "messages[0].role: expected one of developer, system, user, assistant, tool, function, "),
        ({"messages": [{"role": 1}]}, "messages[0].role: expected one of developer, system, user, assistant, tool, "),
        ({"messages": [{"role": "robot", "content": "x"}]}, "tool, function, got 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type: "),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    assert message in refused(**fields).message


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "body: expected a JSON object, got an empty body"),
        (b"[]", "body: expected an object, got an array"),
        (b'{"model": "m"}', "messages: expected this field, got an object without it"),
        (b'{"model": "m", "messages": [}', "body: expected JSON, got malformed JSON"),
        (b'{"model": "m\xff", "messages": []}', "body: expected JSON in UTF-8, got byte 0xff in a string"),
        (b'{"model": "m", "messages": ' + b"[" * 50_000, "body: expected JSON, got"),
        (b'{"model": "m", "messages": [], "temperature": 1e999}', "temperature: "),
    ],
)
def test_what_is_no_request_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ChatRequest.read(raw)
    assert message in caught.value.message


def test_a_field_that_the_engine_does_not_heed_is_refused_only_if_it_says_something() -> None:
    limits = msgspec.structs.replace(LIMITS, sampling=SAMPLING_FIELDS - {"top_k", "logprobs"})
    assert planned(limits, top_k=0).specs
    assert refused(limits, top_k=1).message == "top_k: this model does not support it; leave it out"
    assert refused(limits, logprobs=True).message == "logprobs: this model does not support it; leave it out"


def test_a_model_without_a_template_names_the_other_route() -> None:
    text = LanguageText.__new__(LanguageText)
    text.tokenizer, text.template = tiny_text().tokenizer, None
    text.sampling = Sampling()
    with pytest.raises(BadRequest, match="no chat template; send its prompt as text to /v1/completions"):
        planned(text=text)
