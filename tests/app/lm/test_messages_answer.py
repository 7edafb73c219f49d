"""Answers of ``/v1/messages``, whole and as events, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater_server.errors import CallableFailed, ContextTooLong, HeadwaterError, QueueFull, Unavailable
from headwater_server.lm.messages_answer import MessagesAnswer
from headwater_server.lm.openai_answer import Event
from headwater_server.lm.text.answer_parts import AnswerPart, CallPart, ReasoningPart
from headwater_server.lm.text_stream import Usage
from tests.app.lm.message_events import message_of

USAGE = Usage(10, 7, 4)
CALL: list[AnswerPart] = [CallPart(0, "f", "", "c1"), CallPart(0, "", '{"a": '), CallPart(0, "", "1}")]
BOTH: list[AnswerPart] = [ReasoningPart("Hm"), ReasoningPart("."), "So", ".", *CALL, CallPart(1, "g", "", "c2")]


def answer(max_tokens: int = 99, **options: bool) -> MessagesAnswer:
    return MessagesAnswer("m", None, max_tokens, **options)


def whole(
    parts: Sequence[AnswerPart], finish: str = "stop", stop: str | None = None, usage: Usage = USAGE, **options: Any
) -> dict[str, Any]:
    form = answer(**options)
    form.add(parts, finish, stop)
    message: dict[str, Any] = json.loads(form.body(usage))
    return message


def decoded(events: Sequence[Event]) -> list[dict[str, Any]]:
    found = []
    for event in events:
        assert isinstance(event, tuple)
        name, data = event
        found.append(json.loads(data))
        assert found[-1]["type"] == name.decode()
    return found


def streamed(
    pieces: Sequence[Sequence[AnswerPart]], finish: str = "stop", stop: str | None = None, **options: Any
) -> list[dict[str, Any]]:
    form = answer(**options)
    form.count(USAGE._replace(completion_tokens=0))
    events = list(form.begin())
    for parts in pieces:
        events += form.add(parts, None)
    events += form.add([], finish, stop)
    return decoded([*events, *form.end(USAGE, None)])


def test_a_whole_message() -> None:
    message = whole(BOTH)
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "headwater"},
            {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 7,
        },
    }  # fmt: skip


@given(st.data())
def test_a_stream_is_the_whole_in_pieces(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(BOTH)))))
    pieces = [BOTH[start:end] for start, end in zip([0, *cuts], [*cuts, len(BOTH)], strict=True)]
    message, expected = message_of(streamed(pieces)), whole(BOTH)
    assert {**message, "id": ""} == {**expected, "id": ""}


def test_the_events_of_a_message() -> None:
    kinds = [event["type"] for event in streamed([BOTH])]
    block = ["content_block_start", "content_block_delta", "content_block_delta"]
    assert kinds == [
        "message_start", *block, "content_block_delta", "content_block_stop", *block, "content_block_stop", *block,
        "content_block_stop", "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_a_call_keeps_its_numbers_keys_and_order() -> None:
    arguments = '{"b": 123456789012345678901, "a": 1e400, "b": 0.10}'
    form = answer()
    form.add([CallPart(0, "f", "", "c"), CallPart(0, "", arguments)], "stop")
    assert f'"input":{arguments}}}'.encode() in form.body(USAGE)


@pytest.mark.parametrize(
    ("parts", "finish", "stop", "max_tokens", "expected"),
    [
        (["a"], "stop", None, 99, ("end_turn", None)),
        (["a"], "stop", "END", 99, ("stop_sequence", "END")),
        (CALL, "stop", None, 99, ("tool_use", None)),
        (CALL, "length", None, 7, ("max_tokens", None)),
        (["a"], "length", None, 7, ("max_tokens", None)),
        (["a"], "length", None, 8, ("model_context_window_exceeded", None)),
    ],
)
def test_why_an_answer_ends(
    parts: list[AnswerPart], finish: str, stop: str | None, max_tokens: int, expected: tuple[str, str | None]
) -> None:
    message = whole(parts, finish, stop, max_tokens=max_tokens)
    assert (message["stop_reason"], message["stop_sequence"]) == expected
    message = message_of(streamed([parts], finish, stop, max_tokens=max_tokens))
    assert (message["stop_reason"], message["stop_sequence"]) == expected


def test_thinking_can_be_hidden() -> None:
    parts: list[AnswerPart] = [ReasoningPart("secret"), "So."]
    expected = [{"type": "thinking", "thinking": "", "signature": "headwater"}, {"type": "text", "text": "So."}]
    assert whole(parts, hides_thinking=True)["content"] == expected
    events = streamed([parts], hides_thinking=True)
    assert message_of(events)["content"] == expected
    assert "secret" not in json.dumps(events)


def test_an_answer_without_anything_has_an_empty_text() -> None:
    expected = [{"type": "text", "text": ""}]
    assert whole([])["content"] == expected
    assert message_of(streamed([]))["content"] == expected


def test_a_call_that_the_limit_has_cut_is_left_out() -> None:
    cut: list[AnswerPart] = [*CALL, CallPart(1, "g", "", "c2"), CallPart(1, "", '{"a')]
    message = whole(cut, "length", max_tokens=7)
    assert [block["id"] for block in message["content"]] == ["c1"]
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("arguments", ["[]", "{", "1", '{"a": 1} x'])
def test_a_call_whose_arguments_are_no_object_is_an_error(arguments: str) -> None:
    form = answer()
    form.add([CallPart(0, "f", "", "c"), CallPart(0, "", arguments)], "stop")
    with pytest.raises(CallableFailed, match="`f`"):
        form.body(USAGE)


def test_usage_counts_thinking_only_if_there_was_some() -> None:
    usage = whole(["a"], usage=USAGE._replace(reasoning_tokens=3))["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": 3}
    assert "output_tokens_details" not in whole(["a"])["usage"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (QueueFull("full"), "rate_limit_error", "full"),
        (Unavailable("gone"), "overloaded_error", "gone"),
        (CallableFailed("broken"), "api_error", "broken"),
        (ContextTooLong("messages: too many"), "invalid_request_error", "prompt is too long: messages: too many"),
    ],
)
def test_an_error_ends_a_stream(error: HeadwaterError, kind: str, message: str) -> None:
    form = answer()
    form.begin()
    form.add(["a"], None)
    assert decoded(form.end(USAGE, error)) == [{"type": "error", "error": {"type": kind, "message": message}}]
