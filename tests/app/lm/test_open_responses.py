"""The scenarios of the Open Responses specification's compliance suite (openresponses.org), and its rules for streams.

A tool is asked for by ``auto``, as there: the scripted model calls it. Images are refused by models of text.
"""

from __future__ import annotations

import json
from types import NoneType
from typing import Any

import pytest

from tests.app.lm.response_events import checked_event, told
from tests.app.lm.scripted import Gateway, Script, ScriptedDispatcher, ScriptedModels, serving
from tests.app.lm.tool_text import ARGUMENTS, CALL, WEATHER, tool_text

pytestmark = pytest.mark.heavy
NUMBER = (int, float)
RESPONSE: dict[str, Any] = {
    "id": str, "object": str, "created_at": int, "completed_at": (int, NoneType), "status": str,
    "incomplete_details": (dict, NoneType), "model": str, "previous_response_id": (str, NoneType),
    "instructions": (str, NoneType), "output": list, "error": (dict, NoneType), "tools": list,
    "tool_choice": (str, dict), "truncation": str, "parallel_tool_calls": bool, "text": dict, "top_p": NUMBER,
    "presence_penalty": NUMBER, "frequency_penalty": NUMBER, "top_logprobs": int, "temperature": NUMBER,
    "reasoning": (dict, NoneType), "usage": (dict, NoneType), "max_output_tokens": (int, NoneType),
    "max_tool_calls": (int, NoneType), "store": bool, "background": bool, "service_tier": str, "metadata": dict,
    "safety_identifier": (str, NoneType), "prompt_cache_key": (str, NoneType),
}  # fmt: skip
"""The fields that the specification requires of a response, each with its types."""
USAGE: dict[str, Any] = {
    "input_tokens": int, "output_tokens": int, "total_tokens": int, "input_tokens_details": dict,
    "output_tokens_details": dict,
}  # fmt: skip
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"id": str, "status": str, "role": str, "content": list},
    "function_call": {"id": str, "call_id": str, "name": str, "arguments": str, "status": str},
    "reasoning": {"id": str, "summary": list, "content": list},
}
FUNCTION = {"type": "function", **WEATHER["function"]}
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


SCENARIOS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "basic response": ("Hello to you.", {"input": [user("Greet me in three words.")]}, ["message"]),
    "a string": ("Done.", {"input": "A status in one sentence."}, ["message"]),
    "system prompt": (
        "Ahoy!",
        {"input": [{"type": "message", "role": "system", "content": "Speak as a pirate."}, user("Greet me.")]},
        ["message"],
    ),
    "tool calling": (f"Let me see.\n{CALL}", {"input": [user("And in Köln?")], "tools": [FUNCTION]},
                     ["message", "function_call"]),
    "tool results": (
        "It rains.",
        {
            "input": [
                user("And in Köln?"),
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
                {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            ],
            "tools": [FUNCTION],
        },
        ["message"],
    ),
    "multi-turn": (
        "You are Ann.",
        {"input": [user("I am Ann."), {"type": "message", "role": "assistant", "content": "Hello Ann."},
                   user("Who am I?")]},
        ["message"],
    ),
    "reasoning": ("She said it.</think>\nYou are Ann.", {"model": "reasoning", "input": "Who am I?"},
                  ["reasoning", "message"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def gateway() -> Any:
    tiny = ScriptedDispatcher("tiny", Script(), language_text=lambda: tool_text("hermes"))
    reasoning = ScriptedDispatcher("reasoning", Script(), language_text=lambda: tool_text("reasoning"))
    models = ScriptedModels(tiny, reasoning)
    with serving(models) as url:
        gateway = Gateway(url, models, tiny, reasoning)
        yield gateway
        gateway.client.close()


def check(value: dict[str, Any], fields: dict[str, Any]) -> None:
    for name, kinds in fields.items():
        assert isinstance(value[name], kinds), (name, value.get(name))


def check_response(response: dict[str, Any], kinds: list[str]) -> None:
    check(response, RESPONSE)
    check(response["usage"], USAGE)
    assert [item["type"] for item in response["output"]] == kinds
    assert response["status"] == "completed"
    for item in response["output"]:
        check(item, ITEMS[item["type"]])
    for tool in response["tools"]:
        assert {"type", "name", "description", "parameters", "strict"} <= tool.keys()


@pytest.mark.parametrize(("text", "fields", "kinds"), SCENARIOS.values(), ids=SCENARIOS)
def test_a_scenario_whole_and_streamed(gateway: Gateway, text: str, fields: Any, kinds: list[str]) -> None:
    for dispatcher in (gateway.tiny, gateway.plain):
        dispatcher.script = Script(text=text)
    body = {"model": "tiny", **fields}
    whole = gateway.post("/v1/responses", **body)
    assert whole.headers["content-type"] == "application/json"
    check_response(whole.json(), kinds)
    streamed = gateway.post("/v1/responses", **body, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in streamed.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = checked_event(data.removeprefix("data: ").encode())
        assert name == f"event: {event['type']}"
        events.append(event)
    told(events)
    check_response(json.loads(data.removeprefix("data: "))["response"], kinds)


def test_images_are_refused_by_a_model_of_text(gateway: Gateway) -> None:
    content = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": IMAGE}]
    answer = gateway.post("/v1/responses", model="tiny", input=[user(content)])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[0].content[1].type")
