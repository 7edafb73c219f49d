"""Anthropic's Messages, reasoning and tools with a real vLLM, and the same conversation through chat and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.app.lm.message_events import events_of, message_of
from tests.app.lm.tool_text import WEATHER as CHAT_WEATHER
from tests.running import Running, leaves_nothing, wait_for
from tests.token_streams import figures, is_idle
from tests.vllm.chained_model import CONTEXT_LENGTH, ENDLESS, TEXT, THOUGHT, chained_folder

pytestmark = [pytest.mark.heavy, pytest.mark.vllm]

SAID = "".join(TEXT)
MODELS = ("tiny", "ours")
SCHEMA: dict[str, Any] = CHAT_WEATHER["function"]["parameters"]
WEATHER: dict[str, Any] = {"name": "weather", "description": "The weather of a place", "input_schema": SCHEMA}
ZONE: dict[str, Any] = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 8}}}
CLOCK: dict[str, Any] = {"name": "clock", "description": "The time", "input_schema": ZONE}
FUNCTIONS = [
    {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    for tool in (CLOCK, WEATHER)
]
ASKED: dict[str, Any] = {
    "model": "tiny", "max_tokens": 100, "temperature": 0, "system": "Be brief.",
    "messages": [{"role": "user", "content": "How late is it?"}],
}  # fmt: skip
TOOLS: dict[str, Any] = {**ASKED, "tools": [CLOCK, WEATHER]}
LATER: dict[str, Any] = {
    **TOOLS,
    "messages": [
        *ASKED["messages"],
        {"role": "assistant", "content": [
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "c1", "name": "clock", "input": {"zone": "UTC"}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "11 pm"}]},
    ],
}  # fmt: skip
"""A conversation with a call and its result."""
CHAT_LATER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How late is it?"},
    {"role": "assistant", "content": "So:", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"zone":"UTC"}'}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "11 pm"},
]  # fmt: skip
RESPONSES_LATER = [
    {"role": "user", "content": "How late is it?"},
    {"role": "assistant", "content": "So:"},
    {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": '{"zone":"UTC"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "11 pm"},
]
FILLER = "Count: 1 2 3 4 5. "
THINKING = {"type": "thinking", "thinking": THOUGHT, "signature": "headwater"}


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a model whose answers are known: ``tiny`` computed by vLLM, ``ours`` by our engine."""
    folder = chained_folder(tmp_path_factory.mktemp("model") / "chained")
    options = {"dtype": "float32", "max_num_seqs": 8, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    tiny = {"model": f"vllm:{folder}", "python": vllm_python, "options": options}
    ours = {"model": f"lm:{folder}", "threads": 1, "options": {"dtype": "float32"}}
    with leaves_nothing({"deployments": {"tiny": tiny, "ours": ours}}) as running:
        yield running


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return server.client.post(f"{server.url}{path}", json=body)


def message(server: Running, **body: Any) -> dict[str, Any]:
    """A whole answer, which the stream has to equal."""
    answer = post(server, "/v1/messages", body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    streamed = post(server, "/v1/messages", {**body, "stream": True})
    assert streamed.status_code == 200, streamed.text
    events = events_of(streamed.text)
    begun, ended = events[0]["message"], events[-2]
    assert prompt_tokens(begun) == prompt_tokens(ended)
    begun["usage"] = {**ended["usage"], "output_tokens": 0}  # vLLM tells at the end what its cache had
    pieces = message_of(events)
    assert without_ids(pieces["content"]) == without_ids(whole["content"])
    assert (pieces["stop_reason"], pieces["stop_sequence"]) == (whole["stop_reason"], whole["stop_sequence"])
    assert prompt_tokens(pieces) == prompt_tokens(whole)
    assert pieces["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    return whole


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in content]


def prompt_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"])


def counted(server: Running, body: dict[str, Any]) -> int:
    asked = {key: value for key, value in body.items() if key not in ("max_tokens", "temperature")}
    answer = post(server, "/v1/messages/count_tokens", asked)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["input_tokens"])


def fault(answer: httpx.Response) -> tuple[int, str, str]:
    """The status of an error, its type and its message; its form is Anthropic's."""
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
    return answer.status_code, body["error"]["type"], body["error"]["message"]


# Messages


@pytest.mark.parametrize("model", MODELS)
def test_a_message_thinks_speaks_and_calls(server: Running, model: str) -> None:
    answer = message(server, **{**TOOLS, "model": model})
    thinking, text, call = answer["content"]
    assert (thinking, text["text"].rstrip()) == (THINKING, SAID)
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "clock", {"zone": "UTC"})
    assert (answer["model"], answer["stop_reason"], answer["stop_sequence"]) == (model, "tool_use", None)


