"""Requests of responses as vLLM's chat requests, and vLLM's answers as responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater_server.errors import BadRequest, ReplicaLost
from headwater_server.lm.known_fields import read_known
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.telemetry.recorder import recorder
from headwater_server.vllm.answers import TokenCount
from headwater_server.vllm.chat_parts import PartsRelay
from headwater_server.vllm.relayed_responses import client_error, from_responses
from headwater_server.vllm.requests import VllmRequest
from tests.app.lm.response_events import checked_event, checked_response, data, said, told
from tests.app.lm.test_recorded_requests import recorded
from tests.app.vllm.pictures import png_url

pytestmark = pytest.mark.heavy
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch"}
SPACE: dict[str, Any] = {"type": "namespace", "name": "sky", "description": "x", "tools": [FUNCTION]}
RECORDED = [(name, request) for name, request in recorded() if request["path"] == "/v1/responses"]
IMAGE = png_url(2, 2)


def asked(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.read(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def relayed(**fields: Any) -> VllmRequest:
    return from_responses(asked(**fields))[0]


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        relayed(**fields)
    return caught.value


def test_the_conversation_and_the_fields_are_those_of_a_chat() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sampling: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "presence_penalty": 0, "frequency_penalty": 1,
        "repetition_penalty": 1.5, "seed": 0, "stop": ["x"], "stop_token_ids": [1], "ignore_eos": False,
        "logit_bias": {"1": 2}, "chat_template_kwargs": {"a": 1}, "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    request = relayed(
        instructions="Be brief.", max_output_tokens=7, reasoning={"effort": "high", "summary": "auto"}, store=False,
        text={"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}},
        include_reasoning=False, stream=True, timeout_s=5, metadata={"a": "b"}, parallel_tool_calls=False, **sampling,
    )  # fmt: skip
    assert (request.route, request.streams, request.timeout_s, request.ignored) == ("chat", True, 5, ())
    assert request.body == {
        **sampling, "model": "m", "max_completion_tokens": 7, "reasoning_effort": "high", "include_reasoning": False,
        "parallel_tool_calls": False,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
    }  # fmt: skip


def test_tools_are_those_of_a_chat() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tools = [SPACE, {**CUSTOM, "format": regex}, {"type": "web_search"}]
    request = relayed(tools=tools, truncation="auto", text={"verbosity": "low"})
    assert [tool["function"]["name"] for tool in request.body["tools"]] == ["sky__f", "patch"]
    assert request.ignored == ("tools[2]", "truncation", "text.verbosity", "tools[1].format")
    required = relayed(tools=tools[:2], tool_choice={"type": "custom", "name": "patch"})
    assert (required.ignored, required.body["tool_choice"]["function"]) == ((), {"name": "patch"})
    assert "tools" not in relayed(tools=[{"type": "web_search"}], tool_choice="auto").body
    assert refused(tools=[], tool_choice="required").field == "tool_choice"


def test_images_go_to_vllm_and_are_not_fetched() -> None:
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": IMAGE}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert relayed(input=[call, result]).body["messages"][1] == {
        "role": "tool", "tool_call_id": "c", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}],
    }  # fmt: skip
    for part, field in (
        ({"type": "input_image", "image_url": "http://x/y.png"}, "image_url"),
        ({"type": "input_file", "file_url": "http://x/y.png"}, "file_url"),
    ):
        error = refused(input=[{"role": "user", "content": [part]}])
        assert error.field == f"input[0].content[0].{field}"
        assert "data: URL" in error.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_is_not_offered_is_refused(fields: dict[str, Any], field: str) -> None:
    assert refused(**fields).field == field


def test_vllms_errors_name_the_clients_fields() -> None:
    _, form = from_responses(asked(input=[{"role": "user", "content": "a"}], tools=[SPACE]))
    for field, named in (
        ("messages[0].content", "input[0].content"), ("max_completion_tokens", "max_output_tokens"),
        ("tools[0].function.name", "tools[0].tools[0].name"), (None, None),
    ):  # fmt: skip
        assert client_error(BadRequest("x: wrong", field=field), form).field == named


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}).encode()


def function(**fields: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "id": "c1", "type": "function", "function": fields}]


CHUNKS = [
    chunk(role="assistant", content=""), chunk(reasoning="Let me "), chunk(reasoning="think."), chunk(content="So:"),
    chunk(tool_calls=function(name="patch", arguments="")), chunk(tool_calls=function(arguments='{"input": "a')),
    chunk("tool_calls", tool_calls=function(arguments='\\n"}')),
]  # fmt: skip
ITEMS = [
    ("reasoning", "Let me think.", "completed"), ("message", "So:", "completed"),
    ("custom_tool_call", "patch", "a\n", "completed"),
]  # fmt: skip


def answer(**fields: Any) -> PartsRelay:
    return PartsRelay(asked(tools=[CUSTOM], **fields).relayed_answer(), TokenCount(recorder().language_model("m")))


def test_a_stream_keeps_to_the_schema() -> None:
    relay = answer(reasoning={"summary": "auto"})
    events = [event for piece in CHUNKS for event in relay.events(b"", piece)]
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 2}}
    relay.events(b"", json.dumps({"choices": [], "usage": usage}).encode())
    response = told([checked_event(data(event)) for event in [*events, *relay.end(None)]])
    assert said(response) == ITEMS
    assert response["output"][0]["summary"][0]["text"] == "Let me think."
    assert (response["usage"]["output_tokens"], response["usage"]["input_tokens_details"]["cached_tokens"]) == (9, 2)


def test_a_whole_answer_says_the_same() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "patch", "arguments": '{"input": "a\\n"}'}}]
    message = {"role": "assistant", "content": "So:", "reasoning": "Let me think.", "tool_calls": calls}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}], "usage": None}
    whole = answer().whole(json.dumps(body).encode())
    checked_response(whole)
    assert said(json.loads(whole)) == ITEMS


def test_a_stream_that_is_lost_ends_with_the_protocols_own_error() -> None:
    relay = answer()
    events = [*relay.events(b"", CHUNKS[0]), *relay.events(b"", CHUNKS[3]), *relay.end(ReplicaLost("lost"))]
    *_, last = [checked_event(data(event)) for event in events]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")


def test_arguments_without_a_call_are_no_answer_of_vllm() -> None:
    with pytest.raises(ValueError, match="a call before its arguments"):
        answer().events(b"", chunk(tool_calls=function(arguments="{}")))


@pytest.mark.parametrize(("name", "request_"), RECORDED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_recorded_request_is_taken(name: str, request_: dict[str, Any]) -> None:
    relayed, _ = from_responses(read_known(json.dumps(request_["body"]).encode(), ResponsesRequest)[0])
    assert relayed.body["messages"], name
