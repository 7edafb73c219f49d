"""Calls that are required: over an engine with random weights, so that nothing but the grammar makes them sound."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headwater.engine import Engine, EngineLimits
from headwater.lm.loading import plan_language_model
from headwater_server.errors import BadRequest
from headwater_server.lm.call_grammar import can_hold_strict
from headwater_server.lm.chat import ChatRequest
from headwater_server.lm.text.language import LanguageText
from tests.app.lm.app_with_engine import app_with_engine
from tests.app.lm.response_events import said, told
from tests.app.lm.scripted import LIMITS
from tests.app.lm.tool_text import VOCAB_SIZE, WEATHER, tool_folder, tool_text

pytestmark = pytest.mark.heavy
REFERRING: Any = {
    "type": "function",
    "function": {
        "name": "refer",
        "parameters": {
            "$defs": {"point": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}},
            "properties": {"to": {"$ref": "#/$defs/point"}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}
NOTHING: Any = {
    "type": "function",
    "function": {"name": "nothing", "parameters": {"type": "object", "additionalProperties": False}},
}
TOOLS = [WEATHER, REFERRING, NOTHING]
ASKED: dict[str, Any] = {"model": "lm", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
Choice = tuple[str | None, list[tuple[str, str]], str]
CASES = [("hermes", False), ("hermes", True), ("llama3", False), ("mistral", True), ("mistral_args", True)]
"""The template, and whether the tokenizer has special tokens for its marks."""


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{'special' if case[1] else 'plain'}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Engine]:
    """A folder, and its engine."""
    template, has_marks = request.param
    folder = tool_folder(tmp_path_factory.mktemp(template) / "model", template, has_marks=has_marks)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    options = {"max_sequences": 8, "cache_tokens": 8192}
    return folder, plan_language_model(f"lm:{folder}", options).load("cpu", pytest.fail)


def choices(answer: Any) -> list[Choice]:
    """What each choice says: content, calls, and why it ended."""
    found = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        found.append((message["content"] or None, calls, choice["finish_reason"]))
    return found


def streamed(text: str, n: int) -> list[Choice]:
    """The same, of a stream."""
    found: list[Any] = [[None, [], ""] for _ in range(n)]
    for line in [line for line in text.split("\n") if line.startswith("data: {")]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        place, delta = found[choice["index"]], choice["delta"]
        place[0] = (place[0] or "") + delta.get("content", "") or None
        for part in delta.get("tool_calls", []):
            if "id" in part:
                place[1].append((part["function"]["name"], ""))
            else:
                name, arguments = place[1][part["index"]]
                place[1][part["index"]] = (name, arguments + part["function"]["arguments"])
        place[2] = choice["finish_reason"] or place[2]
    return [(content, calls, finish) for content, calls, finish in found]


def check(name: str, arguments: str) -> None:
    """A call keeps to its tool's schema."""
    value = json.loads(arguments)
    if name == "weather":
        assert set(value) == {"city", "days"}
        assert len(value["city"]) <= 8
        assert value["days"] in (1, 3, 7)
    elif name == "refer":
        assert set(value) == {"to"}
        assert len(value["to"]) == 2
        assert set(value["to"]) <= {0, 1}
    else:
        assert (name, value) == ("nothing", {})


async def asking(model: tuple[Path, Engine], *requests: dict[str, Any]) -> list[list[Choice]]:
    """The answers to requests, whole and streamed alike."""
    answers: list[list[Choice]] = []
    folder, engine = model
    async with app_with_engine(engine, folder) as (ask, _dispatcher):
        for fields in requests:
            body = {**ASKED, "max_tokens": 400, "n": 4, **fields}
            whole = await ask("/v1/chat/completions", **body)
            assert whole.status_code == 200, whole.text
            said = choices(whole.json())
            assert streamed((await ask("/v1/chat/completions", stream=True, **body)).text, body["n"]) == said
            answers.append(said)
    return answers


async def test_required_calls_are_sound_whole_and_streamed(model: tuple[Path, Engine]) -> None:
    answers = await asking(model, *({"tool_choice": "required", "seed": 10 * seed} for seed in range(3)))
    names = set()
    counts = set()
    for content, calls, finish in (choice for answer in answers for choice in answer):
        assert content is None
        assert finish in ("tool_calls", "length")
        counts.add(len(calls))
        for name, arguments in calls if finish == "tool_calls" else calls[:-1]:
            check(name, arguments)
            names.add(name)
    assert names == {"weather", "refer", "nothing"}
    assert max(counts) > 1