@pytest.mark.parametrize("model", MODELS)
def test_the_stop_sequence_is_named(server: Running, model: str) -> None:
    answer = message(server, **{**ASKED, "model": model, "stop_sequences": ["never", "late"]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "late")
    assert answer["content"] == [THINKING, {"type": "text", "text": SAID[: SAID.index("late")]}]


@pytest.mark.parametrize("model", MODELS)
def test_thinking_that_is_disabled_is_left_out(server: Running, model: str) -> None:
    answer = message(server, **{**ASKED, "model": model, "thinking": {"type": "disabled"}, "stop_sequences": ["."]})
    assert answer["content"] == [{"type": "text", "text": SAID.removesuffix(".")}]


@pytest.mark.parametrize("model", MODELS)
def test_thinking_that_the_limit_cuts(server: Running, model: str) -> None:
    answer = message(server, **{**ASKED, "model": model, "max_tokens": 1})
    assert (answer["content"], answer["stop_reason"]) == ([THINKING], "max_tokens")


@pytest.mark.parametrize("thinking", ["adaptive", "disabled"])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_is_required_has_an_input_of_its_schema(
    server: Running, choice: dict[str, Any], thinking: str
) -> None:
    answer = message(server, **{**ASKED, "tools": [WEATHER], "tool_choice": choice, "thinking": {"type": thinking}})
    *before, call = answer["content"]
    assert before == ([] if thinking == "disabled" else [THINKING])
    assert (call["type"], call["name"], answer["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert set(call["input"]) == {"city", "days"}
    assert call["input"]["days"] in (1, 3, 7)


def test_a_schema_constrains_the_answer(server: Running) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    answer = message(server, **{**ASKED, "output_config": {"format": format}, "thinking": {"type": "disabled"}})
    (text,) = answer["content"]
    assert json.loads(text["text"])["days"] in (1, 3, 7)


@pytest.mark.parametrize("body", [ASKED, TOOLS, LATER, {**TOOLS, "thinking": {"type": "disabled"}}])
def test_count_tokens_counts_what_the_usage_has(server: Running, body: dict[str, Any]) -> None:
    assert counted(server, body) == prompt_tokens(message(server, **body))


def test_what_the_prefix_cache_has_is_told(server: Running) -> None:
    body = {**ASKED, "system": FILLER * 40}
    first, second = (message(server, **body)["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == sum(
        first[name] for name in ("input_tokens", "cache_read_input_tokens")
    )


def test_an_answer_that_the_context_does_not_hold_is_shortened(server: Running) -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": ENDLESS[0]}]
    one, two = (counted(server, {**ASKED, "messages": turns, "system": FILLER * times}) for times in (1, 2))
    filler = FILLER * ((CONTEXT_LENGTH - 100 - one) // (two - one))
    answer = message(server, **{**ASKED, "messages": turns, "system": filler, "max_tokens": 9000})
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert prompt_tokens(answer) + answer["usage"]["output_tokens"] == CONTEXT_LENGTH


# Errors


def test_errors_have_anthropics_form(server: Running) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        status, kind, said = fault(post(server, path, {**ASKED, "model": "none"}))
        assert (status, kind) == (404, "not_found_error"), said
    long = [{"role": "user", "content": "x = [" * CONTEXT_LENGTH}]
    for streams in (False, True):
        status, kind, said = fault(post(server, "/v1/messages", {**ASKED, "messages": long, "stream": streams}))
        assert (status, kind) == (400, "invalid_request_error")
        assert said.startswith("prompt is too long"), said
    status, kind, said = fault(post(server, "/v1/messages", {**ASKED, "temperature": -1}))
    assert (status, kind) == (400, "invalid_request_error")
    assert "temperature" in said


def test_a_client_that_leaves_frees_its_sequence(server: Running) -> None:
    turns = [*ASKED["messages"], {"role": "assistant", "content": ENDLESS[0]}]
    body = {**ASKED, "messages": turns, "max_tokens": 1900, "stream": True}
    before = figures(server, "tiny")["generated_tokens"]
    with server.client.stream("POST", f"{server.url}/v1/messages", json=body) as answer:
        lines = answer.iter_lines()
        assert any("content_block_delta" in line for line in lines)
    wait_for(lambda: is_idle(server, "tiny"), 30, "its sequence to be freed")
    assert figures(server, "tiny")["generated_tokens"] - before < 1900


# The same through chat and responses


def test_the_three_apis_give_the_same_answer(server: Running) -> None:
    functions = [{"type": "function", "function": one} for one in FUNCTIONS]
    tools = [{"type": "function", **one} for one in FUNCTIONS]
    found: dict[str, list[Any]] = {model: [] for model in MODELS}
    for model in MODELS:
        asked = {"model": model, "temperature": 0}
        chat = {**asked, "messages": CHAT_LATER, "tools": functions, "max_tokens": 100}
        answered = post(server, "/v1/chat/completions", chat).json()
        said = answered["choices"][0]["message"]
        (call,) = said["tool_calls"]
        found[model].append((
            answered["usage"]["prompt_tokens"], said["reasoning_content" if model == "ours" else "reasoning"],
            said["content"].rstrip(), call["function"]["name"], json.loads(call["function"]["arguments"]),
        ))  # fmt: skip
        body = {**asked, "instructions": "Be brief.", "input": RESPONSES_LATER, "tools": tools}
        answered = post(server, "/v1/responses", {**body, "max_output_tokens": 100}).json()
        thought, said, call = answered["output"]
        found[model].append((
            answered["usage"]["input_tokens"], thought["content"][0]["text"], said["content"][0]["text"].rstrip(),
            call["name"], json.loads(call["arguments"]),
        ))  # fmt: skip
        answered = message(server, **{**LATER, "model": model})
        thought, said, call = answered["content"]
        found[model].append((
            prompt_tokens(answered), thought["thinking"], said["text"].rstrip(), call["name"], call["input"],
        ))  # fmt: skip
    for answers in found.values():  # of each engine, since vLLM renders tools with all fields
        assert answers == [(answers[0][0], THOUGHT, SAID, "clock", {"zone": "UTC"})] * 3


# Responses


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


RESPONSE: dict[str, Any] = {"model": "tiny", "input": "How late is it?", "temperature": 0, "max_output_tokens": 100}


def response(client: Any, **fields: Any) -> Any:
    """A whole response, which the stream's last event has to equal."""
    whole = client.responses.create(**RESPONSE, **fields)
    *events, last = client.responses.create(**RESPONSE, **fields, stream=True)
    assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))
    assert last.type == f"response.{whole.status}"
    assert items_of(last.response) == items_of(whole)
    return whole


def items_of(found: Any) -> list[dict[str, Any]]:
    """The items of a response, without ids. Arguments are parsed, since vLLM writes them anew in a whole answer."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in found.output]
    return [
        {**item, "arguments": json.loads(item["arguments"])} if item["type"] == "function_call" else item
        for item in items
    ]


def test_a_response_has_an_item_of_reasoning(client: Any) -> None:
    thought, said, call = response(client, tools=[{"type": "function", "strict": False, **FUNCTIONS[0]}]).output
    assert (thought.type, thought.content[0].text) == ("reasoning", THOUGHT)
    assert (said.type, said.content[0].text.rstrip()) == ("message", SAID)
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "clock", {"zone": "UTC"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_required_function_of_a_response_has_arguments_of_its_schema(client: Any, choice: Any) -> None:
    tool = {"type": "function", "strict": False, **FUNCTIONS[1]}
    thought, call = response(client, tools=[tool], tool_choice=choice).output
    assert (thought.type, call.type, call.name) == ("reasoning", "function_call", "weather")
    assert json.loads(call.arguments)["days"] in (1, 3, 7)


def test_a_function_of_a_namespace_is_called_by_both_names(client: Any) -> None:
    space = {"type": "namespace", "name": "sky", "description": "x", "tools": [{"type": "function", **FUNCTIONS[1]}]}
    *_, call = response(client, tools=[space], tool_choice="required").output
    assert (call.type, call.name, call.namespace) == ("function_call", "weather", "sky")


def test_a_custom_tool_that_is_required(client: Any) -> None:
    tool = {
        "type": "custom",
        "name": "patch",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"},
    }
    *_, call = response(client, tools=[tool], tool_choice="required").output
    assert (call.type, call.name) == ("custom_tool_call", "patch")
    assert len(call.input) == 3
    assert set(call.input) <= set("abc")
