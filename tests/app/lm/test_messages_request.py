"""Requests of ``/v1/messages`` as the chat requests that they become."""

from __future__ import annotations

import json
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from headwater_server.errors import BadRequest, ContextTooLong, ThreadUnsupported
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.known_fields import read_known
from headwater_server.lm.messages_request import CountTokensRequest, MessagesRequest
from headwater_server.lm.text.language import LanguageText
from headwater_server.lm.text_plan import TextPlan
from tests.app.lm.scripted import LIMITS
from tests.app.lm.tool_text import TEMPLATES, tool_folder, tool_text

ROOMY = msgspec.structs.replace(
    LIMITS, context_length=100_000, cache_tokens=400_000, grammars=frozenset({"lark", "json_schema"})
)
HELLO: Any = [{"role": "user", "content": "hi"}]
PIXEL = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
SEARCH: Any = {"type": "web_search_20260318", "name": "web_search", "max_uses": 3}
USE: Any = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "t1"}


def request(**fields: Any) -> MessagesRequest:
    body = {"model": "m", "messages": HELLO, "max_tokens": 64, **fields}
    return read_known(json.dumps(body).encode(), MessagesRequest)[0]


def planned(template: str = "reasoning", **fields: Any) -> TextPlan:
    return request(**fields).plan(tool_text(template), ROOMY)


def form(**fields: Any) -> dict[str, Any]:
    """The fields of vLLM's chat request."""
    folds = fields.pop("folds_system", False)
    return request(**fields).chat_form(is_relayed=True, folds_system=folds).fields


def messages(**fields: Any) -> Any:
    return form(**fields)["messages"]


def called(*results: Any) -> Any:
    """A conversation with a call, and these results."""
    return [*HELLO, {"role": "assistant", "content": [USE]}, {"role": "user", "content": list(results)}]


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def refused(**fields: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        planned(**fields)
    assert caught.value.field is not None
    assert caught.value.message.startswith(caught.value.field)
    assert len(caught.value.message) < 500
    return caught.value.message


# The conversation


def test_a_conversation_renders_as_through_chat() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        "system": [{**text("Be brief."), **cached}, text("Be kind.")],
        "tools": [{**WEATHER, "description": "The weather", **cached, "input_examples": [{}]}],
        "messages": [
            {"role": "user", "content": "Hi!"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "any"},
                {"type": "redacted_thinking", "data": "x"}, text("So:"), {**USE, **cached},
            ]},
            {"role": "user", "content": [{**RESULT, "content": [text("mild"), text("dry")]}, text("And?")]},
        ],
    }  # fmt: skip
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    chat = {
        "model": "m",
        "tools": [{"type": "function", "function": {
            "name": "weather", "description": "The weather", "parameters": WEATHER["input_schema"],
        }}],
        "messages": [
            {"role": "system", "content": [text("Be brief."), text("Be kind.")]},
            {"role": "user", "content": "Hi!"},
            {"role": "assistant", "content": "So:", "reasoning_content": "Hm.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": [text("mild"), text("dry")]},
            {"role": "user", "content": [text("And?")]},
        ],
    }  # fmt: skip
    for template in ("hermes", "mistral", "reasoning"):
        expected = ChatRequest.read(json.dumps(chat).encode()).plan(tool_text(template), ROOMY)
        plan = planned(template, **body)
        assert plan.specs[0].prompt == expected.specs[0].prompt
        assert plan.prompt_tokens == expected.prompt_tokens
        assert plan.ignored == ()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "mild"}, "mild"),
        ({"content": []}, ""),
        ({"content": [text("mild")]}, "mild"),
        ({"content": [text("a"), text("b")]}, [text("a"), text("b")]),
        ({"content": "no", "is_error": True}, "Error: no"),
        ({"content": [text("a"), text("b")], "is_error": True}, [text("Error: a"), text("b")]),
        ({"is_error": True}, "Error"),
    ],
)
def test_a_result(result: dict[str, Any], expected: Any) -> None:
    assert messages(messages=called({**RESULT, **result}))[2:] == [
        {"role": "tool", "tool_call_id": "t1", "content": expected}
    ]