@pytest.mark.parametrize("has_marks", [False, True])
def test_strict_is_named_where_it_is_not_held(tmp_path: Path, has_marks: bool) -> None:
    text = LanguageText(tool_folder(tmp_path / "model", "hermes", has_marks=has_marks))
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS[1:]]
    request = ChatRequest.read(json.dumps({**ASKED, "tools": [WEATHER, *strict]}).encode())
    plan = request.plan(text, msgspec.structs.replace(LIMITS, vocab_size=VOCAB_SIZE, grammars=frozenset({"lark"})))
    assert plan.ignored == (() if has_marks else ("tools[1].function.strict", "tools[2].function.strict"))
    assert (plan.specs[0].grammar is not None) == has_marks


async def test_calls_of_strict_tools_are_sound_although_none_is_required(model: tuple[Path, Engine]) -> None:
    marks = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "mistral_args": "[TOOL_CALLS]"}
    folder, _ = model
    text = LanguageText(folder)
    assert text.tool_format is not None
    mark = text.tokenizer.texts.added_id(marks.get(text.tool_format.name, ""))
    assert can_hold_strict(text.tool_format, text.tokenizer.texts.added_id) == (mark is not None)
    if mark is None:  # `test_strict_is_named_where_it_is_not_held`
        return
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked = ({"tools": strict, "seed": 10 * seed, "logit_bias": {str(mark): 20}} for seed in range(2))
    found = 0
    for content, calls, finish in (choice for answer in await asking(model, *asked) for choice in answer):
        assert finish in ("tool_calls", "length"), content
        for name, arguments in calls:
            check(name, arguments)
            found += 1
    assert found > 1


async def test_a_named_function_is_called_once(model: tuple[Path, Engine]) -> None:
    named: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": name}} for name in ("weather", "refer", "nothing")
    ]
    for choice, answer in zip(
        named, await asking(model, *({"tool_choice": one, "seed": 1} for one in named)), strict=True
    ):
        for content, calls, finish in answer:
            assert (content, finish) == (None, "tool_calls")
            ((name, arguments),) = calls
            assert name == choice["function"]["name"]
            check(name, arguments)


@pytest.mark.parametrize("parameters", [{}, {"parameters": None}])
async def test_a_tool_without_parameters_is_called_without_arguments(
    model: tuple[Path, Engine], parameters: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "bare", **parameters}}
    chats = await asking(model, *({"tools": [tool], "tool_choice": "required", "seed": seed} for seed in (0, 10)))
    calls = [call for answer in chats for _, calls, finish in answer for call in calls if finish == "tool_calls"]
    assert calls
    assert {(name, json.loads(arguments) == {}) for name, arguments in calls} == {("bare", True)}

    folder, engine = model
    async with app_with_engine(engine, folder) as (ask, _dispatcher):
        flat = {"type": "function", "name": "bare", **parameters}
        body: dict[str, Any] = {"model": "lm", "input": "hi", "tools": [flat], "tool_choice": "required"}
        items = said((await ask("/v1/responses", parallel_tool_calls=False, max_output_tokens=300, **body)).json())
        assert [(item[1], json.loads(item[2])) for item in items] == [("bare", {})]


async def test_one_call_only_unless_they_may_be_parallel(model: tuple[Path, Engine]) -> None:
    (answer,) = await asking(model, {"tool_choice": "required", "parallel_tool_calls": False, "seed": 3, "n": 8})
    for _, calls, finish in answer:
        assert (len(calls), finish) == (1, "tool_calls")
        check(*calls[0])


async def test_what_the_length_cuts_says_so(model: tuple[Path, Engine]) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    answers = await asking(
        model, *({"tool_choice": tool, "seed": 4, "max_tokens": most} for most in (1, 3, 12, 16, 20))
    )
    for content, calls, finish in (choice for answer in answers for choice in answer):
        assert content is None
        assert finish in ("length", "tool_calls")
        assert len(calls) <= 1


async def test_where_a_call_may_be_content_keeps_to_its_format(model: tuple[Path, Engine]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answers = await asking(model, *({"response_format": response_format, "seed": 10 * seed} for seed in range(3)))
    kinds = set()
    for content, calls, finish in (choice for answer in answers for choice in answer):
        kinds.add(bool(calls))
        if calls:
            assert content is None or finish == "length"
            for call in calls:
                check(*call)
        elif finish == "stop":
            assert json.loads(content or "")["a"] in (1, 2)
    assert False in kinds


async def test_a_response_says_what_the_chat_says(model: tuple[Path, Engine]) -> None:
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]

    folder, engine = model
    async with app_with_engine(engine, folder) as (ask, _dispatcher):
        for seed in range(4):
            fields: dict[str, Any] = {"model": "lm", "tool_choice": "required", "seed": seed}
            chat = await ask("/v1/chat/completions", **{**ASKED, **fields, "max_tokens": 300})
            ((content, calls, finish),) = choices(chat.json())
            body = {**fields, "input": "hi", "tools": flat, "max_output_tokens": 300}
            whole = await ask("/v1/responses", **body)
            assert whole.status_code == 200, whole.text
            items = said(whole.json())
            assert [item[1:3] for item in items if item[0] == "function_call"] == calls
            assert (content, calls) != (None, []) or items == [("message", "", "incomplete")]
            assert (finish == "length") == (whole.json()["status"] == "incomplete")
            stream = (await ask("/v1/responses", stream=True, **body)).text
            events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
            assert said(told(events)) == items


