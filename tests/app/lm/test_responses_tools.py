"""Tools in responses: the answers, whole and in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage

from headwater.lm.grammars import KINDS
from headwater_server.errors import ReplicaLost
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.responses_answer import ResponsesAnswer
from headwater_server.lm.text.answer_reader import REASONING, AnswerReading
from headwater_server.lm.text.tool_calls import FORMATS, ToolUse
from headwater_server.lm.text_stream import TextPiece, Usage
from tests.app.lm.response_events import data, said, told
from tests.app.lm.scripted import (
    LIMITS,
    Gateway,
    Script,
    ScriptedDispatcher,
    ScriptedModels,
    ids_of,
    serving,
    tiny_text,
)
from tests.app.lm.tool_text import ARGUMENTS, CALL, PIECES, TOOLS, tool_text

pytestmark = pytest.mark.heavy
FLAT: Any = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
"""The tools as this API has them."""
NAMES: dict[str, Any] = {"weather": {}, "clock": {}}
USAGE = Usage(1, 1)


def events_of(answer: str, cuts: Sequence[int], finish: str, use: ToolUse) -> list[dict[str, Any]]:
    """The events of an answer that comes in pieces which end there."""
    form = ResponsesAnswer({"model": "m"}, tiny_text().tokenizer.texts, AnswerReading(use, REASONING["think"]))
    events = form.begin()
    for begin, end in zip([0, *cuts], [*cuts, len(answer)], strict=True):
        events += form.piece(0, TextPiece(answer[begin:end], (), finish if end == len(answer) else None))
    return [json.loads(data(event)) for event in [*events, *form.end(USAGE, None)]]


def whole_of(answer: str, finish: str, use: ToolUse) -> Any:
    form = ResponsesAnswer({"model": "m"}, tiny_text().tokenizer.texts, AnswerReading(use, REASONING["think"]))
    return json.loads(form.whole([TextPiece(answer, (), finish)], USAGE))


@given(PIECES, st.integers(1, 20), st.sampled_from(["stop", "length"]), st.booleans(), st.booleans())
def test_a_stream_says_the_same_as_a_whole_answer(
    answer: str, size: int, finish: str, is_constrained: bool, only_first: bool
) -> None:
    use = ToolUse(FORMATS["hermes"], NAMES, is_constrained=is_constrained, only_first=only_first)
    response = told(events_of(answer, range(size, len(answer), size), finish, use))
    whole = whole_of(answer, finish, use)
    assert said(response) == said(whole)
    assert {**response, "output": [], "id": "", "created_at": 0, "completed_at": 0} == {
        **whole, "output": [], "id": "", "created_at": 0, "completed_at": 0,
    }  # fmt: skip
    ids = [item["id"] for item in response["output"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("answer", "finish", "items"),
    [
        (f"So:\n{CALL}", "stop", [("message", "So:", "completed"), ("function_call", ARGUMENTS, "completed")]),
        (f"{CALL}\n{CALL}", "stop", [("function_call", ARGUMENTS, "completed")] * 2),
        (f"{CALL} Wait.", "stop", [("function_call", ARGUMENTS, "completed"), ("message", " Wait.", "completed")]),
        (f"{CALL}\nAnd", "length", [("function_call", ARGUMENTS, "completed"), ("message", "\nAnd", "incomplete")]),
        (f"{CALL}<tool_c", "length", [("function_call", ARGUMENTS, "completed"), ("message", "<tool_c", "incomplete")]),
        (f"<think>{CALL}</think>", "stop", [("reasoning", CALL, "completed")]),
        ("", "stop", [("message", "", "completed")]),
        ("\n", "length", [("message", "\n", "incomplete")]),
    ],
)
def test_items_come_in_the_texts_order(answer: str, finish: str, items: list[Any]) -> None:
    found = said(whole_of(answer, finish, ToolUse(FORMATS["hermes"], NAMES)))
    assert [(item[0], *item[-2:]) for item in found] == items
    assert {item[1] for item in found if item[0] == "function_call"} <= {"weather"}


def test_a_required_call_that_was_cut_is_incomplete_and_one_that_is_whole_is_not() -> None:
    use = ToolUse(FORMATS["hermes"], NAMES, is_constrained=True)
    for end in range(len(CALL)):
        cut = CALL[:end]
        response = whole_of(cut, "length", use)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        (item,) = said(response)
        if item[0] == "message":
            assert item == ("message", "", "incomplete")
        else:
            assert ARGUMENTS.startswith(item[2])
            assert item[3] == ("completed" if item[2] == ARGUMENTS else "incomplete")


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
    response = gateway.client.responses.create(model="tiny", input="hi", tools=FLAT, parallel_tool_calls=False)
    message, call = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
    assert call.id is not None
    assert call.id.startswith("fc_")
    assert call.call_id.startswith("call_")
    assert (response.output_text, response.status) == ("Let me see.", "completed")
    assert (response.tool_choice, response.parallel_tool_calls) == ("auto", False)
    assert [tool.to_dict() for tool in response.tools] == [
        FLAT[0], {"type": "function", "name": "clock", "description": None, "parameters": None, "strict": False},
    ]  # fmt: skip
    Response.model_validate_json(response.to_json())  # the client itself checks nothing


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_may_have_an_integer_of_any_size(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gateway.says(text=CALL)
    monkeypatch.setattr(gateway.tiny, "limits", msgspec.structs.replace(LIMITS, grammars=KINDS))
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 2**70}}}
    tools = [{"type": "function", "name": "count", "parameters": schema}]
    form = {"format": {"type": "json_schema", "name": "count", "schema": schema}}
    for fields in ({"tools": tools}, {"tools": tools, "tool_choice": "required"}, {"text": form}):
        answer = gateway.post("/v1/responses", model="tiny", input="hi", stream=stream, **fields)
        assert answer.status_code == 200, answer.text
        assert str(2**70) in answer.text


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_stream_of_calls(gateway: Gateway, chunk: int) -> None:
    gateway.says(text=f"Let me see.\n{CALL}\n{CALL}", chunk=chunk)
    events = list(gateway.client.responses.create(model="tiny", input="hi", tools=FLAT, stream=True))
    for event in events:
        type(event).model_validate_json(event.to_json())
    response = told([event.to_dict() for event in events])
    whole = gateway.client.responses.create(model="tiny", input="hi", tools=FLAT)
    assert said(response) == said(whole.to_dict())
    assert [item[0] for item in said(response)] == ["message", "function_call", "function_call"]
    assert len({item["call_id"] for item in response["output"][1:]}) == 2


def test_the_clients_stream_helper_collects_calls_and_the_next_turn_takes_them(gateway: Gateway) -> None:
    gateway.says(text=f"Let me see.\n{CALL}", chunk=2)
    with gateway.client.responses.stream(model="tiny", input="hi", tools=FLAT) as stream:
        done = [event.arguments for event in stream if event.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    assert done == [ARGUMENTS]
    _, call = final.output
    assert call.type == "function_call"
    gateway.says(text="It rains.")
    items: Any = [
        {"role": "user", "content": "hi"},
        *final.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = gateway.client.responses.create(model="tiny", input=items, tools=FLAT)
    assert answer.output_text == "It rains."
    prompt = gateway.tiny.opened[-1][1].specs[0].prompt
    shown = tool_text("hermes").tokenizer.decode(prompt, skip_special_tokens=False)
    *_, turn = shown.partition("<|im_start|>assistant\nLet me see.")
    assert turn.lstrip().startswith(CALL)
    assert "<|im_start|>tool\nrain" in shown


def test_with_none_a_call_is_text(gateway: Gateway) -> None:
    gateway.says(text=CALL)
    response = gateway.client.responses.create(model="tiny", input="hi", tools=FLAT, tool_choice="none")
    assert (response.output_text, response.tool_choice) == (CALL, "none")


def test_a_failure_after_a_call_keeps_it(gateway: Gateway) -> None:
    gateway.says(
        text=f"{CALL}\nAnd then what", fail_after=len(ids_of(CALL)) + 2, error=ReplicaLost("the replica ended"), chunk=1
    )
    *_, last = gateway.client.responses.create(model="tiny", input="hi", tools=FLAT, stream=True)
    assert last.type == "response.failed"
    call, *rest = said(last.response.to_dict())
    assert call == ("function_call", "weather", ARGUMENTS, "completed")
    assert all(item[2] == "incomplete" for item in rest)


def test_tools_that_this_server_does_not_run_are_left_out_unless_one_must_be_called(gateway: Gateway) -> None:
    for kind in ("web_search", "file_search", "code_interpreter", "mcp", "tool_search"):
        tools: Any = [*FLAT, {"type": kind}]
        gateway.says(text=CALL)
        raw = gateway.client.responses.with_raw_response.create(model="tiny", input="hi", tools=tools)
        assert raw.headers["headwater-ignored"] == "tools[2]"
        with pytest.raises(openai.BadRequestError) as caught:
            gateway.client.responses.create(model="tiny", input="hi", tools=tools, tool_choice="required")
        assert caught.value.param == "tools[2].type"
        assert "expected functions only where a tool must be called" in caught.value.message
    unheard: Any = [{"type": "unheard"}]
    with pytest.raises(openai.BadRequestError, match="'function', the only type of tool this model takes"):
        gateway.client.responses.create(model="tiny", input="hi", tools=unheard)


def test_the_header_has_a_bounded_length(gateway: Gateway) -> None:
    gateway.says(text=CALL)
    tools = [*FLAT, *[{"type": "web_search"}] * 5000]
    answer = gateway.post("/v1/responses", model="tiny", input="hi", tools=tools)
    assert answer.status_code == 200
    assert answer.headers["headwater-ignored"].endswith("tools[101], ...")


def test_a_function_in_a_namespace(gateway: Gateway) -> None:
    space: Any = {"type": "namespace", "name": "mcp__sky", "description": "x", "tools": [FLAT[0], {"type": "shell"}]}
    call = CALL.replace('"weather"', '"mcp__sky__weather"')
    gateway.says(text=call)
    body = {"model": "tiny", "input": "hi", "tools": [FLAT[1], space]}
    answer = gateway.post("/v1/responses", **body)
    assert answer.headers["headwater-ignored"] == "tools[1].tools[1]"
    (item,) = answer.json()["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "weather", "mcp__sky")
    assert answer.json()["tools"][1] == space
    streamed = [json.loads(frame.split("data: ", 1)[1]) for frame in _blocks(gateway, body)]
    (done,) = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert (done["name"], done["namespace"]) == ("weather", "mcp__sky")
    body["input"] = [{"role": "user", "content": "hi"}, item, {**RESULT, "call_id": item["call_id"]}]
    assert gateway.post("/v1/responses", **body).status_code == 200
    assert gateway.post("/v1/responses", **{**body, "tools": [{**space, "tools": {}}]}).json()["error"]["param"] == (
        "tools[0].tools"
    )


RESULT = {"type": "function_call_output", "output": "sunny"}


def _blocks(gateway: Gateway, body: dict[str, Any]) -> list[str]:
    answer = gateway.post("/v1/responses", **body, stream=True)
    return answer.text.removesuffix("\n\n").split("\n\n")


def test_earlier_calls_of_other_kinds_go_back_to_the_template() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "weather", "input": "x\ny"}
    spaced = {"type": "function_call", "call_id": "c2", "name": "clock", "namespace": "sky", "arguments": "{}"}
    results = [{"type": f"{kind}_output", "call_id": id, "output": "so"} for kind, id in (("custom_tool_call", "c1"),
               ("function_call", "c2"))]  # fmt: skip
    body = {"model": "m", "input": [{"role": "user", "content": "hi"}, custom, spaced, *results], "tools": FLAT}
    text = tool_text("hermes")
    (spec,) = ResponsesRequest.read(json.dumps(body).encode()).plan(text, LIMITS).specs
    prompt = text.tokenizer.decode(spec.prompt, skip_special_tokens=False)
    assert '{"name": "weather", "arguments": {"input": "x\\ny"}}' in prompt
    assert '{"name": "sky__clock", "arguments": {}}' in prompt


def test_a_model_without_a_format_of_calls(gateway: Gateway) -> None:
    with pytest.raises(openai.BadRequestError, match=r"options\.tool_parser"):
        gateway.client.responses.create(model="plain", input="hi", tools=FLAT)
