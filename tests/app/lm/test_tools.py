"""Tools in conversations: the request's fields, the prompt, and the answers, whole and in pieces."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.errors import BadRequest
from headwater_server.lm.chat import ChatAnswer, ChatRequest
from headwater_server.lm.text.answer_parts import CallPart
from headwater_server.lm.text.answer_reader import AnswerReading
from headwater_server.lm.text.tool_calls import FORMATS, ToolUse
from headwater_server.lm.text_plan import TextPlan
from headwater_server.lm.text_stream import TextPiece, TokenLogprob, Usage
from headwater_server.lm.tools import NO_PARAMETERS
from tests.app.lm.scripted import HELLO, LIMITS, Gateway, Script, ScriptedDispatcher, ScriptedModels, serving, tiny_text
from tests.app.lm.tool_text import ARGUMENTS, CALL, CLOCK, PIECES, TOOLS, WEATHER, tool_text


def planned(template: str = "hermes", **fields: Any) -> TextPlan:
    body = {"model": "m", "messages": HELLO, "tools": TOOLS, **fields}
    return ChatRequest.read(json.dumps(body).encode()).plan(tool_text(template), LIMITS)


def prompt(template: str = "hermes", **fields: Any) -> str:
    (spec,) = planned(template, **fields).specs
    return tool_text(template).tokenizer.decode(spec.prompt, skip_special_tokens=False)


def refused(template: str = "hermes", **fields: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        planned(template, **fields)
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value.message


# Requests


def test_the_template_gets_the_tools() -> None:
    said = prompt()
    assert json.dumps(WEATHER) in said
    assert f'"name": "clock", "parameters": {json.dumps(NO_PARAMETERS)}' in said
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert prompt(tools=[strict, CLOCK]) == said


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "none"}, {"tools": []}, {"tools": None, "tool_choice": "none"}, {"tools": None}]
)
def test_without_tools_to_call_the_model_is_told_of_none_and_its_text_is_content(fields: dict[str, Any]) -> None:
    assert "functions" not in prompt(**fields)
    assert planned(**fields).reading is None
    body = {"model": "m", "messages": HELLO, "tools": TOOLS, **fields, "parallel_tool_calls": True}
    if fields.get("tool_choice") == "none" or not body["tools"]:  # of a model without tools, too
        assert ChatRequest.read(json.dumps(body).encode()).plan(tiny_text(), LIMITS).reading is None


def test_calls_and_their_results_go_back_into_the_template() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
    ]
    assert f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>' in prompt(messages=messages)
    assert "<|im_start|>tool\nrain" in prompt(messages=messages)
    assert f'{{"name": "weather", "parameters": {ARGUMENTS}}}' in prompt("llama3", messages=messages)
    assert "[TOOL_CALLS][{" in prompt("mistral", messages=messages)
    call["function"] = {"name": "clock", "arguments": ""}
    assert '"arguments": {}' in prompt(messages=messages)


def test_fields_of_other_servers_are_left_out_of_the_prompt_and_named_once_each() -> None:
    extra: dict[str, Any] = {"cache_control": {"type": "ephemeral"}, "input_examples": [{}], "defer_loading": None}
    tools = [{**CLOCK, "x": 1}, *({"type": "function", "function": {**TOOLS[0]["function"], **extra}},)]
    assert planned(tools=tools).ignored == (
        "tools[0].x", "tools[1].function.cache_control", "tools[1].function.input_examples"
    )  # fmt: skip
    said = prompt(tools=tools)
    assert said == prompt(tools=[CLOCK, TOOLS[0]])
    assert "cache_control" not in said


def test_many_tools_are_taken() -> None:
    tools = [{"type": "function", "function": {"name": f"mcp__server__{n:0112}"}} for n in range(1024)]
    roomy = msgspec.structs.replace(LIMITS, context_length=1_000_000, cache_tokens=4_000_000)
    body = {"model": "m", "messages": HELLO, "tools": tools}
    assert len(ChatRequest.read(json.dumps(body).encode()).plan(tool_text("hermes"), roomy).specs) == 1


def test_null_is_absence_within_tools_and_schemas() -> None:
    tool: dict[str, Any] = {
        "name": "clock",
        "description": None,
        "parameters": {"type": None, "properties": {}},
        "strict": None,
    }
    planned(tools=[{"type": "function", "function": tool, "x": None}])


DEEP: Any = {}
for _ in range(70):
    DEEP = {"properties": DEEP}


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def message(**call: Any) -> list[dict[str, Any]]:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}]
    return [*HELLO, {"role": "assistant", "tool_calls": calls}]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tools": {}}, "tools: expected an array of tools, got an object"),
        ({"tools": [1]}, "tools[0]: expected an object of the type 'function', got 1"),
        ({"tools": [CLOCK, {"type": "custom"}]}, "tools[1].type: expected 'function', the only type of tool this"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: expected an object with the function's 'name', got "),
        ({"tools": [{**CLOCK, "functon": 1}]}, "tools[0].functon: expected one of this request's fields, got 'func"),
        ({"tools": function(parameter={})}, "tools[0].function.parameter: expected one of this request's fields, got"),
        ({"tools": function(input_schema={})}, "tools[0].function.input_schema: expected the schema as `parameters`"),
        ({"tools": function(name="a b")}, "tools[0].function.name: expected 1 to 128 letters, digits, _ and -, got "),
        ({"tools": function(name="x" * 129)}, "tools[0].function.name: expected 1 to 128 letters"),
        ({"tools": function(name="x" * 300)}, "tools[0].function.name: expected 1 to 128 letters"),
        ({"tools": function(name="files.read")}, "tools[0].function.name: expected 1 to 128 letters"),
        ({"tools": function(name="🙂")}, "tools[0].function.name: expected 1 to 128 letters"),
        ({"tools": function(name="")}, "tools[0].function.name: expected 1 to 128 letters"),
        ({"tools": function(description=1)}, "tools[0].function.description: expected a string, got 1"),
        ({"tools": function(strict="yes")}, "tools[0].function.strict: expected true or false, got 'yes'"),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters: expected a JSON schema of an object, got"),
        ({"tools": function(parameters={"type": "array"})}, "tools[0].function.parameters.type: expected 'object', "),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name: expected each function once, got 'clock' again"),
        ({"tools": function() * 5000}, "tools: expected at most 1024, got 5000"),
        ({"tools": function(description="x" * 1_100_000)}, "tools: expected at most 1048576 bytes as JSON, got 1100"),
        ({"tools": function(parameters=DEEP)}, "tools: expected at most 64 objects and arrays within each other"),
        ({"tool_choice": "any"}, "tool_choice: expected 'none', 'auto', 'required' or an object that names a function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type: expected 'function', got 'allowed_tools'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: expected an object with the function's name, "),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name: expected one of the functions in tools (clock, weather), got 'f'",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: expected it with tools to choose from; set tools"),
        (
            {"tools": None, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name: expected one of the functions in tools (none), got 'f'",
        ),
        ({"messages": message(id=1)}, "messages[1].tool_calls[0].id: expected a string, got 1"),
        ({"messages": message(type="custom")}, "messages[1].tool_calls[0].type: expected 'function', got 'custom'"),
        ({"messages": message(function=[])}, "messages[1].tool_calls[0].function: expected an object with 'name' and "),
        (
            {"messages": message(function={"name": "f", "arguments": 1})},
            "messages[1].tool_calls[0].function.arguments: expected a string, got 1",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls: expected an array of calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]: expected an object"),
        ({"messages": [{"role": "tool", "tool_calls": []}]}, "messages[0].content: expected a string or an array"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": message()[1]["tool_calls"]}]},
            "messages[0].tool_calls: expected it in messages of the role 'assistant' only",
        ),
        ({"messages": [{"role": "assistant", "function_call": {}}]}, "messages[0].function_call: this model does not"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], expected: str) -> None:
    assert refused(**fields).startswith(expected)


def test_some_templates_begin_the_reasoning_in_the_prompt() -> None:
    assert prompt("reasoning").endswith("assistant\n<think>\n")
    for template, fields, is_reasoning in (
        ("hermes", {}, False), ("reasoning", {}, True),
        ("reasoning", {"chat_template_kwargs": {"enable_thinking": False}}, False),
    ):  # fmt: skip
        reading = planned(template, **fields).reading
        assert reading is not None
        assert reading.is_open == is_reasoning


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}], ids=["required", "schema"]
)
def test_a_grammar_comes_after_the_reasoning(fields: dict[str, Any]) -> None:
    limits = msgspec.structs.replace(LIMITS, grammars=frozenset({"lark", "json_schema"}))
    body = {"model": "m", "messages": HELLO, "tools": TOOLS, **fields}
    for variables in ({}, {"enable_thinking": False}):
        request = ChatRequest.read(json.dumps({**body, "chat_template_kwargs": variables}).encode())
        plan = request.plan(tool_text("reasoning"), limits)
        assert plan.reading is not None
        assert plan.specs[0].grammar is not None
        assert plan.reading.is_open == bool(plan.specs[0].grammar.before) == (not variables)


def test_a_model_whose_format_is_not_known_names_the_option() -> None:
    body = {"model": "m", "messages": HELLO, "tools": TOOLS}
    with pytest.raises(BadRequest, match=r"tools: .* set the deployment's `options\.tool_parser`"):
        ChatRequest.read(json.dumps(body).encode()).plan(tiny_text(), LIMITS)


def test_a_call_that_is_required_of_a_model_whose_format_is_not_known_is_an_object() -> None:
    limits = msgspec.structs.replace(LIMITS, grammars=frozenset({"lark"}))
    body = {"model": "m", "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
    reading = ChatRequest.read(json.dumps(body).encode()).plan(tiny_text(), limits).reading
    assert reading is not None
    parts = reading.reader().read('{"name": "clock", "parameters": {}}', "stop")
    assert [part[1:3] for part in parts if isinstance(part, CallPart)] == [("clock", ""), ("", "{}")]


# Answers


def deltas(events: list[bytes]) -> tuple[str, list[dict[str, Any]], list[Any], str | None]:
    """A choice's content, calls, log probabilities and finish, of its chunks."""
    content, calls, logprobs, finish = "", list[dict[str, Any]](), [], None
    for event in events:
        (choice,) = json.loads(event)["choices"]
        assert finish is None
        finish = choice["finish_reason"]
        content += choice["delta"].get("content", "")
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        for part in choice["delta"].get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"id": part["id"], "type": part["type"], "function": part["function"]})
            else:
                assert list(part) == ["index", "function"]
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return content, calls, logprobs, finish