async def test_a_model_without_a_known_format_writes_required_calls_as_json(tmp_path: Path) -> None:
    folder = tool_folder(tmp_path / "model", "unknown")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    engine = plan_language_model(f"lm:{folder}", {"max_sequences": 8, "cache_tokens": 8192}).load("cpu", pytest.fail)
    named = {"type": "function", "function": {"name": "weather"}}
    for answer in await asking(
        (folder, engine), {"tool_choice": "required", "seed": 1}, {"tool_choice": named, "seed": 1}
    ):
        for content, calls, finish in answer:
            assert content is None
            for call in calls if finish == "tool_calls" else calls[:-1]:
                check(*call)
            assert calls or finish == "length"


# Requests


def refused(**fields: Any) -> str:
    grammars: frozenset[Any] = frozenset({"json_schema", "lark"} if fields.pop("has_grammars", True) else ())
    limits = EngineLimits(8, 16, 512, 2048, VOCAB_SIZE, grammars=grammars)
    with pytest.raises(BadRequest) as caught:
        ChatRequest.read(json.dumps({**ASKED, **fields}).encode()).plan(tool_text("hermes"), limits)
    return caught.value.message


def test_what_cannot_be_required_is_refused() -> None:
    said = refused(tool_choice="required", has_grammars=False)
    assert said == "tool_choice: this model does not support it; expected 'auto' or 'none'"
    big = {"type": "object", "properties": {"x" * 70_000: {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": big}}
    said = refused(tools=[tool], tool_choice="required")
    assert said.startswith("tools: expected schemas that come to a grammar of at most 65536 characters, got 70")
    said = refused(structured_outputs={"grammar": 'start: "a"'})
    assert said == "structured_outputs.grammar: this model does not support it with tools; leave one of them out"
    said = refused(structured_outputs={"json": '{"type": '})
    assert said.startswith("structured_outputs.json: expected a JSON schema, got text that is no JSON: ")
    assert LIMITS.grammars == frozenset()


async def test_a_schema_that_cannot_be_followed_is_a_fault_of_the_tools(model: tuple[Path, Engine]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": r"\bx"}}}}}

    folder, engine = model
    async with app_with_engine(engine, folder) as (ask, _dispatcher):
        answer = await ask("/v1/chat/completions", **{**ASKED, "tools": [tool], "tool_choice": "required"})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tools"
        assert answer.json()["error"]["message"].startswith("tools: expected ")


EXPRESSIONS = [r"\*\*\* Add File: [a-z]{1,9}\.py\n(?:\+[ -~]{0,5}\n){1,3}", r'"[a-z\\]{2,6}"', "é|🙂|漢"]


async def test_a_custom_tools_regular_expression_holds_where_it_must_be_called(model: tuple[Path, Engine]) -> None:
    folder, engine = model
    choices: list[Any] = ["required", {"type": "custom", "name": "patch"}, "required"]
    async with app_with_engine(engine, folder) as (ask, _dispatcher):
        for seed, (expression, choice) in enumerate(zip(EXPRESSIONS, choices, strict=True)):
            format = {"type": "grammar", "syntax": "regex", "definition": expression}
            tool = {"type": "custom", "name": "patch", "description": "Edits a file", "format": format}
            body: dict[str, Any] = {"model": "lm", "input": "hi", "tools": [tool], "parallel_tool_calls": False}
            whole = await ask("/v1/responses", **body, tool_choice=choice, seed=seed, max_output_tokens=300)
            assert whole.status_code == 200, whole.text
            assert "headwater-ignored" not in whole.headers
            ((kind, name, text, status),) = said(whole.json())
            assert (kind, name, status) == ("custom_tool_call", "patch", "completed")
            assert re.fullmatch(expression, text), text
        free = await ask("/v1/responses", **body, max_output_tokens=4)
        assert free.headers["headwater-ignored"] == "tools[0].format"