def test_images_of_results_are_the_users_after_all_results() -> None:
    results = [text("See:"), {**RESULT, "content": [text("a"), PIXEL]}, {**RESULT, "content": "b"}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert messages(messages=called(*results))[2:] == [
        {"role": "tool", "tool_call_id": "t1", "content": "a"},
        {"role": "tool", "tool_call_id": "t1", "content": "b"},
        {"role": "user", "content": [image, text("See:")]},
    ]


def test_a_model_of_text_refuses_images_by_their_place() -> None:
    message = refused(messages=[{"role": "user", "content": [text("a"), PIXEL]}])
    assert message.startswith("messages[0].content[1].type: expected 'text'")
    message = refused(messages=called({**RESULT, "content": [text("a"), PIXEL]}))
    assert message.startswith("messages[2].content[0].content[1].type: ")


def test_a_calls_input_stays_as_it_was_written() -> None:
    raw = b'{"b": 123456789012345678901, "a": 1.50}'
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": called(RESULT)}).encode()
    read = MessagesRequest.read(body.replace(b'{"city": "Bonn"}', raw))
    (call,) = read.chat_form(is_relayed=True, folds_system=False).fields["messages"][1]["tool_calls"]
    assert call["function"]["arguments"].encode() == raw


@pytest.mark.parametrize("given", [None, {}])
def test_a_call_without_input_has_an_empty_object(given: Any) -> None:
    turns = [*HELLO, {"role": "assistant", "content": [{**USE, "input": given}]}, *HELLO]
    assert messages(messages=turns)[1]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("content", [None, "", [], [{"type": "redacted_thinking", "data": "x"}]])
def test_an_assistants_turn_may_be_empty(content: Any) -> None:
    turns = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    assert messages(messages=turns)[1] == {"role": "assistant", "content": ""}
    planned(messages=turns)


def test_a_turn_that_only_thought_is_taken_back() -> None:
    turns = [*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}]}, *HELLO]
    assert messages(messages=turns)[1]["reasoning_content"] == "Hm."


def test_an_assistants_message_is_continued() -> None:
    turns = [*HELLO, {"role": "assistant", "content": "The answer is ("}]
    fields = form(messages=turns)
    assert (fields["add_generation_prompt"], fields["continue_final_message"]) == (False, True)
    assert rendered(tool_text("hermes"), messages=turns).endswith("assistant\nThe answer is (")


# System messages


def without(template: str, role: str, instead: str) -> str:
    """A template that does something else for a later message of this role."""
    condition = f"message.role == '{role}' and not loop.first"
    turn = "{{ '<|im_start|>' + message.role + '\\n' }}"
    return template.replace(turn, f"{{% if {condition} %}}{instead}{{% else %}}{turn}", 1).replace(
        "<|im_end|>\n{% endfor %}", "{% endif %}<|im_end|>\n{% endfor %}", 1
    )


@cache
def strict_text(instead: str) -> LanguageText:
    with TemporaryDirectory() as folder:
        model = tool_folder(Path(folder) / "model", "hermes")
        (model / "chat_template.jinja").write_text(without(TEMPLATES["hermes"], "system", instead))
        return LanguageText(model)


LATER: Any = [
    {"role": "user", "content": "one"}, {"role": "system", "content": [text("later")]},
    {"role": "assistant", "content": "two"}, {"role": "user", "content": [text("three")]},
    {"role": "system", "content": "last"},
]  # fmt: skip


def rendered(text: LanguageText, **fields: Any) -> str:
    return text.tokenizer.decode(request(**fields).plan(text, ROOMY).specs[0].prompt, skip_special_tokens=False)


def test_a_later_system_message_stays_where_it_is() -> None:
    prompt = rendered(tool_text("hermes"), system="first", messages=LATER)
    places = [prompt.index(f"<|im_start|>system\n{content}") for content in ("first", "later", "last")]
    assert places == sorted(places)


@pytest.mark.parametrize("instead", ["{{ raise_exception('no system here') }}", ""])
def test_a_later_system_message_that_the_template_refuses_or_drops_joins_the_users(instead: str) -> None:
    prompt = rendered(strict_text(instead), system="first", messages=LATER)
    assert prompt.count("<|im_start|>system") == 1
    assert "<|im_start|>user\none\nlater<|im_end|>" in prompt
    assert "<|im_start|>user\nthree\nlast<|im_end|>" in prompt