@given(PIECES, st.integers(1, 20), st.sampled_from(["stop", "length"]), st.booleans(), st.booleans())
def test_a_stream_says_the_same_as_a_whole_answer(
    answer: str, size: int, finish: str, is_constrained: bool, logprobs: bool
) -> None:
    use = ToolUse(FORMATS["hermes"], {"weather": {}, "clock": {}}, is_constrained=is_constrained)
    make = partial(ChatAnswer, "m", 1, tiny_text().tokenizer.texts, logprobs=logprobs, reading=AnswerReading(use))
    entry = TokenLogprob(5, -1.0, (), 0)
    cuts = [
        TextPiece(answer[at : at + size], [entry] if logprobs else (), finish if at + size >= len(answer) else None)
        for at in range(0, max(len(answer), 1), size)
    ]
    whole = TextPiece(answer, [entry] * len(cuts) if logprobs else (), finish)
    (choice,) = json.loads(make().whole([whole], Usage(1, 1)))["choices"]
    form = make()
    content, calls, entries, ended = deltas([event for cut in cuts for event in form.piece(0, cut)])
    assert content == (choice["message"]["content"] or "")
    assert [call["function"] for call in calls] == [one["function"] for one in choice["message"].get("tool_calls", [])]
    assert ended == choice["finish_reason"] == ("tool_calls" if calls and finish == "stop" else finish)
    assert entries == (choice["logprobs"] or {"content": []})["content"]
    assert len({call["id"] for call in calls}) == len(calls)


