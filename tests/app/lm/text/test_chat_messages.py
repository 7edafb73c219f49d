"""OpenAI's messages on their way into a chat template."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from headwater_server.errors import BadRequest
from headwater_server.lm.text.chat_messages import ROLES, checked_messages


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "here"}]
    assert checked_messages([{"role": "user", "content": parts}], 10) == [{"role": "user", "content": "Look:\nhere"}]


def test_other_messages_stay_as_they_are() -> None:
    messages = [
        {"role": "user", "content": "Hi", "name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": None},
    ]
    assert checked_messages(messages, 10) == messages


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({}, "messages: expected an array of messages, got an object"),
        ([], "messages: expected at least one message, got an empty array"),
        (["Hi"], "messages[0]: expected an object with 'role' and 'content', got 'Hi'"),
        ([{"content": "Hi"}], f"messages[0].role: expected one of {', '.join(ROLES)}, got null"),
        ([{"role": "user"}], "messages[0].content: expected a string or an array of text parts, got null"),
        ([{"role": "user", "content": 1}], "messages[0].content: expected a string or an array of text parts, got 1"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": [TEXT, {"type": "image_url"}]}],
            "messages[1].content[1].type: expected 'text', the only kind of content this model takes, got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: expected a string, got null"),
        (
            [{"role": "user", "content": ["a"]}],
            'messages[0].content[0]: expected a content part like {"type": "text", "text": "..."}, got \'a\'',
        ),
    ],
)
def test_a_wrong_message_is_named(messages: object, message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        checked_messages(messages, 10)
    assert caught.value.message == message
    assert caught.value.field == message.partition(": ")[0]


@pytest.mark.parametrize("size", [600_000, 6_000_000])
@pytest.mark.parametrize("calls", [1, 100])
@pytest.mark.parametrize("element", ["[]", '{"a":0}', "1e9"])
def test_what_arguments_of_calls_are_decoded_to_is_bounded(element: str, calls: int, size: int) -> None:
    count = (6 if element == "1e9" else 1) * size // calls // len(element)
    arguments = '{"a":[' + f"{element}," * count + "0]}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call] * calls}
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match="in the arguments of all tool calls together, got more"):
            checked_messages([message], 10)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(arguments) * calls
    finally:
        tracemalloc.stop()


def test_arguments_of_calls_may_be_long() -> None:
    arguments = {"text": "[{:," * 100_000, "numbers": list(range(10_000))}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    (message,) = checked_messages([{"role": "assistant", "content": "", "tool_calls": [call] * 9}], 10)
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [arguments] * 9