def test_folded_messages() -> None:
    roles = [(one["role"], one["content"]) for one in messages(system="a", messages=LATER, folds_system=True)]
    assert roles == [
        ("system", "a"), ("user", [text("one"), text("later")]), ("assistant", "two"),
        ("user", [text("three"), text("last")]),
    ]  # fmt: skip
    first = [{"role": "system", "content": "b"}, *HELLO]
    assert messages(system="a", messages=first, folds_system=True)[0]["content"] == [text("a"), text("b")]
    after = [*called({**RESULT, "content": "mild"}), {"role": "system", "content": "c"}, *HELLO]
    assert messages(messages=after, folds_system=True)[3:] == [{"role": "user", "content": [text("c"), text("hi")]}]


# Tools


def test_tools_and_choices() -> None:
    fields = form(tools=[{**WEATHER, "type": "custom", "description": "d", "strict": True}])
    function = {"name": "weather", "description": "d", "parameters": WEATHER["input_schema"], "strict": True}
    assert fields["tools"] == [{"type": "function", "function": function}]
    for choice, expected in (
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ):
        assert form(tools=[WEATHER], tool_choice=choice)["tool_choice"] == expected
    single = {"type": "auto", "disable_parallel_tool_use": True}
    assert form(tools=[WEATHER], tool_choice=single)["parallel_tool_calls"] is False
    assert {"tools", "tool_choice"}.isdisjoint(form(tools=[], tool_choice={"type": "auto"}))


def test_tools_of_anthropics_models_are_left_out_and_named() -> None:
    assert planned("hermes", tools=[SEARCH, WEATHER]).ignored == ("tools[0]",)
    assert [tool["function"]["name"] for tool in form(tools=[SEARCH, WEATHER])["tools"]] == ["weather"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}])
def test_tools_of_anthropics_models_are_refused_where_they_must_be_called(choice: Any) -> None:
    assert refused(tools=[WEATHER, SEARCH], tool_choice=choice).startswith("tools[1].type: expected 'custom'")


def test_a_deferred_tool_is_offered_once_a_reference_names_it() -> None:
    tools = [
        WEATHER,
        {**WEATHER, "name": "later", "defer_loading": True},
        {**WEATHER, "name": "no", "defer_loading": True},
    ]
    assert [tool["function"]["name"] for tool in form(tools=tools)["tools"]] == ["weather"]
    found = called({**RESULT, "content": [{"type": "tool_reference", "tool_name": "later"}]})
    fields = form(tools=tools, messages=found)
    assert [tool["function"]["name"] for tool in fields["tools"]] == ["weather", "later"]
    assert fields["messages"][2]["content"] == "Tool loaded: later"


# Reasoning and the form of the answer