# Over HTTP, with the unmodified client and a scripted model


@pytest.fixture(scope="module")
def gateway() -> Any:
    tiny = ScriptedDispatcher("tiny", Script(), language_text=lambda: tool_text("hermes"))
    plain = ScriptedDispatcher("plain", Script())
    models = ScriptedModels(tiny, plain)
    with serving(models) as url:
        gateway = Gateway(url, models, tiny, plain)
        yield gateway
        gateway.client.close()


def test_a_call(gateway: Gateway) -> None:
    gateway.says(text=f"Let me see.\n{CALL}")
    (choice,) = gateway.chat(tools=TOOLS, n=1).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
    gateway.says(text=CALL)
    assert gateway.chat(tools=TOOLS).choices[0].message.content is None


def test_a_stream_of_calls(gateway: Gateway) -> None:
    gateway.says(text=f"{CALL}\n{CALL}", chunk=1)
    chunks = gateway.chunks(tools=TOOLS)
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert [(part.index, part.function and part.function.name) for part in parts] == [
        (0, "weather"), (0, None), (1, "weather"), (1, None),
    ]  # fmt: skip
    assert "".join(part.function.arguments or "" for part in parts if part.function) == ARGUMENTS * 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_choices_have_their_own_calls(gateway: Gateway) -> None:
    gateway.says(text=CALL)
    answer = gateway.chat(tools=TOOLS, n=3)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 3


