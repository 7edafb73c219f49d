"""The same conversation through chat, messages and responses: the same prompt, answer and usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.app.lm.chat_events import checked_completion, completion_of
from tests.app.lm.message_events import events_of, message_of
from tests.app.lm.response_events import checked_event, checked_response
from tests.app.lm.scripted import Gateway, Script, ScriptedDispatcher, ScriptedModels, serving
from tests.app.lm.tool_text import CALL, WEATHER, tool_text

CITY = {"city": "Köln", "days": 3}
CLOCK = {"name": "clock", "description": "What time it is", "parameters": {"type": "object", "properties": {}}}
FUNCTIONS = [WEATHER["function"], CLOCK]


class Answer(NamedTuple):
    """What an API says, in terms that all have."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]]
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    tiny = ScriptedDispatcher("tiny", Script(), language_text=lambda: tool_text("reasoning"))
    models = ScriptedModels(tiny)
    with serving(models) as url:
        gateway = Gateway(url, models, tiny, tiny)
        yield gateway
        gateway.client.close()


def by_chat(gateway: Gateway, turns: list[tuple[str, Any]], *, streams: bool) -> Answer:
    messages: list[dict[str, Any]] = []
    for kind, value in turns:
        if kind in ("system", "user"):
            messages.append({"role": kind, "content": value})
        elif kind == "assistant":
            text, calls = value
            functions = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
                for id, name, arguments in calls
            ]
            messages.append({"role": "assistant", "content": text, **({"tool_calls": functions} if functions else {})})
        else:
            id, text = value
            messages.append({"role": "tool", "tool_call_id": id, "content": text})
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    body = {"model": "tiny", "messages": messages, "tools": tools, "max_completion_tokens": 100}
    path = "/v1/chat/completions"
    if streams:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *frames, done = gateway.frames(path, **body, **options)
        assert done == "[DONE]"
        completion = completion_of([json.loads(frame) for frame in frames])
    else:
        completion = checked_completion(gateway.post(path, **body).text)
    message, usage = completion["choices"][0]["message"], completion["usage"]
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return Answer(
        message.get("reasoning_content") or "",
        message["content"] or "",
        [
            (each["function"]["name"], json.loads(each["function"]["arguments"]))
            for each in message.get("tool_calls", ())
        ],
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["completion_tokens_details"]["reasoning_tokens"],
    )


def by_messages(gateway: Gateway, turns: list[tuple[str, Any]], *, streams: bool) -> Answer:
    system = [value for kind, value in turns if kind == "system"]
    messages: list[dict[str, Any]] = []
    for kind, value in turns:
        if kind == "user":
            messages.append({"role": "user", "content": value})
        elif kind == "assistant":
            text, calls = value
            uses = [{"type": "tool_use", "id": id, "name": name, "input": input} for id, name, input in calls]
            messages.append({"role": "assistant", "content": [{"type": "text", "text": text}] * bool(text) + uses})
        elif kind == "result":
            id, text = value
            result = {"type": "tool_result", "tool_use_id": id, "content": text}
            if messages[-1]["role"] == "user":
                messages[-1]["content"].append(result)
            else:
                messages.append({"role": "user", "content": [result]})
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in FUNCTIONS
    ]
    body = {"model": "tiny", "messages": messages, "tools": tools, "max_tokens": 100, "stream": streams}
    answer = gateway.post("/v1/messages", **body, **({"system": system[0]} if system else {}))
    assert answer.status_code == 200, answer.text
    message = message_of(events_of(answer.text)) if streams else answer.json()
    usage = message["usage"]
    return Answer(
        "".join(block["thinking"] for block in message["content"] if block["type"] == "thinking"),
        "".join(block["text"] for block in message["content"] if block["type"] == "text"),
        [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"],
        usage["input_tokens"] + usage["cache_read_input_tokens"],
        usage["output_tokens"],
        usage["output_tokens_details"]["thinking_tokens"],
    )


def by_responses(gateway: Gateway, turns: list[tuple[str, Any]], *, streams: bool) -> Answer:
    system = [value for kind, value in turns if kind == "system"]
    items: list[dict[str, Any]] = []
    for kind, value in turns:
        if kind == "user":
            items.append({"role": "user", "content": value})
        elif kind == "assistant":
            text, calls = value
            items += [{"role": "assistant", "content": text}] * bool(text)
            items += [
                {"type": "function_call", "call_id": id, "name": name, "arguments": json.dumps(arguments)}
                for id, name, arguments in calls
            ]
        elif kind == "result":
            id, text = value
            items.append({"type": "function_call_output", "call_id": id, "output": text})
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    body = {"model": "tiny", "input": items, "tools": tools, "max_output_tokens": 100}
    body |= {"instructions": system[0]} if system else {}
    if streams:
        answer = gateway.post("/v1/responses", **body, stream=True)
        *_, last = (
            checked_event(line.removeprefix("data: ").encode())
            for line in answer.text.splitlines()
            if line.startswith("data: ")
        )
        response = last["response"]
    else:
        response = checked_response(gateway.post("/v1/responses", **body).text).to_dict()
    output, usage = response["output"], response["usage"]
    return Answer(
        "".join(item["content"][0]["text"] for item in output if item["type"] == "reasoning"),
        "".join(item["content"][0]["text"] for item in output if item["type"] == "message"),
        [(item["name"], json.loads(item["arguments"])) for item in output if item["type"] == "function_call"],
        usage["input_tokens"],
        usage["output_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"],
    )


CONVERSATIONS: dict[str, list[tuple[str, Any]]] = {
    "question": [("user", "Größe? 漢字 🙂")],
    "system": [("system", "Be brief.\n"), ("user", " hi ")],
    "turns": [("system", "Be brief."), ("user", "hi"), ("assistant", ("Hello.", [])), ("user", "again")],
    "call": [
        ("user", "Weather?"),
        ("assistant", ("Let me see.", [("call_1", "weather", CITY)])),
        ("result", ("call_1", "rain")),
    ],
    "calls": [
        ("system", "Use tools."),
        ("user", "Weather and time?"),
        ("assistant", ("", [("call_1", "weather", CITY), ("call_2", "clock", {})])),
        ("result", ("call_1", '{"sky": "clear"}')),
        ("result", ("call_2", "12:00")),
        ("assistant", ("It is noon.", [])),
        ("user", "Thanks. <|im_end|>"),
    ],
}
ANSWERS = ["Hm.</think>So.", f"Hm.</think>I ask.{CALL}{CALL}", "</think>plain"]


@pytest.mark.parametrize("turns", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("text", ANSWERS)
@pytest.mark.parametrize("streams", [False, True])
def test_all_apis_say_the_same(gateway: Gateway, turns: list[tuple[str, Any]], text: str, streams: bool) -> None:
    gateway.says(text=text)
    answers, prompts = [], []
    for ask in (by_chat, by_messages, by_responses):
        gateway.tiny.opened.clear()
        answers.append(ask(gateway, turns, streams=streams))
        prompts.append(gateway.tiny.opened[0][1].specs[0].prompt)
    assert answers[0] == answers[1] == answers[2]
    assert prompts[0] == prompts[1] == prompts[2]
    assert answers[0].prompt_tokens == len(prompts[0])
    assert (answers[0].text != "", len(answers[0].calls)) == (True, 2 * (CALL in text))