def test_thinking_and_effort() -> None:
    both = {"enable_thinking": True, "thinking": True}
    fields = form(thinking={"type": "enabled", "budget_tokens": 2048})
    assert (fields["chat_template_kwargs"], "reasoning_effort" in fields) == (both, False)
    fields = form(thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert fields["chat_template_kwargs"] == dict.fromkeys(both, False)
    assert "reasoning_effort" not in fields
    for kind in ("adaptive", "between_tools"):
        fields = form(thinking={"type": kind}, output_config={"effort": "max"})
        assert (fields["reasoning_effort"], "chat_template_kwargs" in fields) == ("max", False)
    fields = form(thinking={"type": "enabled"}, chat_template_kwargs={"thinking": 3})
    assert fields["chat_template_kwargs"] == {**both, "thinking": 3}


def test_what_the_template_cannot_do_is_named() -> None:
    assert planned(thinking={"type": "enabled", "budget_tokens": 1024}).ignored == ("thinking.budget_tokens",)
    assert planned("hermes", thinking={"type": "enabled"}).ignored == ("thinking.type",)
    assert planned("hermes", thinking={"type": "disabled"}).ignored == ()
    assert planned("hermes", output_config={"effort": "low"}).ignored == ("output_config.effort",)
    assert planned(output_config={"effort": "low"}).ignored == ()


def test_a_schema_becomes_a_grammar_with_the_clients_field() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format = {"type": "json_schema", "schema": schema}
    for field, fields in (
        ("output_config.format", {"output_config": {"format": format}}),
        ("output_format", {"output_format": format}),
    ):
        grammar = planned("hermes", **fields).specs[0].grammar
        assert grammar is not None
        assert (grammar.kind, json.loads(grammar.text), grammar.field) == ("json_schema", schema, field)


def test_sampling_and_the_end_of_the_answer() -> None:
    plan = planned(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"], timeout_s=3, max_tokens=5)
    (spec,) = plan.specs
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k) == (0.5, 0.9, 7)
    assert (plan.end.stops, plan.timeout_s, spec.max_tokens) == (("END",), 3, 5)


def test_an_answer_longer_than_the_context_is_capped_and_a_longer_prompt_refused() -> None:
    (spec,) = planned(max_tokens=10**9).specs
    assert len(spec.prompt) + spec.max_tokens == ROOMY.context_length
    with pytest.raises(ContextTooLong, match=r"^messages: "):
        request(messages=[{"role": "user", "content": "a b " * 100_000}]).plan(tool_text("hermes"), LIMITS)


def test_labels_and_further_fields_are_taken() -> None:
    fields: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": {"edits": []},
        "cache_control": {"type": "ephemeral"}, "container": None, "mcp_servers": [], "thread": None,
    }  # fmt: skip
    assert planned(**fields).ignored == ()
    body = {"model": "m", "messages": HELLO, "max_tokens": 1, "speed": "fast", "thinking": {"type": "adaptive", "x": 1}}
    assert read_known(json.dumps(body).encode(), MessagesRequest)[1] == ("speed", "thinking.x")


# Wrong requests


def test_a_thread_is_refused_with_its_own_error() -> None:
    with pytest.raises(ThreadUnsupported, match=r"^thread: "):
        planned(thread={"type": "create"}, messages=[{"role": "user", "content": [RESULT]}])


