"""Every event of a stream of ``/v1/responses``, and every whole answer, by the schema of OpenAI's client in its strict
mode: the client itself builds objects unchecked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseError

from headwater_server.errors import (
    BadRequest,
    CallableFailed,
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    HeadwaterError,
    QueueFull,
    ReplicaLost,
)
from headwater_server.lm.response_tools import ToolName
from headwater_server.lm.responses import ResponsesRequest
from headwater_server.lm.responses_answer import ResponsesAnswer
from headwater_server.lm.text.answer_parts import AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text_stream import TextPiece, TokenLogprob, Usage
from tests.app.lm.response_events import checked_event, checked_response, data, said, told
from tests.app.lm.scripted import LIMITS, tiny_text
from tests.app.lm.tool_text import TOOLS, tool_text

pytestmark = pytest.mark.heavy
USAGE = Usage(7, 5, 2, 3)
BODY: dict[str, Any] = {
    "model": "m",
    "input": "hi",
    "instructions": "Be brief.",
    "tools": [
        *[{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS],
        {"type": "custom", "name": "patch", "description": "Edits", "format": {"type": "text"}},
        {"type": "namespace", "name": "sky", "description": "x", "tools": [
            {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True},
            {"type": "custom", "name": "draw"},
        ]},
        {"type": "web_search"},
    ],
    "text": {"verbosity": "low"},
    "metadata": {"a": "b"},
    "max_tool_calls": 3,
    "parallel_tool_calls": True,
    "service_tier": "flex",
    "truncation": "auto",
    "store": False,
    "background": False,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "user": "u",
    "temperature": 0.5,
}  # fmt: skip


def form(**fields: Any) -> ResponsesAnswer:
    """The form of the answer to a request."""
    request = ResponsesRequest.read(json.dumps({**BODY, **fields}).encode())
    text = tool_text("hermes")
    return request.answer_form(request.plan(text, LIMITS), text.tokenizer.texts)


def call(number: int, name: str, *arguments: str) -> list[AnswerPart]:
    parts = [CallPart(number, "", piece) for piece in arguments]
    return [CallPart(number, name, "", f"call_{number}"), *parts]


def events_of(
    answer: ResponsesAnswer, parts: Sequence[AnswerPart], finish: str = "stop", error: HeadwaterError | None = None
) -> list[dict[str, Any]]:
    """The events of an answer that comes part by part."""
    events = list(answer.begin())
    for part in parts:
        events += answer.add([part], None)
    if error is None:
        events += answer.add([], finish)
    return [checked_event(data(event)) for event in [*events, *answer.end(USAGE, error)]]


THOUGHT: list[AnswerPart] = [ReasoningPart("Let me "), ReasoningPart("think.")]
PATCH = call(1, "patch", '{"inp', 'ut": "a\\n', "\\ud83d", '\\ude42b"}')
CASES: dict[str, list[AnswerPart]] = {
    "nothing": [],
    "text": ["Hel", "lo"],
    "reasoning": THOUGHT,
    "reasoning, text": [*THOUGHT, "Yes."],
    "reasoning, text, reasoning": [*THOUGHT, "Yes.", *THOUGHT],
    "reasoning, text, calls": [*THOUGHT, "So: ", *call(0, "weather", '{"city": "K', 'öln"}'), *PATCH],
    "calls within a namespace": [*call(0, "sky__look", "{}"), *call(1, "sky__draw", '{"input": "x"}')],
    "a call that is cut": call(0, "weather", '{"city'),
    "a custom call that is cut": call(0, "patch", '{"input": "ab', "c\\u00"),
    "a call of an unknown function": call(0, "unheard", "{}"),
}


@pytest.mark.parametrize("parts", CASES.values(), ids=CASES)
@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize(
    "fields",
    [{}, {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}],
    ids=["plain", "summary"],
)
def test_every_event_and_the_whole_answer_keep_to_the_schema(
    parts: list[AnswerPart], finish: str, fields: dict[str, Any]
) -> None:
    response = told(events_of(form(**fields), parts, finish))
    assert response["status"] == {"stop": "completed", "length": "incomplete"}[finish]
    details = {"reason": "max_output_tokens"} if finish == "length" else None
    assert response.get("incomplete_details") == details
    whole = form(**fields)
    whole.add(parts, finish)
    checked_response(whole.whole([TextPiece("", (), finish)], USAGE))


ERRORS = [
    (BadRequest("x", field="input"), "invalid_prompt"),
    (QueueFull("x", retry_after_s=1), "rate_limit_exceeded"),
    (ReplicaLost("x"), "server_error"),
    (CallableFailed("x"), "server_error"),
    (DeadlineExceeded("x"), "server_error"),
    (Cancelled("x"), "server_error"),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("parts", [[], ["Hel"], THOUGHT, PATCH[:3], call(0, "weather", '{"ci')])
def test_a_failed_stream_ends_with_the_protocols_own_error(
    error: HeadwaterError, code: str, parts: list[AnswerPart]
) -> None:
    *_, last = events_of(form(), parts, error=error)
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", code)
    assert last["response"]["status"] == "failed"
    assert all(item[-1] == "incomplete" for item in said(last["response"]))


def test_a_stream_that_fails_before_it_begins_has_all_events() -> None:
    events = [checked_event(data(event)) for event in form().end(USAGE, ReplicaLost("x"))]
    assert [event["type"].removeprefix("response.") for event in events] == ["created", "in_progress", "failed"]


def test_only_a_prompt_that_is_too_long_has_the_code_that_makes_clients_compact() -> None:
    *_, last = form().end(USAGE, ContextTooLong("x", field="input"))
    error = json.loads(data(last))["response"]["error"]
    assert error["code"] == "context_length_exceeded"  # which the client's schema lacks
    ResponseError.model_validate({**error, "code": "invalid_prompt"}, strict=True)
    assert "context_length_exceeded" not in [code for _, code in ERRORS]


def test_log_probabilities() -> None:
    answer = form(tool_choice="none", tools=[], include=["message.output_text.logprobs"])
    entries = [TokenLogprob(300, -0.5, ((300, -0.5), (301, -2.0)), 0)]
    events = [*answer.begin(), *answer.piece(0, TextPiece("a", entries, "stop")), *answer.end(USAGE, None)]
    told([checked_event(data(event)) for event in events])


def test_reasoning_is_content_and_where_asked_summary_and_carried() -> None:
    (item,) = told(events_of(form(), THOUGHT))["output"]
    assert item["content"] == [{"type": "reasoning_text", "text": "Let me think."}]
    assert (item["summary"], "encrypted_content" in item, item["status"]) == ([], False, "completed")
    fields = {"reasoning": {"summary": "concise"}, "include": ["reasoning.encrypted_content"]}
    response = told(events_of(form(**fields), THOUGHT))
    (item,) = response["output"]
    assert item["summary"] == [{"type": "summary_text", "text": "Let me think."}]
    assert item["encrypted_content"] == "headwater:Let me think."
    assert response["reasoning"]["summary"] == "concise"
    assert told(events_of(form(include_reasoning=False), [*THOUGHT, "x"]))["output"][0]["type"] == "message"


def test_reasoning_that_a_limit_cuts_is_incomplete() -> None:
    assert said(told(events_of(form(), THOUGHT, "length"))) == [("reasoning", "Let me think.", "incomplete")]


def test_a_custom_tool_is_called_with_its_input() -> None:
    (item,) = told(events_of(form(), call(0, "sky__draw", '{"input": "a\\"\\u00e9\\\\"}')))["output"]
    assert item["id"].startswith("ctc_")
    del item["id"]
    assert item == {
        "type": "custom_tool_call", "status": "completed", "call_id": "call_0", "name": "draw", "namespace": "sky",
        "input": 'a"é\\',
    }  # fmt: skip


@given(st.text(st.characters(codec="utf-8")), st.booleans(), st.sets(st.integers(1, 60)))
def test_a_custom_tools_input_is_exact_however_its_json_is_written_and_cut(
    text: str, is_ascii: bool, cuts: set[int]
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    ends = sorted(cut for cut in cuts if cut < len(arguments))
    pieces = [arguments[begin:end] for begin, end in zip([0, *ends], [*ends, len(arguments)], strict=True)]
    answer = ResponsesAnswer({"model": "m"}, tiny_text().tokenizer.texts, names={"patch": ToolName("patch", "", True)})
    answer.add(call(0, "patch", *pieces), "stop")
    assert said(json.loads(answer.whole([TextPiece("", (), "stop")], USAGE))) == [
        ("custom_tool_call", "patch", text, "completed")
    ]


@pytest.mark.parametrize(
    ("arguments", "input", "status"),
    [
        ('{"patch": "x"}', '{"patch": "x"}', "completed"),  # a model that calls the parameter by another name
        ('{"input": 1}', '{"input": 1}', "completed"),
        ('{"input": "x", "more": 1}', "x", "completed"),
        ('{"in', "", "incomplete"),
        ('{"input": "x\\', "x", "incomplete"),
        ('{"input": "x\\ud83d and so on and so on"}', "x", "incomplete"),  # half a character is no JSON
        ('{"input": "x\ny"}', "x\ny", "incomplete"),
        ("", "", "incomplete"),
    ],
)
def test_arguments_that_are_not_the_input(arguments: str, input: str, status: str) -> None:
    for pieces in ([arguments], list(arguments)):
        response = told(events_of(form(), call(0, "patch", *pieces)))
        assert said(response) == [("custom_tool_call", "patch", input, status)]
