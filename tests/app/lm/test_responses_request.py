"""What a request to ``/v1/responses`` may say: it comes to what the same chat comes to."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headwater.engine import SAMPLING_FIELDS, EngineLimits, Sampling
from headwater_server.errors import BadRequest, ContextTooLong
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.text.language import LanguageText
from headwater_server.lm.text_plan import TextPlan
from tests.app.lm.scripted import LIMITS, tiny_text
from tests.app.lm.tool_text import WEATHER, tool_text

FLAT: dict[str, Any] = {"type": "function", **WEATHER["function"]}
"""A tool as this API has it."""
ASKED: dict[str, Any] = {"role": "user", "content": "hi"}
CALLED: dict[str, Any] = {
    "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "weather", "status": "completed",
    "arguments": '{"city": "Oslo"}',
}  # fmt: skip
RETURNED: dict[str, Any] = {"type": "function_call_output", "id": None, "call_id": "call_1", "output": "rain"}


def planned(limits: EngineLimits = LIMITS, language: LanguageText | None = None, **fields: Any) -> TextPlan:
    body = {"model": "m", "input": "hi", **fields}
    return ResponsesRequest.read(json.dumps(body).encode()).plan(language or tiny_text(), limits)


def chat(*messages: tuple[str, str], **fields: Any) -> TextPlan:
    body = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages], **fields}
    return ChatRequest.read(json.dumps(body).encode()).plan(tiny_text(), LIMITS)


def refused(limits: EngineLimits = LIMITS, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        planned(limits, **fields)
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value


def refused_with(kind: type[BadRequest]) -> BadRequest:
    with pytest.raises(kind) as caught:
        planned()
    return caught.value


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("messages[0].content", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("logprobs", "include"),
    ],
)
def test_a_chats_error_is_about_the_field_of_this_api_however_it_is_worded(
    path: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*args: object, **options: object) -> TextPlan:
        raise ContextTooLong.about(path, f" reworded in messages, and an answer, {path}")

    monkeypatch.setattr(ChatRequest, "plan", plan)
    error = refused_with(ContextTooLong)
    assert error.field is not None
    assert error.field.startswith(field)
    assert error.message == f"{error.field} reworded in messages, and an answer, {path}"


def test_a_string_is_a_users_message() -> None:
    assert planned() == chat(("user", "hi"))


def test_instructions_are_a_systems_message_before_the_input() -> None:
    assert planned(instructions="Be brief.") == chat(("system", "Be brief."), ("user", "hi"))


def test_items_are_messages_and_an_answers_item_may_be_sent_back() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "phase": None,
         "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}]},
        {"type": "message", "role": "user",
         "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
    ]  # fmt: skip
    assert planned(input=items) == chat(("user", "a"), ("assistant", "b"), ("user", "c\nd"))


def test_every_field_gets_where_it_belongs() -> None:
    shared: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "seed": 3, "stop": "x", "ignore_eos": True, "timeout_s": 2,
        "presence_penalty": 1, "logit_bias": {"5": -100}, "chat_template_kwargs": {"x": 1},
    }  # fmt: skip
    logprobs: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 4}
    expected = chat(("user", "hi"), max_completion_tokens=11, logprobs=True, top_logprobs=4, **shared)
    assert planned(max_output_tokens=11, **logprobs, **shared) == expected
    assert planned(include=logprobs["include"]) == chat(("user", "hi"), logprobs=True)


def test_what_asks_for_nothing_is_taken() -> None:
    nulls: dict[str, Any] = dict.fromkeys(set(ResponsesRequest.__struct_fields__) - {"model", "input"})
    assert planned(**nulls) == planned()
    nothing: dict[str, Any] = {
        "store": False, "background": False, "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "truncation": "disabled", "text": {"format": {"type": "text"}}, "include": ["reasoning.encrypted_content"],
        "top_logprobs": 0, "service_tier": "auto", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s",
        "prompt_cache_key": "k", "stream": True, "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    assert planned(**nothing) == planned()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": True}, "store: this server keeps no answers, so no answer can be fetched later; expected"),
        ({"background": True}, "background: this server keeps no answers, so no answer can be fetched later; expected"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: this server keeps no answers, so it can't"),
        ({"conversation": "conv_1"}, "conversation: this model does not support it; leave it out"),
        ({"prompt": {"id": "p"}}, "prompt: this model does not support it; leave it out"),
        ({"reasoning": {"effort": "most"}}, "reasoning.effort: expected 'high' or 'low' or 'max' or 'medium' or"),
        ({"tools": [FLAT, {"type": "unheard"}]}, "tools[1].type: expected 'function', the only type of tool this m"),
        ({"tools": [{"type": [1]}]}, "tools[0].type: expected 'function', the only type of tool this model"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name: expected the namespace's name, got null"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**FLAT, "name": 1}]}]},
            "tools[0].tools[0].name: expected 1 to 128 letters, digits, _ and -, got",
        ),
        ({"tools": [1]}, "tools[0]: expected an object of the type 'function', got 1"),
        ({"tools": {}}, "tools: expected an array of tools, got an object"),
        ({"tools": [WEATHER]}, "tools[0].function: expected its fields (name, description, parameters, strict) in its"),
        ({"tools": [{**FLAT, "name": "a b"}]}, "tools[0].name: expected 1 to 128 letters, digits, _ and -, got 'a b'"),
        ({"tools": [{**FLAT, "parameters": {"type": "array"}}]}, "tools[0].parameters.type: expected 'object', got"),
        ({"tools": [FLAT]}, "tools: this model's chat template has no known format of tool calls; leave"),
        ({"tool_choice": "required"}, "tool_choice: expected it with tools to choose from; set tools, or leave it out"),
        ({"tool_choice": "any"}, "tool_choice: expected 'none', 'auto', 'required' or an object that names a function"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type: expected 'function' or 'custom', since this"),
        (
            {"tools": [FLAT], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name: expected one of the functions in tools (weather), got 'f'",
        ),
        ({"truncation": "all"}, "truncation: expected 'auto' or 'disabled', got 'all'"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity: expected 'high' or 'low' or 'medium', got 'loud'"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}}, "text.format: this model does not"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name: expected a string, got none"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema: expected it with the type"),
        ({"include": ["file_search_call.results"]}, "include[0]: expected 'message.output_text.logprobs' or "),
        ({"top_logprobs": 2}, 'top_logprobs: expected it with "include": ["message.output_text.logprobs"] only; leave'),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata: expected at most 16 keys, got 17"),
        ({"metadata": {"k" * 65: ""}}, f"metadata.{'k' * 65}: expected a key of at most 64 characters, got 65"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k: expected at most 512 characters, got 513"),
        ({"user": "u" * 513}, "user: expected at most 512 characters, got 513"),
        ({"max_tokens": 3}, "max_tokens: this model does not support it; leave it out"),
        ({"n": 2}, "n: expected 1, got 2"),
        ({"messages": []}, "messages: expected one of the fields temperature, top_p, "),
        ({"max_output_tokens": 0}, "max_output_tokens: expected at least 1, got 0"),
        ({"temperature": 3}, "temperature: expected a number from 0 to 2, got 3.0"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation: this"),
        ({"input": []}, "input: expected at least one message, got an empty array"),
        ({"input": ["x"]}, "input[0]: expected a message with 'role' and 'content', got 'x'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role: expected one of developer, system, user, ass"),
        ({"input": [{"role": "user"}]}, "input[0].content: expected a string or an array of text parts, got null"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type: expected 'message', 'reasoning', 'function_call' or"),
        (
            {"input": [ASKED, {"type": "reasoning", "content": "so"}]},
            "input[1].content: expected an array of texts, got 'so'",
        ),
        (
            {"input": [ASKED, {"type": "reasoning", "summary": [{}]}]},
            "input[1].summary[0]: expected an object with a text, got an object",
        ),
        ({"input": [ASKED, {"type": "function_call"}]}, "input[1].name: expected a string, got null"),
        ({"input": [ASKED, {**CALLED, "name": 1}]}, "input[1].name: expected a string, got 1"),
        ({"input": [ASKED, {**CALLED, "arguments": 1}]}, "input[1].arguments: expected a string, got 1"),
        ({"input": [RETURNED, {"type": "function_call_output"}]}, "input[1].call_id: expected a string, got null"),
        ({"input": [{**RETURNED, "output": None}]}, "input[0].output: expected a string or an array of text parts"),
        ({"input": [{**RETURNED, "output": [{"type": "input_file"}]}]}, "input[0].output[0].type: expected 'input_te"),
        (
            {"input": [{"role": "assistant", "content": "x", "tool_calls": []}], "instructions": "i"},
            "input[0].tool_calls: expected each call as an item of the type 'function_call'; leave it out",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type: expected 'input_text' or 'output_text', the only kinds of content this model ta",
        ),
        ({"input": [{"role": "user", "content": ["x"]}]}, 'input[0].content[0]: expected a content part like {"type"'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}], "instructions": "i"},
            "input[0].content[0].text: expected a string, got null",
        ),
        ({"input": "word " * 600}, "input: this model's maximum context length is 512 tokens, prompt and answer"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs.messages: expected a variable of the model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_in_the_words_of_this_api(fields: dict[str, Any], message: str) -> None:
    assert refused(**fields).message.startswith(message)


def test_an_answer_that_is_too_long_names_its_field() -> None:
    size = planned().prompt_tokens
    assert planned(max_output_tokens=512 - size).specs[0].max_tokens == 512 - size
    assert refused(max_output_tokens=513 - size).message == (
        f"max_output_tokens: this model's maximum context length is 512 tokens, but this request comes to 513: {size} "
        f"in input, and an answer of {513 - size}; expected at most {512 - size}, or a shorter prompt"
    )


def test_what_the_engine_or_the_model_lacks_is_named_too() -> None:
    limits = msgspec.structs.replace(LIMITS, sampling=SAMPLING_FIELDS - {"logprobs"})
    error = refused(limits, include=["message.output_text.logprobs"])
    assert error.message == "include: this model does not support it; leave it out"
    text = LanguageText.__new__(LanguageText)
    text.tokenizer, text.template = tiny_text().tokenizer, None
    text.sampling = Sampling()
    with pytest.raises(BadRequest, match=r"^input: this model has no chat template"):
        planned(language=text)


# Tools: the same chat's again


def chat_with_tools(messages: list[Any], **fields: Any) -> TextPlan:
    body = {"model": "m", "messages": messages, "tools": [WEATHER], **fields}
    return ChatRequest.read(json.dumps(body).encode()).plan(tool_text("hermes"), CONSTRAINED)


def with_tools(**fields: Any) -> TextPlan:
    return planned(CONSTRAINED, tool_text("hermes"), tools=[FLAT], **fields)


CONSTRAINED = msgspec.structs.replace(LIMITS, grammars=frozenset({"json_schema", "lark"}))


@pytest.mark.parametrize("choice", [None, "auto", "none", "required"])
@pytest.mark.parametrize("parallel", [None, True, False])
def test_tools_are_those_of_the_chat(choice: str | None, parallel: bool | None) -> None:
    fields: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": parallel}
    assert with_tools(**fields) == chat_with_tools([ASKED], **fields)


def test_a_function_is_named_without_a_level_between() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    expected = chat_with_tools([ASKED], tool_choice=named)
    assert with_tools(tool_choice={"type": "function", "name": "weather"}) == expected


def test_calls_and_what_they_returned_are_messages() -> None:
    def call(id: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "weather", "arguments": CALLED["arguments"]}}

    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]}
    parts = [{"type": "input_text", "text": "rain"}]
    items = [
        ASKED,
        said,
        CALLED,
        {**CALLED, "call_id": "call_2"},
        RETURNED,
        {**RETURNED, "call_id": "call_2", "output": parts},
        CALLED,
        RETURNED,
    ]
    results = [{"role": "tool", "tool_call_id": id, "content": "rain"} for id in ("call_1", "call_2")]
    expected = [
        ASKED,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call("call_1"), call("call_2")]},
        *results,
        {"role": "assistant", "content": None, "tool_calls": [call("call_1")]},
        results[0],
    ]
    assert with_tools(input=items) == chat_with_tools(expected)


def test_log_probabilities_are_of_messages_only() -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"]}
    with pytest.raises(BadRequest, match=r"^include: this model does not support log probabilities of an answer that"):
        with_tools(**fields)
    assert with_tools(**fields, tool_choice="none").specs[0].sampling.logprobs == 0


def test_a_form_and_tools() -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    assert with_tools(text={"format": form}) == chat_with_tools([ASKED], response_format=response_format)
    limits = msgspec.structs.replace(LIMITS, grammars=frozenset({"json_schema"}))
    with pytest.raises(BadRequest, match=r"^text\.format: this model does not support it with tools"):
        planned(limits, tool_text("hermes"), tools=[FLAT], text={"format": form})