def block(**fields: Any) -> Any:
    return [{"role": "user", "content": [fields]}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": []}, "messages: expected at least one message"),
        ({"messages": {}}, "messages: expected an array"),
        ({"messages": ["x"]}, "messages[0]: expected an object"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: expected this field"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: expected 'assistant' or 'system' or "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: expected text, or at least one block"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content: expected text"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: expected text"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: expected a string or an array"),
        ({"messages": [{"role": "user", "content": [[text("x")]]}]}, "messages[0].content[0]: expected an object"),
        ({"messages": block(type="text")}, "messages[0].content[0].text: expected this field"),
        ({"messages": block(type="text", text=3)}, "messages[0].content[0].text: expected a string, got an integer"),
        ({"messages": block(type="text", text=[text("x")])}, "messages[0].content[0].text: expected a string"),
        ({"messages": block(type="document")}, "messages[0].content[0].type: expected 'text' or 'image' or "),
        ({"messages": block(type=3)}, "messages[0].content[0].type: expected a string, got another value"),
        ({"messages": block(text="x")}, "messages[0].content[0].type: expected this field"),
        ({"messages": block(type="image")}, "messages[0].content[0].source: expected this field"),
        ({"messages": block(type="image", source={"type": "file", "file_id": "f"})},
         "messages[0].content[0].source.type: expected 'base64' or 'url', got 'file'"),
        ({"messages": block(type="image", source={"type": "base64", "media_type": "image/svg+xml", "data": ""})},
         "messages[0].content[0].source.media_type: expected 'image/gif'"),
        ({"messages": block(**USE)}, "messages[0].content[0].type: expected 'text' or 'tool_result', got 'tool_use'"),
        ({"messages": block(type="thinking", thinking="x")}, "messages[0].content[0].type: expected 'text'"),
        ({"messages": block(**RESULT)}, "messages[0].content[0].tool_use_id: expected the id of a tool_use block"),
        ({"messages": block(type="tool_result")}, "messages[0].content[0].tool_use_id: expected this field"),
        ({"messages": called({**RESULT, "content": [RESULT]})}, "messages[2].content[0].content[0].type: expected "),
        ({"messages": called({**RESULT, "is_error": "no"})}, "messages[2].content[0].is_error: expected a boolean"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [PIXEL]}]},
         "messages[1].content[0].type: expected 'text' or 'tool_use' or 'thinking'"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [{**USE, "input": "x"}]}]},
         "messages[1].content[0].input: expected an object, got 'x'"),
        ({"messages": [{"role": "system", "content": [USE]}]}, "messages[0].content[0].type: expected 'text', got"),
        ({"system": 3}, "system: expected a string or an array"),
        ({"system": [PIXEL]}, "system[0].type: expected 'text', got 'image'"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1"),
        ({"max_tokens": None}, "max_tokens: expected an integer, got null"),
        ({"max_tokens": "9"}, "max_tokens: expected an integer"),
        ({"temperature": 3}, "temperature: expected a number from 0 to 2"),
        ({"stop_sequences": "END"}, "stop_sequences: expected an array"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: expected 1"),
        ({"stream": "yes"}, "stream: expected a boolean"),
        ({"thinking": {"type": "on"}}, "thinking.type: expected 'adaptive' or "),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens: expected at least 1"),
        ({"thinking": True}, "thinking: expected an object"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort: expected 'high' or "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: expected this field"),
        ({"tool_choice": "auto"}, "tool_choice: expected an object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: expected it with tools to choose from"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name: expected one of the functions"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: expected one of"),
        ({"tools": {}}, "tools: expected an array"),
        ({"tools": [3]}, "tools[0]: expected an object"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name: expected"),
        ({"tools": [{**WEATHER, "name": "🙂"}]}, "tools[0].name: expected"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name: expected each function once"),
        ({"tools": [SEARCH, {**WEATHER, "input_schema": {"type": "string"}}]}, "tools[1].input_schema.type: expected"),
        ({"tools": [{**WEATHER, "input_schema": 3}]}, "tools[0].input_schema: expected an object"),
        ({"tools": [{**WEATHER, "name": f"f{n}"} for n in range(5000)]}, "tools: expected at most"),
        ({"container": "c"}, "container: not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: not supported"),
        ({"max_token": 5}, "max_token: expected one of this request's fields, got 'max_token'; did you mean"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages: expected"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(fields: dict[str, Any], expected: str) -> None:
    assert refused(template="hermes", **fields).startswith(expected)


def test_ten_thousand_blocks_take_little_time() -> None:
    blocks = [text(f"a{n}") for n in range(10_000)]
    call = {"role": "assistant", "content": [{**USE, "id": f"t{n}"} for n in range(3000)]}
    results = [{**RESULT, "tool_use_id": f"t{n}", "content": "x"} for n in range(3000)]
    system = [{"role": "system", "content": "s"}] * 3000
    turns = [{"role": "user", "content": blocks}, call, {"role": "user", "content": results}, *system]
    asked = request(messages=turns)
    began_s = time.process_time()
    assert len(asked.chat_form(is_relayed=True, folds_system=True).fields["messages"]) == 3003
    assert time.process_time() - began_s < 2


# Counting


def test_tokens_are_counted_as_the_answers_usage_has_them() -> None:
    fields = {"system": "Be brief.", "tools": [WEATHER], "messages": called({**RESULT, "content": "mild"})}
    body = {"model": "m", **fields}
    counted = CountTokensRequest.read(json.dumps(body).encode()).counted(tool_text("hermes"), ROOMY)
    assert counted == planned("hermes", **fields).prompt_tokens


def test_more_tokens_than_the_context_holds_are_counted() -> None:
    long = [{"role": "user", "content": "a b " * 2000}]
    body = {"model": "m", "messages": long, "tools": []}
    assert (
        CountTokensRequest.read(json.dumps(body).encode()).counted(tool_text("hermes"), LIMITS) > LIMITS.context_length
    )


def test_ten_megabytes_are_refused_at_little_cost() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a b c " * 1_700_000}]}
    asked = CountTokensRequest.read(json.dumps(body).encode())
    began_s = time.process_time()
    with pytest.raises(BadRequest, match=r"^messages: expected fewer than 131072 tokens to count, got more"):
        asked.counted(tool_text("hermes"), LIMITS)
    assert time.process_time() - began_s < 10