def test_a_malformed_call_is_content(gateway: Gateway) -> None:
    text = CALL.replace("3}", "3,}")
    gateway.says(text=text)
    (choice,) = gateway.chat(tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    chunks = gateway.chunks(tools=TOOLS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


@pytest.mark.parametrize(("template", "opening"), [("hermes", "<think>"), ("reasoning", "")])
def test_a_call_that_is_only_thought_of_is_not_made(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, template: str, opening: str
) -> None:
    monkeypatch.setattr(gateway.tiny, "language_text", lambda: tool_text(template))
    thought = f"Shall I?\n{CALL}\nNo."
    for chunk, ending, calls in ((1, "", 0), (100, "", 0), (1, f"\n{CALL}", 1), (100, "\nIt rains.", 0)):
        gateway.says(text=f"{opening}{thought}</think>{ending}", chunk=chunk)
        (choice,) = gateway.chat(tools=TOOLS).choices
        content = None if calls else ending.strip()
        assert (choice.message.content, len(choice.message.tool_calls or [])) == (content, calls)
        extra = choice.message.model_extra or {}
        assert extra["reasoning_content"] == extra["reasoning"] == thought
        parts = [chunk.choices[0].delta for chunk in gateway.chunks(tools=TOOLS)]
        assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == thought
        assert "".join(part.content or "" for part in parts) == ("" if calls else ending.strip())


def test_a_call_in_reasoning_without_an_end_is_made(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.tiny, "language_text", lambda: tool_text("reasoning"))
    for chunk in (1, 100):
        gateway.says(text=f"I shall.\n{CALL}", chunk=chunk)
        (choice,) = gateway.chat(tools=TOOLS).choices
        assert choice.message.content is None
        assert (choice.message.model_extra or {})["reasoning_content"] == "I shall."
        assert (choice.finish_reason, len(choice.message.tool_calls or [])) == ("tool_calls", 1)


def test_with_none_a_call_is_content(gateway: Gateway) -> None:
    gateway.says(text=CALL)
    (choice,) = gateway.chat(tools=TOOLS, tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_the_next_turn(gateway: Gateway) -> None:
    gateway.says(text=CALL)
    message = gateway.chat(tools=TOOLS).choices[0].message
    assert message.tool_calls is not None
    messages: Any = [*HELLO, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
    gateway.says(text="It rains.")
    answer = gateway.client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "It rains."


def test_tokens_of_a_conversation_with_tools_are_those_of_its_prompt(gateway: Gateway) -> None:
    gateway.chat(tools=TOOLS)
    prompt = gateway.tiny.opened[-1][1].specs[0].prompt
    assert gateway.post("/tokenize", model="tiny", messages=HELLO, tools=TOOLS).json()["tokens"] == prompt
    assert gateway.post("/tokenize", model="tiny", messages=HELLO, tools=[]).json()["count"] < len(prompt)


def test_a_model_without_tools_names_the_option(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match=r"options\.tool_parser"):
        gateway.client.chat.completions.create(model="plain", messages=HELLO, tools=TOOLS)
